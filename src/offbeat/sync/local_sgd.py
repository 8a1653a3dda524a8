"""``LocalSGD``: replicas that train by themselves and average their parameters every few steps."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat import _torch
from offbeat.ddp import is_inside_ddp
from offbeat.overlap.handle import overlap_of
from offbeat.sync.agreement import check_same_options, check_same_values
from offbeat.sync.attach import attach
from offbeat.sync.averaging import Averaging
from offbeat.sync.buckets import check_bucket_mb
from offbeat.sync.buffer_policy import check_buffers
from offbeat.sync.checks import check_cover, check_delay, check_module, find_subgroup, in_words
from offbeat.sync.contents import Contents
from offbeat.sync.exchange import Exchange
from offbeat.sync.gradients import GradientMean
from offbeat.sync.groups import meeting_device, replica_group, whole
from offbeat.sync.items import Item
from offbeat.sync.joining import LocalSGDJoinHook
from offbeat.sync.levels import make_levels
from offbeat.sync.schedule import Schedule
from offbeat.sync.state_policy import check_state
from offbeat.sync.wrapper import OptimizerWrapper

__all__ = ["LocalSGD"]


class LocalSGD(OptimizerWrapper, Joinable):
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
            first, as a mapping from period to group (a size, a process group, or names of dimensions of ``mesh``).
            After a step only the highest level that is due is averaged.
        warmup: the number of steps with globally averaged gradients; or a function of the step that returns whether
            warm-up continues, called until it returns False.
        group: the ranks to average over: all if None, or for sharded modules those that hold the same shards.
        subgroup: the ranks that average gradients after warm-up: ``"node"``, a process group, or None for no others.
        mesh: the DeviceMesh whose dimensions ``every`` names.
        delay: 0 averages immediately. :math:`k > 0` averages a copy in the background, and :math:`k` steps later adds
            the difference: :math:`x_i(t+k) \leftarrow x_i(t+k) + (\bar x(t) - x_i(t))`.
        state: what an average does to optimizer state: ``"keep"``, ``"average"`` or ``"reset"``; or a mapping from
            keys to these, which keeps all other keys. ``"reset"`` sets a key to the value that its optimizer starts it
            from (zero for optimizers that offbeat does not know). A key that the optimizer does not have raises.
        buffers: what an average does to the module's persistent buffers: ``"average"``, ``"broadcast"`` (the first
            rank's) or ``"keep"``. After warm-up DDP no longer broadcasts buffers at every forward.
        weighted: weigh ranks by the amounts given to :meth:`seen`, instead of equally.
        comm_hook: a communication hook for DDP whose state is a process group, called as
            ``comm_hook(group, bucket)``; for example torch's ``fp16_compress_hook``.
        bucket_mb: the memory for buckets, in MiB.
        reduce_dtype: the dtype to average parameters in, if it is wider than their own; for example ``torch.float32``
            for bfloat16 parameters.
        snapshot: where to keep the copy of a delayed average: ``"device"`` or ``"cpu"``.
        undo: where the old values of parameters are kept until an average has succeeded: ``"disk"``, ``"memory"``,
            ``"off"``, or ``"auto"``: on disk for parameters in CPU memory, in CPU memory for others.

    Example::

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
        every: Any = 8,
        warmup: int | Callable[[int], bool] = 0,
        *,
        group: Any = None,
        subgroup: Any = "node",
        mesh: Any = None,
        delay: int = 0,
        state: str | Mapping[str, str] = "keep",
        buffers: str = "average",
        weighted: bool = False,
        comm_hook: Any = None,
        bucket_mb: float = 64,
        reduce_dtype: torch.dtype | None = None,
        snapshot: str = "device",
        undo: str = "auto",
    ) -> None:
        _torch.require("sync")
        check_module(opt, module)
        check_delay(delay, every)
        check_state(state, delay, opt)
        check_buffers(buffers)
        if snapshot not in ("device", "cpu"):
            raise ValueError(f"snapshot must be 'device' or 'cpu', but got {snapshot!r}")
        if reduce_dtype is not None and not reduce_dtype.is_floating_point:
            raise ValueError(f"reduce_dtype must be a floating-point dtype, but got {reduce_dtype}")
        Schedule([], warmup)  # checks warmup before any collective
        bucket_bytes = check_bucket_mb(bucket_mb)
        exchange = Exchange(bucket_bytes, reduce_dtype, undo)
        super().__init__(opt)
        Joinable.__init__(self)
        module = _torch.inner_module(module)
        params = [p for one in opt.param_groups for p in one["params"]]
        sharded = any(hasattr(p, "device_mesh") for p in params)
        within = whole(group)
        check_same_options(
            {
                "every": in_words(every),
                "warmup": in_words(warmup),
                "delay": delay,
                "subgroup": in_words(subgroup),
                "state": state,
                "buffers": buffers,
                "weighted": weighted,
                "bucket_mb": bucket_mb,
                "reduce_dtype": reduce_dtype,
                "comm_hook": in_words(comm_hook),
                "DistributedDataParallel": isinstance(module, DistributedDataParallel),
            },
            within,
        )
        if sharded and not (subgroup is None or subgroup == "node"):
            raise ValueError(
                "subgroup cannot be used with a sharded module, which averages gradients over its own mesh; leave "
                "subgroup out"
            )
        self._group = replica_group(params, within) if sharded and group is None else within
        if sharded and dist.get_world_size(self._group) == 1 < dist.get_world_size(within):
            warnings.warn(
                "the module is sharded over all ranks, so there is one replica and nothing to average; to have several "
                "replicas, shard over a mesh inside each node",
                stacklevel=2,
            )
        self._subgroup = find_subgroup(subgroup, self._group, sharded)
        levels = make_levels(every, self._group, mesh)
        self._schedule = Schedule([level.period for level in levels], warmup)
        self._contents = Contents(opt, module, state, buffers)
        self._averaging = Averaging(
            self._contents,
            [level.group for level in levels],
            within,
            exchange,
            delay=delay,
            weighted=weighted,
            snapshot=torch.device("cpu") if snapshot == "cpu" else None,
        )
        self._top = len(levels) - 1
        self._top_size = dist.get_world_size(levels[-1].group)
        self._gradient_mean: GradientMean | None = None
        self._begun = False
        self._ddp = module if isinstance(module, DistributedDataParallel) else None
        handle = overlap_of(opt)
        check_cover(self._ddp, self._contents.params(), self._group)
        if self._ddp is not None:
            attach(self, self._ddp, comm_hook)
        else:
            self._average_gradients_in_step(module, comm_hook, handle, bucket_bytes)
        self._is_stepping = False
        guard = opt.register_step_pre_hook(_Guard(self))
        weakref.finalize(self, guard.remove).atexit = False

    @property
    def steps(self) -> int:
        """The number of steps made."""
        return self._schedule.step

    @property
    def syncs(self) -> int:
        """The number of averages begun."""
        return self._averaging.count

    @property
    def is_local(self) -> bool:
        """Whether the current step is after warm-up."""
        return self._schedule.is_local

    @property
    def bytes_sent(self) -> int:
        """The number of bytes this rank has sent to average parameters, state and buffers, without gradients."""
        return self._averaging.bytes_sent

    def seen(self, amount: float) -> None:
        """With ``weighted=True``: add the number of samples or tokens this rank has trained on since the last call."""
        self._averaging.see(amount)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the optimizer's step, then average if the schedule says so.

        If a collective of the average fails, its error is raised and parameters keep the values after the step.
        """
        with self._scaled_step():
            Join.notify_join_context(self)
            self._begin()
            self._is_stepping = True
            try:
                loss = self._step_inner(closure)
            finally:
                self._is_stepping = False
            self._averaging.move()
            level = self._schedule.due()
            if level is not None:
                self._schedule.averaged(level)
            try:
                if level is not None:
                    check_cover(self._ddp, self._contents.params(), self._group)
                self._averaging.after_step(self._schedule.step, level)
            finally:
                self._schedule.advance()  # even if the average failed, so that all ranks count the same
            return loss

    def sync(self) -> None:
        """Average over all ranks now, independently of the schedule. Call it on every rank, after the same step."""
        self._averaging.now(self._schedule.step, self._top)
        self._schedule.averaged_already()

    def finish(self) -> None:
        """Call it when this rank has no data left: takes part in averages until all ranks are done.

        A rank has a weight in the average after its last step, and none after that. When this method returns, all
        replicas are equal, and :attr:`steps` is the largest number of steps of any rank. During warm-up, and if other
        ranks of the node still average gradients, use ``torch.distributed.algorithms.Join`` with the DDP module and
        this optimizer instead, because there are collectives at every step.
        """
        self._averaging.land()
        if self._top_size == 1 or not self._schedule.is_local:
            return
        made = self._schedule.step
        while True:
            level = self._schedule.due()
            if level is not None:
                done = self._averaging.take_part(self._schedule.step, level, may_be_last=level == self._top)
                if done and level == self._top:
                    self._schedule.go_to(self._averaging.latest(made, level))
                    return
                self._schedule.averaged(level)
            self._schedule.advance()

    def average_gradients(self) -> None:
        """For modules without DDP: average gradients now, for example to clip them before ``step()``.

        Otherwise ``step()`` does it. With DDP this does nothing, because backward has averaged them. Call it on every
        rank, and with a scaler after ``scaler.unscale_(optimizer)``.
        """
        self._reduce_gradients(False)

    def _gradient_group(self) -> Any:
        """The process group over which gradients of the current step are averaged; None if they are not."""
        return self._subgroup if self._schedule.settle() else self._group

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly: the optimizer's state, the counter, and an average in flight.

        Between averages ranks differ, so that each must save its own. An average in flight is waited for; after
        loading it is applied at the step at which it would have been.
        """
        schedule = self._schedule.state_dict()
        step = schedule.pop("step")
        mine = {**schedule, **self._averaging.state_dict(), "averaged": self._contents.averaged()}
        return self._finish_state_dict({**self._inner_state_dict(), "step": step, "local_sgd": mine})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, of ``PostLocalSGDOptimizer``, or of the optimizer alone."""
        state_dict = self._begin_load(state_dict)
        step, mine = state_dict.pop("step", None), state_dict.pop("local_sgd", None) or {}
        self._averaging.check_state_dict(mine)
        self.optim.load_state_dict(state_dict)
        if step is None:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
                stacklevel=2,
            )
        self._schedule.load_state_dict({**mine, "step": step or 0})
        self._contents.load_averaged(mine.get("averaged", []))
        self._averaging.load_state_dict(mine)
        self._begun = True
        self._finish_load()

    @property
    def join_device(self) -> torch.device:
        """For ``torch.distributed.algorithms.Join``."""
        return meeting_device(self._group)

    @property
    def join_process_group(self) -> Any:
        """For ``torch.distributed.algorithms.Join``."""
        return self._group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``torch.distributed.algorithms.Join``."""
        return LocalSGDJoinHook(self)

    def _shadow_step(self) -> None:
        """On a rank without data: take part in the collectives of one step of the other ranks."""
        self._begin()
        group = self._gradient_group()
        if self._gradient_mean is not None and group is not None:
            self._gradient_mean.average(self._contents.params(), group, absent=True)
        level = self._schedule.due()
        if level is not None:
            self._schedule.averaged(level)
            self._averaging.take_part(self._schedule.step, level, may_be_last=False)
        self._schedule.advance()

    def _last_average(self) -> None:
        """Average after the last step of all ranks."""
        self._averaging.take_part(self._schedule.step, self._top, may_be_last=True)

    def _begin(self) -> None:
        """Before the first step: check that replicas are equal, unless DDP has made them so."""
        if not self._begun:
            self._begun = True
            others = self._gradient_mean is not None
            if self._ddp is not None:
                others = dist.get_world_size(self._ddp.process_group) < dist.get_world_size(self._group)
            if others and not self._schedule.settle() and self._schedule.step == 0:
                items = [Item(name, p) for name, p in self._contents.params().items()]
                check_same_values(items, self._group)

    def _average_gradients_in_step(
        self, module: torch.nn.Module, comm_hook: Any, handle: Any, bucket_bytes: int
    ) -> None:
        if comm_hook is not None:
            raise ValueError(
                f"comm_hook needs a DistributedDataParallel module, but the module is a {type(module).__name__}; wrap "
                "it or leave comm_hook out"
            )
        if dist.get_world_size(self._group) == 1:
            return
        if is_inside_ddp(list(self._contents.params().values())):
            raise ValueError(
                "parameters of this module belong to a DistributedDataParallel module, which would still average their "
                "gradients over all ranks at every step; pass the DistributedDataParallel module to LocalSGD"
            )
        if handle is None:
            self._gradient_mean = GradientMean(bucket_bytes)
            self._gradient_mean.watch(self._contents.params())
        elif self._subgroup is not None or self._schedule.warmup != 0:
            raise ValueError(
                "the optimizer is overlapped and the module is not in DistributedDataParallel, so gradients are used "
                "before step() could average them; pass warmup=0 and subgroup=None, or wrap the module"
            )

    def _together(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Average the loss along with the gradients, so that LBFGS decides the same on every rank."""
        group = self._gradient_group()
        if group is None or dist.get_world_size(group) == 1:
            return closure
        if _torch.is_joining(self):
            raise RuntimeError(
                "step(closure) cannot be used under Join while gradients are averaged, because a rank without data "
                "does not know how often the closure is called; call backward() yourself and step() without a closure"
            )

        def averaged() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.average_gradients()
            if loss is None:
                return None
            value = loss.detach().clone() if isinstance(loss, Tensor) else torch.tensor(float(loss))
            device = value.device
            value = value.to(meeting_device(group)) / dist.get_world_size(group)
            dist.all_reduce(value, group=group)
            return value.to(device) if isinstance(loss, Tensor) else value.item()

        return averaged

    @property
    def _reduces_gradients(self) -> bool:
        return self._gradient_mean is not None and self._gradient_group() is not None

    def _reduce_gradients(self, found: bool) -> bool:
        group = self._gradient_group()
        if self._gradient_mean is None or group is None:
            return found
        # If one rank has inf or NaN in its gradients, so has every rank after averaging.
        return self._gradient_mean.average(self._contents.params(), group, found=found)


class _Guard:
    """Runs before the inner optimizer's step and raises if LocalSGD did not call it: nothing would be averaged."""

    def __init__(self, wrapper: LocalSGD) -> None:
        self._wrapper = weakref.ref(wrapper)

    @property
    def reads_gradients(self) -> str | None:
        """Why ``overlap()`` must refuse the inner optimizer, if so; see :class:`offbeat.overlap.ReadsGradients`."""
        wrapper = self._wrapper()
        if wrapper is None or wrapper._gradient_mean is None:
            return None
        return (
            "LocalSGD averages this optimizer's gradients in step(), after overlap() would have used them; call "
            "overlap() before it, with warmup=0 and subgroup=None, or wrap the module in DistributedDataParallel"
        )

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        wrapper = self._wrapper()
        if wrapper is None or wrapper._is_stepping:
            return
        handle = overlap_of(optimizer)
        if handle is None or not handle.is_stepping:
            raise RuntimeError(
                f"step() was called on the {type(optimizer).__name__} inside LocalSGD, so that replicas would never be "
                "averaged; call step() on LocalSGD (and pass LocalSGD to the scaler), or delete LocalSGD first"
            )
