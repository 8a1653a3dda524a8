"""Post-local SGD with torch's names: a communication hook, its state, and an optimizer that averages."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from offbeat._types import Group
from offbeat.ddp import as_it_is, mean_of_bucket
from offbeat.replicas.describe import block, number_of
from offbeat.replicas.state_dict import own_part
from offbeat.replicas.warmup import hook_state, note_hook
from offbeat.replicas.wrapper import OptimizerWrapper
from offbeat.wire.groups import host_group, members, whole

if TYPE_CHECKING:
    from offbeat._torch import GradBucket

Loss = TypeVar("Loss")

__all__ = ["PostLocalSGDOptimizer", "PostLocalSGDState", "post_localSGD_hook", "post_local_sgd_hook"]

logger = logging.getLogger(__name__)


class PostLocalSGDState:
    """The state of :func:`post_local_sgd_hook`. A drop-in for torch's class of the same name.

    Args:
        process_group: averages gradients during warm-up; all ranks if None.
        subgroup: averages gradients after warm-up. If None, the ranks on this host, found when first needed: from the
            launcher's ``LOCAL_WORLD_SIZE``, or else by comparing host names and boot ids.
        start_localSGD_iter: the number of iterations of warm-up; must equal the averager's ``warmup_steps``.
        post_local_gradient_allreduce: whether gradients are averaged in the subgroup after warm-up.

    Example:
        >>> import offbeat
        >>> state = offbeat.PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100)
        >>> state.iter
        0
    """

    __slots__ = (
        "__weakref__",
        "_noted",
        "iter",
        "post_local_gradient_allreduce",
        "process_group",
        "start_localSGD_iter",
        "subgroup",
    )

    def __init__(
        self,
        process_group: Group | None,
        subgroup: Group | None,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        logger.info("Local SGD will be started after %s iterations", start_localSGD_iter)
        self.process_group = process_group
        self.subgroup = subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0
        self._noted: set[int] = set()

    def __repr__(self) -> str:
        where = "not chosen yet" if self.subgroup is None else f"ranks {members(self.subgroup)}"
        after = where if self.post_local_gradient_allreduce else "not averaged"
        warmup = f"warm-up: {self.start_localSGD_iter} iterations, {self.iter} done"
        return f"PostLocalSGDState (\n    {warmup}\n    gradients after it: {after}\n)"

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count an iteration when its last bucket arrives."""
        if bucket.is_last():
            self.iter += 1
        if self.iter == self.start_localSGD_iter:
            logger.info("Start to apply local SGD after %s iterations.", self.iter)

    def note(self, bucket: GradBucket) -> None:
        """Register this state for the averagers of the parameters in ``bucket``."""
        params = [p for p in bucket.parameters() if id(p) not in self._noted]
        if params:
            note_hook(self, params)
            self._noted.update(map(id, params))


def post_local_sgd_hook(state: PostLocalSGDState, bucket: GradBucket) -> Future[Tensor]:
    """DDP communication hook: averages gradients globally during warm-up, then in the subgroup.

    A drop-in for torch's ``post_localSGD_hook``, and also available under that name.

    Args:
        state: the groups and the number of iterations of warm-up.
        bucket: the bucket of gradients that DDP has filled, a :class:`torch.distributed.GradBucket`.

    Returns:
        A future of the averaged bucket.

    Example:
        >>> import torch, torch.distributed as dist, offbeat
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> state = offbeat.PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100)
        >>> ddp.register_comm_hook(state, offbeat.post_local_sgd_hook)
        >>> ddp(torch.ones(3, 4)).sum().backward()
        >>> state.iter
        1
        >>> dist.destroy_process_group()
    """
    if isinstance(state, PostLocalSGDState):
        state.note(bucket)
    everyone = whole(state.process_group)
    if state.iter < state.start_localSGD_iter:
        state.maybe_increase_iter(bucket)
        return mean_of_bucket(everyone, bucket)
    if not state.post_local_gradient_allreduce:
        return as_it_is(bucket)
    if state.subgroup is None:
        state.subgroup = _host_of(everyone)
    return mean_of_bucket(state.subgroup, bucket)


def _host_of(everyone: Any) -> Any:
    group, ranks = host_group(everyone), len(members(everyone))
    how = "by LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "by its name, LOCAL_WORLD_SIZE is not set"
    logger.info("Gradients are averaged over ranks %s after warm-up: one host, %s", members(group), how)
    if ranks > 1 and len(members(group)) == ranks:
        warnings.warn(
            f"all {ranks} ranks are on one host ({how}), so their gradients are averaged at every step after warm-up "
            "too, and averaging parameters changes nothing; pass a smaller subgroup to PostLocalSGDState, or "
            "post_local_gradient_allreduce=False to let ranks train by themselves",
            stacklevel=3,
        )
    return group


post_local_sgd_hook.__annotations__ = {}  # DDP checks annotations, but here they are strings

#: torch's name for it.
post_localSGD_hook = post_local_sgd_hook


class Averager(Protocol):
    """What :class:`PostLocalSGDOptimizer` needs of an averager; torch's have it too."""

    step: int

    def average_parameters(self, params: Any) -> None:
        """Count a step, and average the parameters if the schedule says so."""


class PostLocalSGDOptimizer(OptimizerWrapper):
    """Wraps an optimizer and calls an averager after each step. A drop-in for torch's class of the same name.

    Args:
        optim: the local optimizer.
        averager: averages its parameters; offbeat's or torch's.

    Example:
        >>> import torch, torch.distributed as dist, offbeat
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> state = offbeat.PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=100)
        >>> ddp.register_comm_hook(state, offbeat.post_local_sgd_hook)
        >>> optimizer = offbeat.PostLocalSGDOptimizer(
        ...     optim=torch.optim.SGD(ddp.parameters(), lr=0.01),
        ...     averager=offbeat.PeriodicModelAverager(period=4, warmup_steps=100),
        ... )
        >>> for step in range(3):
        ...     ddp(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.averager.step
        3
        >>> dist.destroy_process_group()

    If a :class:`torch.amp.GradScaler` finds an overflow on one rank, it skips that rank's step, but never an average.
    :class:`offbeat.LocalSGD` does all of this in one line.
    """

    def __init__(self, optim: Optimizer, averager: Averager) -> None:
        if not callable(getattr(averager, "average_parameters", None)) or not hasattr(averager, "step"):
            raise TypeError(f"averager must have average_parameters() and a step, but got {type(averager).__name__}")
        super().__init__(optim)
        self.averager = averager

    def __repr__(self) -> str:
        words = f"averager: {type(self.averager).__name__}, {number_of(self.averager.step, 'step')}"
        return block(type(self).__name__, [words], self.optim)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the optimizer's step, then the averager."""
        with self._scaled_step():
            loss = self._step_inner(closure)
            self.averager.average_parameters(params=self.param_groups)
            return loss

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state dict, with the averager's step under ``"step"``."""
        return self._finish_state_dict({**self._inner_state_dict(), "step": self.averager.step})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, of torch's, or of the optimizer alone (which restarts warm-up)."""
        state_dict = self._begin_load(state_dict)
        step = state_dict.pop("step", None)
        tracks = own_part(state_dict.pop("replica", None)).get("tracks") or []
        if any("values" in (track["flight"] or {}) for level in tracks for track in level):
            warnings.warn(
                "the checkpoint has an average in flight, which PostLocalSGDOptimizer cannot apply; it is dropped. "
                "Load the checkpoint into LocalSGD to continue exactly",
                stacklevel=2,
            )
        self.optim.load_state_dict(state_dict)
        if step is None:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
                stacklevel=2,
            )
            step = 0
        state = hook_state(self.param_groups)
        if state is not None:
            state.iter = min(state.iter, step)  # the hook must not leave warm-up before the averager
        self.averager.step = step
        self._finish_load()
