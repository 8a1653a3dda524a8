"""``LocalSGD``: replicas that train by themselves and average their parameters every few steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from offbeat.replicas.level import Level
from offbeat.replicas.options import Levels, NonFinite, ReplicaOptions, Warmup
from offbeat.replicas.replica import Replica
from offbeat.replicas.schedule import check_period

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["LocalSGD"]


class LocalSGD(Replica):
    r"""Wraps any optimizer and averages the parameters of replicas every few steps.

    During the first ``warmup`` steps gradients are averaged over all ranks, as DDP does. After that gradients are
    averaged inside each node only, and every ``every`` steps parameters are averaged over all ranks:

    .. math:: x_i \leftarrow \bar x = \sum_j w_j x_j \Big/ \sum_j w_j, \qquad w_j = 1 \text{ or the amount}
       \text{ of data rank } j \text{ has seen.}

    Steps are counted from 0. Parameters are averaged after step :math:`s` if :math:`s \ge \text{warmup}` and
    :math:`(s - \text{warmup}) \bmod \text{every} = 0`. This is the schedule of ``PostLocalSGDOptimizer`` with
    ``PeriodicModelAverager`` and ``post_local_sgd_hook``; LocalSGD replaces all three, with one counter.

    Args:
        opt: the optimizer, overlapped or not.
        module: the module it trains: DDP, plain, or ``fully_shard``-ed. DDP averages gradients during backward. For
            other modules ``step()`` does; to clip averaged gradients, call :meth:`average_gradients` first.
        every: the number of steps between averages; or a function of the step that returns it; or levels, lowest
            first, as a mapping from period to group (a size, a process group, or names of dimensions of ``mesh=``). The
            last level must reach every rank. After a step only the highest level that is due is averaged.
        warmup: the number of steps with globally averaged gradients; or a function of the step that returns whether
            warm-up continues, called until it returns False.
        delay: 0 averages immediately. :math:`k > 0` averages a copy in the background, and :math:`k` steps later adds
            the difference: :math:`x_i(t+k) \leftarrow x_i(t+k) + (1 - \alpha) (\bar x(t) - x_i(t))`.
        mixing: :math:`\alpha`, how much of the difference is left out; by default none. With a delay of most of the
            period, 0.5 does less harm: by the time the difference is added, training has made a part of it up.
        deadline: how many seconds a collective may take; by default the process group's timeout.
        nonfinite: what to do if a replica has parameters that are not finite: ``"raise"``, ``"leave_out"`` or
            ``"skip"``; see :class:`offbeat.Level`.
        options: further options of :class:`offbeat.Replica`: ``group``, ``subgroup``, ``mesh``, ``state``, ``buffers``,
            ``weighted``, ``sync_init``, ``comm_hook``, ``bucket_mb``, ``reduce_dtype`` and ``snapshot``.

    Example:
        >>> import torch, torch.distributed as dist, offbeat
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.LocalSGD(offbeat.AdamW(model.parameters()), model, every=8, warmup=100)
        >>> for step in range(3):
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.steps
        3
        >>> dist.destroy_process_group()

    Limits: functions given as ``every`` and ``warmup`` must return the same on every rank. Between averages parameters
    differ between ranks: call :meth:`finish` or :meth:`sync` before you use or save the model.
    """

    def __init__(
        self,
        opt: Optimizer,
        module: torch.nn.Module,
        every: Levels = 8,
        warmup: Warmup = 0,
        *,
        delay: int = 0,
        mixing: float | None = None,
        deadline: float | None = None,
        nonfinite: NonFinite = "raise",
        **options: Unpack[ReplicaOptions],
    ) -> None:
        levels = [
            Level(
                every=period,
                phase=1,
                group=where,
                delay=delay,
                mixing=mixing,
                deadline=deadline,
                nonfinite=nonfinite,
            )
            for period, where in _pairs(every)
        ]
        super().__init__(opt, module, levels, warmup, **options)


def _pairs(every: Any) -> list[tuple[Any, Any]]:
    """Periods and groups, from the argument ``every``."""
    if isinstance(every, Mapping):
        pairs = list(every.items())
    elif isinstance(every, Sequence) and not isinstance(every, str):
        pairs = [tuple(pair) if isinstance(pair, Sequence) else (pair,) for pair in every]
        if any(len(pair) != 2 for pair in pairs):
            raise TypeError(f"every must be a list of pairs of a period and a group, but got {every!r}")
    else:
        check_period(every, "every")
        return [(every, None)]
    if not pairs:
        raise ValueError("every must have at least one level, but it is empty")
    return pairs
