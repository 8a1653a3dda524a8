"""``SlowMo``: local SGD with a slow momentum between averages."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from offbeat.optim.base import RuleOptimizer
from offbeat.replicas.level import Level
from offbeat.replicas.options import (
    Every,
    NonFinite,
    ReplicaOptions,
    SlowMoLevelOptions,
    Warmup,
    check_outer,
    with_options,
)
from offbeat.replicas.replica import Replica
from offbeat.rules.slow_momentum import SLOW_MOMENTUM

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SlowMo"]


class _SlowMomentum(RuleOptimizer, rule=SLOW_MOMENTUM): ...


_SlowMomentum.__doc__ = "The outer optimizer of :class:`SlowMo`."  # it is not among the library's optimizers


class SlowMo(Replica):
    r"""Averages replicas every few steps and moves them on with a slow momentum.

    With :math:`a` the parameters after the last round, :math:`\bar x` the mean of the replicas' parameters and
    :math:`\gamma` the inner optimizer's present learning rate (on every rank that of the first one that has data),

    .. math:: u \leftarrow \beta u + \frac{a - \bar x}{\gamma}, \qquad a \leftarrow a - \alpha \gamma u, \qquad
       x_i \leftarrow a .

    With ``slow_lr=1`` and ``slow_momentum=0`` this is local SGD, up to rounding.

    Args:
        opt: the optimizer, overlapped or not.
        module: the module it trains.
        every: the number of steps between rounds. The first comes after as many steps.
        slow_lr: :math:`\alpha`; 1 in the paper.
        slow_momentum: :math:`\beta`, at least 0 and below 1; 0 to 0.6 in the paper, growing with the number of nodes.
        warmup: the number of steps with globally averaged gradients.
        deadline: how many seconds a collective may take; by default the process group's timeout.
        nonfinite: what to do if a replica has NaN or infinite parameters; see :class:`offbeat.Level`.
        level: further options of :class:`offbeat.Level`, as a dictionary.
        options: further options of :class:`offbeat.Replica`.

    Example:
        >>> import torch, torch.distributed as dist, offbeat
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.SlowMo(offbeat.SGD(model.parameters(), lr=0.1), model, every=12, slow_momentum=0.6)
        >>> optimizer.outer.param_groups[0]["momentum"]
        0.6
        >>> dist.destroy_process_group()

    References: Wang et al., arXiv 1910.00643.
    """

    def __init__(
        self,
        opt: Optimizer,
        module: torch.nn.Module,
        every: Every = 12,
        slow_lr: float = 1.0,
        slow_momentum: float = 0.5,
        *,
        warmup: Warmup = 0,
        deadline: float | None = None,
        nonfinite: NonFinite | None = None,
        level: SlowMoLevelOptions | None = None,
        **options: Unpack[ReplicaOptions],
    ) -> None:
        check_outer(slow_lr=slow_lr)
        check_outer(1.0, slow_momentum=slow_momentum)
        outer = functools.partial(_SlowMomentum, lr=slow_lr, momentum=slow_momentum)
        given = with_options(level, every=every, outer=outer, deadline=deadline, nonfinite=nonfinite)
        super().__init__(opt, module, [Level(**given)], warmup, **options)
