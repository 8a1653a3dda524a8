"""Averagers with the names, arguments, schedules and messages of torch's.

Unlike torch's, they average every parameter with ``requires_grad``, whether this rank has a gradient for it or not, and
no parameter's storage moves. Ranks compare their parameters first, and a collective that fails changes nothing.
"""

from __future__ import annotations

import logging
import warnings
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager as TorchModelAverager

from offbeat._names import ChecksNames
from offbeat._types import Group
from offbeat.replicas.compare import check_same_options, name_difference
from offbeat.replicas.contents import CachedDigest, Item, local_part
from offbeat.replicas.hello import Verdict
from offbeat.replicas.values import Reduction, Values, bytes_of_buckets
from offbeat.replicas.warmup import check_warmup
from offbeat.wire.groups import blocks, is_member, members, whole
from offbeat.wire.peers import GroupPeers, Traffic, gather, vote

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["HierarchicalModelAverager", "ModelAverager", "PeriodicModelAverager"]

logger = logging.getLogger(__name__)


class ModelAverager(ChecksNames, TorchModelAverager):
    """Base class of averagers: counts steps and averages parameters over a process group.

    Args:
        process_group: the ranks to average over; all ranks if None.
        bucket_mb: the memory for buckets, in MiB.
    """

    def __init__(self, process_group: Group | None = None, *, bucket_mb: float = 64) -> None:
        self.process_group: ProcessGroup = whole(process_group)
        self.step: int = 0
        self._reduction = Reduction(bytes_of_buckets(bucket_mb))
        self._traffic, self._digest = Traffic(), CachedDigest()
        self._looked = 0

    @property
    def bytes_sent(self) -> int:
        """The number of bytes this rank has sent to average and compare parameters."""
        return self._traffic.sent

    @abstractmethod
    def average_parameters(self, params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> None:
        """Count a step, and average the parameters if the schedule says so."""

    @torch.no_grad()
    def _average(self, params: Any, group: Any) -> None:
        items = _items(params)
        if not is_member(group) or len(members(group)) == 1:
            return
        peers = GroupPeers(group, members(group), traffic=self._traffic)
        rows = gather(peers, [self.step, self._digest.of(items)])
        if any(digest != rows[0][1] for _, digest in rows):
            name_difference(items, peers)
        if any(step != rows[0][0] for step, _ in rows):
            check_same_options({"the averager's step": self.step}, peers)
        values = Values(items)  # until the vote, the parameters stay as they are
        values.copy(items)
        self._reduction.run(values.flats, peers, Verdict(weights=(1.0,) * peers.size))
        vote(peers)
        for item in items:
            local_part(item.tensor).copy_(values[item.name])


class _ScheduledAverager(ModelAverager):
    """Averages over the group that the schedule names after a step, once warm-up is over."""

    warmup_steps: int

    @abstractmethod
    def _find_process_group(self) -> Any:
        """The process group to average over after this step, or None."""

    def average_parameters(self, params: Iterable[Tensor] | Iterable[dict[str, Any]]) -> None:
        """Count a step, and average the parameters if the schedule says so.

        Args:
            params: parameters or parameter groups, the same on every rank.
        """
        given = list(params)
        self._looked = check_warmup(self, given, self._looked)
        try:
            group = self._find_process_group() if self.step >= self.warmup_steps else None
            if group is not None:
                self._average(given, group)
        finally:
            self.step += 1  # even if a collective failed, so that all ranks count the same


class PeriodicModelAverager(_ScheduledAverager):
    r"""Averages parameters every ``period`` steps after warm-up. A drop-in for torch's class of the same name.

    After step :math:`s` (from 0) parameters are averaged if :math:`s \ge w` and
    :math:`(s - w) \bmod \text{period} = 0`.

    Args:
        period: the number of steps between averages.
        warmup_steps: :math:`w`, the number of steps without averages at the beginning.
        process_group: the ranks to average over; all ranks if None.
        bucket_mb: the memory for buckets, in MiB.

    Example:
        >>> import torch, torch.distributed as dist, offbeat
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = offbeat.SGD(model.parameters(), lr=0.1)
        >>> averager = offbeat.PeriodicModelAverager(period=4, warmup_steps=100)
        >>> for step in range(3):
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     averager.average_parameters(model.parameters())
        >>> averager.step
        3
        >>> dist.destroy_process_group()

    Limits: there is no warm-up of gradients; see :class:`offbeat.PostLocalSGDOptimizer` for that, and
    :class:`offbeat.LocalSGD` for all of it with one counter.
    """

    def __init__(
        self,
        period: int,
        warmup_steps: int = 0,
        process_group: Group | None = None,
        *,
        bucket_mb: float = 64,
    ) -> None:
        super().__init__(process_group, bucket_mb=bucket_mb)
        if warmup_steps < 0:
            raise ValueError(f"Arg ``warmup_steps`` must be a non-negative number. It is {warmup_steps}.")
        self.warmup_steps = warmup_steps
        if period < 1:
            raise ValueError(f"Arg ``period`` must be a positive value. It is {period}.")
        if period == 1:
            warnings.warn(_EVERY_STEP.format("period is 1"), stacklevel=2)
        self.period = period

    def _find_process_group(self) -> Any:
        return self.process_group if (self.step - self.warmup_steps) % self.period == 0 else None


class HierarchicalModelAverager(_ScheduledAverager):
    r"""Averages small groups often and large groups rarely. A drop-in for torch's class of the same name.

    After step :math:`s \ge w` parameters are averaged over the group of the largest period that divides :math:`s`.

    Args:
        period_group_size_dict: maps each period to the size of its groups, in ascending order; the last size must be
            that of ``process_group``.
        warmup_steps: :math:`w`, the number of steps without averages at the beginning.
        process_group: the ranks that take part; all ranks if None.
        bucket_mb: the memory for buckets, in MiB.

    Example:
        >>> import torch, torch.distributed as dist, offbeat
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 2)
        >>> averager = offbeat.HierarchicalModelAverager({4: 1, 16: 1}, warmup_steps=100)  # two nodes: {4: 8, 16: 16}
        >>> averager.average_parameters(model.parameters())
        >>> averager.step
        1
        >>> dist.destroy_process_group()

    Limits: groups are blocks of consecutive ranks; :class:`offbeat.LocalSGD` takes process groups and meshes too.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: Group | None = None,
        *,
        bucket_mb: float = 64,
    ) -> None:
        super().__init__(process_group, bucket_mb=bucket_mb)
        if not period_group_size_dict:
            raise ValueError("Arg ``period_group_size_dict`` must not be empty.")
        self._periods = list(period_group_size_dict)
        if self._periods[0] <= 0:
            raise ValueError(
                "The minimum period in arg ``period_group_size_dict`` must be a positive value. "
                f"It is {self._periods[0]}."
            )
        if self._periods[-1] == 1:
            warnings.warn(_EVERY_STEP.format("the maximum period in arg ``period_group_size_dict`` is 1"), stacklevel=2)
        size = len(members(self.process_group))
        last = list(period_group_size_dict.values())[-1]
        if last != size:
            raise ValueError(
                f"The last value in arg ``period_group_size_dict`` {last} "
                f"must be equal to the size of arg ``process_group`` {size}."
            )
        if warmup_steps < 0:
            raise ValueError(f"Arg ``warmup_steps`` must be a non-negative number. It is {warmup_steps}.")
        self.warmup_steps = warmup_steps
        if self._periods != sorted(self._periods):
            raise ValueError(
                f"The periods in arg ``period_group_size_dict`` {self._periods} must be in ascending order: "
                "the last one that divides the step is used"
            )
        self.period_process_group_dict: OrderedDict[int, ProcessGroup] = OrderedDict()
        logger.info("Model averaging hierarchy:")
        for period, group_size in period_group_size_dict.items():
            logger.info(
                "\tEach group that has %s processes average parameters every %s iterations, "
                "if no higher-level averaging.",
                group_size,
                period,
            )
            self.period_process_group_dict[period] = blocks(self.process_group, group_size)

    def _find_process_group(self) -> Any:
        due = [period for period in self._periods if self.step % period == 0]
        return self.period_process_group_dict[due[-1]] if due else None


_EVERY_STEP = (
    "When {}, no need to use model averaging because the communication cost "
    "of all-reducing parameters will be no less than the cost of all-reducing gradients "
    "by DistributedDataParallel in the backward pass. Therefore, only "
    "DistributedDataParallel should be used for this case."
)


def _items(params: Iterable[Any]) -> list[Item]:
    items: list[Item] = []
    seen: set[int] = set()
    for i, one in enumerate(params):
        if isinstance(one, torch.nn.Parameter):
            if one.requires_grad and id(one) not in seen:
                seen.add(id(one))
                items.append(Item(f"parameter {i}", one))
        elif isinstance(one, dict):
            for j, p in enumerate(one["params"]):
                if p.requires_grad and id(p) not in seen:
                    seen.add(id(p))
                    items.append(Item(f"parameter {j} of group {i}", p))
        else:
            raise NotImplementedError(f"Parameter input of type {type(one)} is not supported")
    return items
