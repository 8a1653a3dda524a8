"""``DiLoCo`` and streaming DiLoCo: replicas that train for long by themselves, and an outer optimizer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from offbeat.optim.optimizers import SGD
from offbeat.replicas.level import Level
from offbeat.replicas.options import (
    Every,
    Fragments,
    LevelOptions,
    MakeOuter,
    NonFinite,
    ReplicaOptions,
    Warmup,
    check_outer,
    with_options,
)
from offbeat.replicas.replica import Replica
from offbeat.wire.codecs import CodecSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DiLoCo"]

#: The outer options that were best, or as good as others, for Muon and for AdamW inside, in runs of 24 to 104 rounds of
#: four replicas (benchmarks/results/convergence-choose.md, convergence-recipes.md). In runs of 200 rounds and more, 0.6
#: and 0.9, as published, are better.
OUTER_LR, OUTER_MOMENTUM = 0.8, 0.6


class DiLoCo(Replica):
    r"""Replicas train by themselves for ``every`` steps; an outer optimizer with Nesterov momentum moves them all.

    The mean change of the replicas is the gradient of the outer optimizer: with :math:`a` the parameters after the last
    round and :math:`\bar x` the mean of the replicas' parameters,

    .. math:: \Delta = a - \bar x, \qquad b \leftarrow \mu b + \Delta, \qquad
       a \leftarrow a - \eta\, (\Delta + \mu b), \qquad x_i \leftarrow a .

    With ``fragments`` parts of the parameters take turns, and with ``delay`` they are exchanged while training goes on
    (streaming DiLoCo): :math:`k` steps later :math:`x_i \leftarrow \alpha x_i + (1 - \alpha) a`.

    Args:
        opt: the inner optimizer (usually AdamW), overlapped or not.
        module: the module it trains: DDP, plain, or ``fully_shard``-ed.
        every: the number of steps between rounds; the first comes after as many steps, of fragments the last one's.
        outer_lr: :math:`\eta`; None is 0.8.
        outer_momentum: :math:`\mu`, at least 0 and below 1. The defaults are for runs of up to about 200 rounds; in
            longer ones 0.6 and 0.9 were better.
        fragments: parts of the parameters that are exchanged at different steps; see :class:`offbeat.Level`.
        delay: 0 waits for a round; :math:`k > 0` applies it :math:`k` steps later.
        mixing: :math:`\alpha`; by default 0.
        codec: how differences are encoded: None, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"int2"`` or an
            :class:`offbeat.TopK`.
        error_feedback: add what encoding has lost, multiplied by this number, to the next round.
        warmup: the number of steps with globally averaged gradients.
        outer: makes another outer optimizer, from parameter groups, in place of ``outer_lr`` and ``outer_momentum``.
        deadline: how many seconds a collective may take; by default the process group's timeout.
        nonfinite: what to do if a replica has NaN or infinite parameters; see :class:`offbeat.Level`.
        level: further options of :class:`offbeat.Level`, as a dictionary.
        options: further options of :class:`offbeat.Replica`.

    Example:
        >>> import torch, torch.distributed as dist, offbeat
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.DiLoCo(offbeat.AdamW(model.parameters()), model, every=2, outer_lr=0.7)
        >>> for step in range(4):
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.outer.param_groups[0]["lr"]
        0.7
        >>> dist.destroy_process_group()

    ``optimizer.outer`` is the outer optimizer: a learning-rate scheduler can be given to it.

    References: Douillard et al., arXiv 2311.08105 and 2501.18512; Kale et al., arXiv 2502.12996; Charles et al.,
    arXiv 2503.09799.
    """

    def __init__(
        self,
        opt: Optimizer,
        module: torch.nn.Module,
        every: Every = 32,
        outer_lr: float | None = None,
        outer_momentum: float = OUTER_MOMENTUM,
        fragments: Fragments = 1,
        delay: int = 0,
        codec: CodecSpec = None,
        error_feedback: float | bool | None = None,
        *,
        mixing: float | None = None,
        warmup: Warmup = 0,
        outer: MakeOuter | None = None,
        deadline: float | None = None,
        nonfinite: NonFinite | None = None,
        level: LevelOptions | None = None,
        **options: Unpack[ReplicaOptions],
    ) -> None:
        if outer is not None and (outer_lr is not None or outer_momentum != OUTER_MOMENTUM):
            raise ValueError(
                f"outer= makes the outer optimizer, so that outer_lr={outer_lr} and outer_momentum={outer_momentum} "
                "would not be used; give them to that optimizer, or leave outer= out"
            )
        outer_lr = OUTER_LR if outer_lr is None else outer_lr
        check_outer(outer_lr=outer_lr)
        check_outer(1.0, outer_momentum=outer_momentum)
        nesterov = functools.partial(SGD, lr=outer_lr, momentum=outer_momentum, nesterov=outer_momentum > 0)
        given = with_options(
            level,
            every=every,
            outer=outer or nesterov,
            fragments=fragments,
            delay=delay,
            mixing=mixing,
            codec=codec,
            error_feedback=error_feedback,
            deadline=deadline,
            nonfinite=nonfinite,
        )
        super().__init__(opt, module, [Level(**given)], warmup, **options)
