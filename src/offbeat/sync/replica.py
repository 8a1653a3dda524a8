"""``Replica``: any optimizer, on replicas that agree now and then."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat import _torch, frameworks
from offbeat._types import CommHook
from offbeat.ddp import is_inside_ddp
from offbeat.optim.checkpoint import numbered
from offbeat.overlap.handle import overlap_of
from offbeat.sync.agreement import check_same_options
from offbeat.sync.attach import attach
from offbeat.sync.buckets import check_bucket_mb
from offbeat.sync.buffer_policy import check_buffers
from offbeat.sync.calendar import Calendar, Entry
from offbeat.sync.checks import (
    check_cover,
    check_levels,
    check_module,
    check_reduce_dtype,
    check_trains,
    find_subgroup,
    in_words,
)
from offbeat.sync.contents import Contents
from offbeat.sync.eager import check_linear
from offbeat.sync.exchange import Exchange
from offbeat.sync.gradients import GradientMean, check_same_closure, mean_loss
from offbeat.sync.hooks import BeforeForward, Guard, ReplicaJoinHook, refuse_wrapped_state
from offbeat.sync.level import Level, options_in_words
from offbeat.sync.members import connect_all, connect_levels, peers_of
from offbeat.sync.options import Buffers, Ranks, Snapshot, State, Undo, Warmup, check_bool, check_float_dtype
from offbeat.sync.saved import check_complete, own_part
from offbeat.sync.start import Start
from offbeat.sync.state_policy import check_state
from offbeat.sync.tracks import Tracks, warn_of
from offbeat.sync.words import block, bytes_in_words, level_in_words, number_of, ranks_in_words, warmup_in_words
from offbeat.sync.wrapper import OptimizerWrapper
from offbeat.wire.groups import replica_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Replica"]

Loss = TypeVar("Loss")


class Replica(OptimizerWrapper, Joinable):
    r"""Wraps any optimizer: each replica trains by itself, and replicas agree now and then, at one or several levels.

    :class:`offbeat.LocalSGD`, :class:`offbeat.SlowMo` and :class:`offbeat.DiLoCo` are configurations of this class; use
    it to combine levels. During the first ``warmup`` steps gradients are averaged over all ranks, as DDP does. After
    that gradients are averaged inside each node only, and replicas agree as the levels say.

    Args:
        opt: the optimizer, overlapped or not.
        module: the module it trains: DDP, plain, or ``fully_shard``-ed. DDP averages gradients during backward. For
            other modules ``step()`` does; to clip averaged gradients, call :meth:`average_gradients` first.
        levels: lowest first. Each contains the groups of the levels below, and the last one all ranks.
        warmup: the number of steps with globally averaged gradients; or a function of the step that returns whether
            warm-up continues, called until it returns False.
        group: the ranks that take part: all if None, or for sharded modules those that hold the same shards.
        subgroup: the ranks that average gradients after warm-up: ``"node"``, a process group, or None for no others.
        mesh: the DeviceMesh whose dimensions levels name.
        state: what a round does to optimizer state: ``"keep"``, ``"average"`` or ``"reset"``; or a mapping from
            keys to these, which keeps all other keys. ``"reset"`` sets a key to the value that its optimizer starts it
            from (zero for optimizers that offbeat does not know). A key that the optimizer does not have raises.
        buffers: what a round does to the module's persistent buffers: ``"average"``, ``"broadcast"`` (the first
            rank's) or ``"keep"``. After warm-up DDP no longer broadcasts buffers at every forward.
        weighted: weigh ranks by the amounts given to :meth:`seen`, instead of equally.
        sync_init: start from the first rank's parameters and buffers on every rank.
        comm_hook: a communication hook for DDP whose state is a process group, called as
            ``comm_hook(group, bucket)``; for example torch's ``fp16_compress_hook``.
        bucket_mb: the memory for buckets, in MiB.
        reduce_dtype: the dtype to average parameters in, if it is wider than their own; for example ``torch.float32``
            for bfloat16 parameters.
        snapshot: where to keep the copies of rounds in the background: ``"device"`` or ``"cpu"``.
        undo: where the old values of parameters are kept until a round has succeeded: ``"disk"``, ``"memory"``,
            ``"off"``, or ``"auto"``: on disk for parameters in CPU memory, in CPU memory for others.

    Example:
        >>> import functools, torch, torch.distributed as dist, offbeat
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(4, 2)
        >>> nesterov = functools.partial(offbeat.SGD, lr=0.7, momentum=0.9, nesterov=True)
        >>> levels = [offbeat.Level(every=4, phase=1), offbeat.Level(every=64, outer=nesterov)]
        >>> optimizer = offbeat.Replica(offbeat.AdamW(model.parameters()), model, levels)
        >>> for step in range(3):
        ...     model(torch.randn(8, 4)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.steps
        3
        >>> dist.destroy_process_group()

    Limits: functions given as ``every`` and ``warmup`` must return the same on every rank. Between rounds parameters
    differ between ranks: call :meth:`finish` or :meth:`sync` before you use or save the model.
    """

    def __init__(
        self,
        opt: Optimizer,
        module: torch.nn.Module,
        levels: Level | Sequence[Level],
        warmup: Warmup = 0,
        *,
        group: Ranks | None = None,
        subgroup: Literal["node"] | Ranks | None = "node",
        mesh: DeviceMesh | None = None,
        state: State | Mapping[str, State] = "keep",
        buffers: Buffers = "average",
        weighted: bool = False,
        sync_init: bool = False,
        comm_hook: CommHook | None = None,
        bucket_mb: float = 64,
        reduce_dtype: torch.dtype | None = None,
        snapshot: Snapshot = "device",
        undo: Undo = "auto",
    ) -> None:
        _torch.require("sync")
        check_module(opt, module, type(self).__name__)
        levels = check_levels(levels, state)
        check_state(state, max(level.delay for level in levels), opt)
        check_buffers(buffers)
        if snapshot not in ("device", "cpu"):
            raise ValueError(f"snapshot must be 'device' or 'cpu', but got {snapshot!r}")
        check_float_dtype("reduce_dtype", reduce_dtype)
        check_bool(weighted=weighted, sync_init=sync_init)
        entries = [
            Entry(
                level.every,
                level.phase,
                level.parts,
                covers=level.parts == 1 and (level.outer is None or not level.delay),
                can_be_covered=level.outer is None,
            )
            for level in levels
        ]
        self._calendar = Calendar(entries, warmup)  # checks warmup before any collective
        bucket_bytes = check_bucket_mb(bucket_mb)
        exchanges = [Exchange(bucket_bytes, reduce_dtype, undo, ordered=level.ordered) for level in levels]
        super().__init__(opt)
        Joinable.__init__(self)
        called = frameworks.inner_module(module)
        module = _torch.inner_module(called)
        check_trains(opt, module, type(self).__name__)
        params = [p for one in opt.param_groups for p in one["params"]]
        check_reduce_dtype(reduce_dtype, params)
        sharded = any(hasattr(p, "device_mesh") for p in params)
        within = peers_of(group)
        check_same_options(
            {
                **options_in_words(levels),
                "warmup": in_words(warmup),
                "subgroup": in_words(subgroup),
                "state": state,
                "buffers": buffers,
                "weighted": weighted,
                "sync_init": sync_init,
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
        self._everyone = peers_of(replica_group(params, within.group)) if sharded and group is None else within
        shards = connect_all(within, levels) if self._everyone.size < within.size else None
        if sharded and self._everyone.size == 1 < within.size:
            warnings.warn(
                "the module is sharded over all ranks, so there is one replica and nothing to average; to have several "
                "replicas, shard over a mesh inside each node",
                stacklevel=2,
            )
        self._subgroup, self._why_subgroup = find_subgroup(subgroup, self._everyone, sharded)
        delayed = any(level.delay for level in levels)
        peers = connect_levels(levels, self._everyone, mesh, quiet=delayed)
        self._contents = Contents(opt, module, state, buffers)
        self._contents.note_masks(self._everyone)
        self._tracks = Tracks(
            self._contents,
            levels,
            peers,
            exchanges,
            weighted=weighted,
            copies=torch.device("cpu") if snapshot == "cpu" else None,
            shards=shards,
            share=1 / self.replicas,
        )
        self._anchors = self._tracks.anchors
        self._top = len(levels) - 1
        self._levels, self._level_peers = levels, peers
        self._gradient_mean: GradientMean | None = None
        self._made_equal = False
        self._averaged_before = False  # whether gradients have been averaged since the last step
        self._compared_closures = False  # whether ranks know that all call step() with a closure, or all without
        self._ddp = module if isinstance(module, DistributedDataParallel) else None
        self._start = Start(self._contents, self._anchors, self._calendar, self._everyone, self._ddp, sharded=sharded)
        handle = overlap_of(opt)
        check_cover(self._ddp, self._contents.params(), self._everyone.size)
        if not self._contents.params():
            raise ValueError(
                "none of the optimizer's parameters has requires_grad, so that there is nothing to train or average; "
                "unfreeze some of them first"
            )
        for level in levels:  # raises if there are too few parameters for its fragments
            level.cut({name: p.numel() for name, p in self._contents.params().items()}, self._contents.frozen())
        if sync_init:
            self._start.from_the_first()
        self._anchors.follow()
        self._check_outers(within)
        if self._ddp is not None:
            attach(self, self._ddp, comm_hook)
        else:
            self._average_gradients_in_step(module, comm_hook, handle, bucket_bytes)
        self._is_stepping = False
        self._steps_made: int | None = None  # when finish() was called first, if it has not returned since
        for hook in (
            called.register_forward_pre_hook(BeforeForward(self)),
            opt.register_step_pre_hook(Guard(self)),
            opt.register_load_state_dict_pre_hook(refuse_wrapped_state),
        ):
            weakref.finalize(self, hook.remove).atexit = False
        weakref.finalize(self, self._tracks.close).atexit = False

    def _check_outers(self, within: Any) -> None:
        if not self._anchors:
            return
        made = [one for one in self.outers if one is not None]
        for level, one in zip(self._levels, self.outers, strict=True):
            if level.eager:
                check_linear(one)
        words = [f"{type(one).__name__}({in_words(one.defaults)})" for one in made]
        check_same_options({"outer": words}, within)

    def __repr__(self) -> str:
        everyone, node = self._everyone, self._subgroup
        after = "every rank by itself" if node is None else ranks_in_words(node.ranks, everyone.ranks)
        warmup = warmup_in_words(self._calendar.warmup)
        lines = [
            f"ranks: {everyone.size}, replicas: {self.replicas}",
            f"gradients: averaged over all ranks in warm-up ({warmup}); then {after} ({self._why_subgroup})",
        ]
        for level, peers, outer in zip(self._levels, self._level_peers, self.outers, strict=True):
            lines.append(f"parameters: {level_in_words(level, peers, everyone, outer)}")
        done = [number_of(self.steps, "step"), number_of(self.syncs, "round"), bytes_in_words(self.bytes_sent)]
        return block(type(self).__name__, [*lines, f"done: {', '.join(done)} sent"], self.optim)

    @property
    def steps(self) -> int:
        """The number of steps made."""
        return self._calendar.step

    @property
    def syncs(self) -> int:
        """The number of rounds begun."""
        return self._tracks.count

    @property
    def is_local(self) -> bool:
        """Whether the current step is after warm-up."""
        return self._calendar.is_local

    @property
    def agreed(self) -> bool:
        """Whether all replicas have the same parameters now: in warm-up, and after a round until the next step.

        If not, ranks must save their own parameters and their own :meth:`state_dict`, or call :meth:`sync` first. The
        state of the inner optimizer may differ either way, unless ``state="average"`` averages it.
        """
        if self._everyone.size == 1 or self._calendar.local_steps == 0:
            return True
        return not self._tracks.top_is_open and (self._made_equal or not self._levels[-1].kept)

    @property
    def bytes_sent(self) -> int:
        """The number of bytes this rank has sent to average parameters, state and buffers, without gradients."""
        return self._tracks.bytes_sent

    def seen(self, amount: float) -> None:
        """With ``weighted=True``: tell how much data this rank has trained on since the last call.

        Args:
            amount: the number of samples or tokens; ranks must use the same unit.
        """
        self._tracks.see(amount)

    @property
    def replicas(self) -> int:
        """The number of replicas: ranks that average their gradients count as one."""
        return self._everyone.size // (1 if self._subgroup is None else self._subgroup.size)

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer of the highest level that has one. Its ``param_groups`` are live: schedule them."""
        found = [outer.optimizer for outer in self._anchors.outers if outer is not None]
        return found[-1] if found else None

    @property
    def outers(self) -> list[Optimizer | None]:
        """The outer optimizer of each level, or None."""
        return [None if outer is None else outer.optimizer for outer in self._anchors.outers]

    def anchors(self, level: int = -1) -> dict[str, Tensor]:
        """The anchors of a level by parameter name: where the outer optimizer is, the same on every rank."""
        outer = self._anchors.outers[level]
        return {} if outer is None else outer.present

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the optimizer's step, then exchange what the calendar says.

        If a collective fails, its error is raised and parameters keep the values after the step.
        """
        if not self.optim.state and _torch.is_creating_state():
            return self._create_state()
        with self._scaled_step():
            Join.notify_join_context(self)
            self._start.begin(type(self).__name__)
            self._made_equal, self._steps_made = False, None
            self._anchors.note_rates()
            self._is_stepping = True
            try:
                if closure is None:
                    self._compare_closures(False)
                loss = self._step_inner(closure)
            finally:
                self._is_stepping = self._averaged_before = False
                if self._gradient_mean is not None:
                    self._gradient_mean.forget()
            self._tracks.move()
            due = self._calendar.due()
            try:
                for level, _ in due:
                    self._calendar.exchanged(level)
                if due:
                    check_cover(self._ddp, self._contents.params(), self._everyone.size)
                self._tracks.after_step(self._calendar.step, due)
            finally:
                self._calendar.advance()  # even if a round failed, so that all ranks count the same
            return loss

    def _create_state(self) -> None:
        """A step of the inner optimizer that torch.distributed.checkpoint makes. It is none of the replica's."""
        self._is_stepping = True
        try:
            self.optim.step()
        finally:
            self._is_stepping = False

    def sync(self) -> None:
        """Let all replicas agree now, independently of the calendar. Call it on every rank, after the same step."""
        self._start.between_steps()
        self._tracks.now(self._calendar.step)
        self._calendar.exchanged_already()
        self._made_equal = True

    def finish(self) -> None:
        """Call it when this rank has no data left: takes part in rounds until all ranks are done.

        A rank has a weight in the round after its last step, and none after that. When this method returns, all
        replicas are equal, and :attr:`steps` is the largest number of steps of any rank. (If ``nonfinite="skip"`` has
        skipped the last round, which warns, replicas still differ and :attr:`agreed` is False.) During warm-up, and if
        other ranks of the node still average gradients, use ``torch.distributed.algorithms.Join`` with the DDP module
        and this optimizer instead, because there are collectives at every step.
        """
        if not self._calendar.is_local or (self._everyone.size == 1 and not self._anchors):
            self._tracks.land()
            return
        self._start.at_the_end()
        if self._steps_made is None:
            self._steps_made = self._calendar.step
        while True:
            over, problems = self._take_part(self._calendar.due())
            if over:
                break
            self._calendar.advance_to_due(self._tracks.next_landing())  # even if a round failed: the others count on
            if problems:
                raise problems[0]
        try:
            most = self._tracks.latest(self._steps_made)
        except BaseException:  # the last round has failed on another rank, which goes on to the next one
            self._calendar.advance_to_due(self._tracks.next_landing())
            raise
        self._calendar.go_to(most)
        self._steps_made, self._made_equal = None, True
        warn_of(problems)

    def _take_part(self, due: Sequence[tuple[int, int]], *, may_be_last: bool = True) -> tuple[bool, list[Exception]]:
        """On a rank without data: do what is due after a step of the other ranks.

        Returns:
            Whether no rank has data left and all agree, and the errors of rounds that failed.
        """
        step = self._calendar.step
        problems: list[Exception] = []
        self._tracks.attempt(problems, self._tracks.land_due, step, due)
        for level, part in due:
            self._calendar.exchanged(level)
            last = may_be_last and level == self._top
            try:
                if self._tracks.take_part(step, level, part, problems, may_be_last=last) and last:
                    for other in self._tracks.parts(level):
                        if other != part:
                            self._tracks.take_part(step, level, other, problems, may_be_last=True)
                    return True, problems
            except Exception as error:
                problems.append(error)
        return False, problems

    def average_gradients(self) -> None:
        """For modules without DDP: average gradients now, for example to clip them before ``step()``.

        Otherwise ``step()`` does it. With DDP this does nothing, because backward has averaged them. Call it on every
        rank, and with a scaler after ``scaler.unscale_(optimizer)``.
        """
        averages = self._gradient_mean is not None and self._gradient_peers() is not None
        if averages and _torch.is_joining(self):
            raise RuntimeError(
                "average_gradients() cannot be used under Join while gradients are averaged, because a rank without "
                "data does not know that it is called; leave it to step(), or wrap the module in "
                "DistributedDataParallel, which averages in backward, to clip before step()"
            )
        self._reduce_gradients(False)

    def _gradient_group(self) -> Any:
        """The process group over which gradients of the current step are averaged; None if they are not."""
        peers = self._gradient_peers()
        return None if peers is None else peers.group

    def _gradient_peers(self) -> Any:
        return self._subgroup if self._calendar.settle() else self._everyone

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly: inner and outer state, anchors, residuals, counters, rounds in flight.

        Between rounds ranks differ, so that each must save its own. A round in flight is waited for; after loading it
        is applied at the step at which it would have been. Saving works after a round has failed, too.
        """
        calendar = self._calendar.state_dict()
        step = calendar.pop("step")
        mine = {
            "wrapper": type(self).__name__,
            "replica": self._replica(),
            "replicas": self.replicas,
            "agreed": self.agreed,
            **calendar,
            **self._tracks.state_dict(anchored=self._start.is_anchored),
            "averaged": self._contents.averaged(),
        }
        inner = self._inner_state_dict()
        mine["stateful"] = [key for key in inner["state"] if isinstance(key, int)]
        # In a tuple, which torch.distributed.checkpoint keeps in one piece: what is in it depends on the step.
        return self._finish_state_dict({**inner, "step": step, "replica": (mine,)})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, of ``PostLocalSGDOptimizer``, or of the optimizer alone.

        A checkpoint without anchors starts them from the parameters at the next step; load the model first. Warns if it
        is another replica's, saved when replicas differed: what this one had learned since the last round is lost.
        """
        state_dict = self._begin_load(state_dict)
        step, mine = state_dict.pop("step", None), own_part(state_dict.pop("replica", None))
        if "param_groups" in state_dict:
            state_dict = numbered(state_dict)
            check_complete(state_dict, mine)
        averaged = self._contents.averaged()
        self._contents.load_averaged(mine.get("averaged", averaged))  # also what has been frozen since
        try:
            self._tracks.check_state_dict(mine)
            self.optim.load_state_dict(state_dict)
        except BaseException:
            self._contents.load_averaged(averaged)
            raise
        if step is None:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
                stacklevel=2,
            )
        self._calendar.load_state_dict({**mine, "step": step or 0})
        self._start.load(begun=bool(step), anchored=self._tracks.load_state_dict(mine))
        self._made_equal, self._steps_made = bool(mine.get("agreed")), None
        if not mine.get("agreed", True) and mine["replica"] != self._replica() and self.replicas > 1:
            warnings.warn(
                f"this state was saved by replica {mine['replica']} of {mine['replicas']} after step {step}, between "
                f"two rounds, when replicas differed, and it is loaded on replica {self._replica()}: what that one had "
                "learned since the last round is lost, and its optimizer state. Save and load the model and "
                "state_dict() of every rank; or call sync() on every rank before saving one",
                stacklevel=2,
            )
        self._finish_load()

    def _replica(self) -> int:
        """The number of this replica: its first rank, for ranks that average their gradients are one replica."""
        everyone = self._everyone
        ranks = [everyone.ranks[everyone.rank]] if self._subgroup is None else self._subgroup.ranks
        return min(everyone.ranks.index(rank) for rank in ranks if rank in everyone.ranks)

    @property
    def join_device(self) -> torch.device:
        """For ``torch.distributed.algorithms.Join``."""
        return self._everyone.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """For ``torch.distributed.algorithms.Join``."""
        group: ProcessGroup = self._everyone.group
        return group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For ``torch.distributed.algorithms.Join``."""
        return ReplicaJoinHook(self)

    def _shadow_step(self) -> None:
        """On a rank without data: take part in the collectives of one step of the other ranks."""
        if not self._calendar.settle():
            self._start.missed_warmup = True
            self._tracks.stay()
        self._start.begin(type(self).__name__)
        self._compare_closures(False)
        peers = self._gradient_peers()
        if self._gradient_mean is not None and peers is not None:
            self._gradient_mean.average(self._contents.params(), peers, absent=True)
        _, problems = self._take_part(self._calendar.due(), may_be_last=False)
        self._calendar.advance()
        if problems:
            raise problems[0]

    def _last_average(self) -> None:
        """Agree after the last step of all ranks."""
        self._start.at_the_end()
        problems: list[Exception] = []
        for part in self._tracks.parts(self._top):
            self._tracks.take_part(self._calendar.step, self._top, part, problems, may_be_last=True)
        self._made_equal = True
        warn_of(problems)

    def _average_gradients_in_step(
        self, module: torch.nn.Module, comm_hook: Any, handle: Any, bucket_bytes: int
    ) -> None:
        if comm_hook is not None:
            raise ValueError(
                f"comm_hook needs a DistributedDataParallel module, but the module is a {type(module).__name__}; wrap "
                "it or leave comm_hook out"
            )
        if self._everyone.size == 1:
            return
        inside = is_inside_ddp(list(self._contents.params().values()))
        if inside or any(isinstance(part, DistributedDataParallel) for part in module.modules()):
            raise ValueError(
                "parameters of this module belong to a DistributedDataParallel module, which would still average their "
                "gradients over all ranks at every step; pass the DistributedDataParallel module: "
                f"{frameworks.DDP_IN_FRAMEWORKS}"
            )
        if handle is None:
            self._gradient_mean = GradientMean(bucket_bytes)
            self._gradient_mean.watch(self._contents.params())
            weakref.finalize(self, self._gradient_mean.remove).atexit = False
            self._start.averages_gradients = True
        elif self._subgroup is not None or self._calendar.warmup != 0:
            raise ValueError(
                "the optimizer is overlapped and the module is not in DistributedDataParallel, so gradients are used "
                "before step() could average them; pass warmup=0 and subgroup=None, or wrap the module"
            )

    def _together(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Average the loss along with the gradients, so that LBFGS decides the same on every rank."""
        peers = self._gradient_peers()
        if peers is None or peers.size == 1:
            return closure
        if _torch.is_joining(self):
            raise RuntimeError(
                "step(closure) cannot be used under Join while gradients are averaged, because a rank without data "
                "does not know how often the closure is called; call backward() yourself and step() without a closure"
            )

        def averaged() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._compare_closures(True)
            self._averaged_before = False
            self._reduce_gradients(False, in_closure=True)
            return mean_loss(loss, peers)

        return averaged

    def _compare_closures(self, is_given: bool) -> None:
        """With DDP, which averages gradients itself: at the first step, after backward, ask whether all have a closure.

        Without DDP ranks ask at every step, when they average gradients.
        """
        peers = self._gradient_peers()
        if self._ddp is None or self._compared_closures or peers is None or peers.size == 1:
            return
        check_same_closure(is_given, peers)
        self._compared_closures = True

    @property
    def _reduces_gradients(self) -> bool:
        return self._gradient_mean is not None and self._gradient_peers() is not None

    def _reduce_gradients(self, found: bool, in_closure: bool = False) -> bool:
        peers = self._gradient_peers()
        if self._gradient_mean is None or peers is None:
            return found
        params, again = self._contents.params(), self._averaged_before
        self._averaged_before = True
        # If one rank has inf or NaN in its gradients, so has every rank after averaging.
        found = self._gradient_mean.average(params, peers, found=found, again=again, in_closure=in_closure)
        self._gradient_mean.keep_in_mind(params)
        return found
