"""``Replica``: wraps any optimizer, so that replicas train by themselves and synchronise every N steps."""

from __future__ import annotations

import math
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat import _torch, frameworks
from offbeat._types import CommHook
from offbeat.ddp import is_inside_ddp
from offbeat.errors import raise_together
from offbeat.optim.checkpoint import numbered
from offbeat.overlap.handle import overlap_of
from offbeat.replicas.anchoring import Anchoring
from offbeat.replicas.board import Board, attempt
from offbeat.replicas.checks import (
    check_cover,
    check_elastic,
    check_inner,
    check_levels,
    check_module,
    check_reduce_dtype,
    check_trains,
)
from offbeat.replicas.compare import check_same_options
from offbeat.replicas.contents import Contents, check_buffers
from offbeat.replicas.ddp_hook import attach
from offbeat.replicas.describe import block, bytes_in_words, level_in_words, number_of, ranks_in_words, warmup_in_words
from offbeat.replicas.fragment import Fragment
from offbeat.replicas.gradients import GradientMean, check_same_closure, mean_loss
from offbeat.replicas.guards import BeforeForward, Guard, Leaving, refuse_wrapped_state
from offbeat.replicas.joining import Joining, connect_elastic
from offbeat.replicas.level import Level, options_in_words
from offbeat.replicas.options import (
    Buffers,
    Ranks,
    Snapshot,
    State,
    Warmup,
    check_bool,
    check_float_dtype,
    check_one_number,
    in_words,
)
from offbeat.replicas.outer import Outer
from offbeat.replicas.reports import RoundHook, RoundReport
from offbeat.replicas.round import Outcome
from offbeat.replicas.schedule import Entry, Schedule
from offbeat.replicas.state_dict import check_complete, check_rounds, load_rounds, outers_of, own_part, save_rounds
from offbeat.replicas.state_policy import check_state
from offbeat.replicas.values import Reduction, bytes_of_buckets
from offbeat.replicas.wrapper import OptimizerWrapper
from offbeat.wire.elastic import AloneInside, Elastic
from offbeat.wire.peers import ExchangeError, Traffic, gather
from offbeat.wire.routes import Route, all_arrive, memberships, peers_of, same_shards, subgroup_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Replica"]

Loss = TypeVar("Loss")

#: After so many rounds that have failed, finish() of an elastic replica gives up.
ATTEMPTS = 5


class Replica(OptimizerWrapper):
    r"""Wraps any optimizer: replicas train by themselves and synchronise every N steps, at one or several levels.

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
        group: the ranks that take part: all if None, or for sharded modules those that hold the same shards. Or an
            :class:`offbeat.Elastic`: this program is one replica, and others come and go.
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
        group: Ranks | Elastic | None = None,
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
    ) -> None:
        _torch.require("sync")
        check_module(opt, module, type(self).__name__)
        check_inner(opt, type(self).__name__)
        levels = check_levels(levels, state)
        check_state(state, max(level.delay for level in levels), opt)
        check_buffers(buffers)
        if snapshot not in ("device", "cpu"):
            raise ValueError(f"snapshot must be 'device' or 'cpu', but got {snapshot!r}")
        check_float_dtype("reduce_dtype", reduce_dtype)
        check_bool(weighted=weighted, sync_init=sync_init)
        self._schedule = Schedule([_entry(level) for level in levels], warmup)  # checks warmup before any collective
        bucket_bytes = bytes_of_buckets(bucket_mb)
        super().__init__(opt)
        called = frameworks.inner_module(module)
        module = _torch.inner_module(called)
        check_trains(opt, module, type(self).__name__)
        params = [p for group in opt.param_groups for p in group["params"]]
        check_reduce_dtype(reduce_dtype, params)
        sharded = any(hasattr(p, "device_mesh") for p in params)
        self._traffic = Traffic()
        elastic = group if isinstance(group, Elastic) else None
        if elastic is not None:
            check_elastic(levels, sync_init=sync_init, sharded=sharded)
            subgroup = None
        within = AloneInside(self._traffic) if elastic is not None else peers_of(group, self._traffic)
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
        self._everyone = same_shards(params, within, self._traffic) if sharded and group is None else within
        if sharded and self._everyone.size == 1 < within.size:
            warnings.warn(
                "the module is sharded over all ranks, so there is one replica and nothing to average; to have several "
                "replicas, shard over a mesh inside each node",
                stacklevel=2,
            )
        self._subgroup, self._why_subgroup = subgroup_of(subgroup, self._everyone, self._traffic, sharded=sharded)
        self._contents = contents = Contents(opt, module, state, buffers)
        self._token: str = gather(within, uuid.uuid4().hex)[0]
        self._elastic = elastic
        self._memberships: list[Any] = []
        if elastic is not None:
            self._memberships.append(connect_elastic(elastic, contents, levels, type(self).__name__, self._traffic))
        else:
            routes = [Route(level.group, level.every, level.deadline, level.delay > 0) for level in levels]
            self._memberships += memberships(routes, self._everyone, within, mesh, self._token, self._traffic)
        contents.note_masks(self._everyone)
        if not contents.params():
            raise ValueError(
                "none of the optimizer's parameters has requires_grad, so that there is nothing to train or average; "
                "unfreeze some of them first"
            )
        for level in levels:  # raises if there are too few parameters for its fragments
            level.cut({name: p.numel() for name, p in contents.params().items()}, contents.frozen())
        copies = torch.device("cpu") if snapshot == "cpu" else None
        self._levels, self._weighted = levels, weighted
        self._board = Board(contents, self._make_fragments(bucket_bytes, reduce_dtype, copies), weighted=weighted)
        self._gradient_mean: GradientMean | None = None
        self._made_equal = False
        self._averaged_before = False  # whether gradients have been averaged since the last step
        self._compared_closures = False  # whether ranks know that all call step() with a closure, or all without
        self._ddp = module if isinstance(module, DistributedDataParallel) else None
        self._anchoring = Anchoring(
            contents, list(self._board), self._schedule, self._everyone, self._ddp, sharded=sharded
        )
        check_cover(self._ddp, contents.params(), self._everyone.size)
        if sync_init:
            self._anchoring.start_from_first_rank()
        for outer in filter(None, outers_of(self._board)):
            outer.make(contents.params())
        words = [f"{type(outer).__name__}({in_words(outer.defaults)})" for outer in self.outers if outer is not None]
        check_same_options({"outer": words}, within)
        self._attachment: Any = None
        if self._ddp is not None:
            self._attachment = attach(self, self._ddp, comm_hook)
        else:
            self._average_gradients_in_step(module, comm_hook, overlap_of(opt), bucket_bytes)
        self._is_stepping = False
        self._steps_made: int | None = None  # when finish() was called first, if it has not returned since
        for hook in (
            called.register_forward_pre_hook(BeforeForward(self)),
            opt.register_step_pre_hook(Guard(self)),
            opt.register_load_state_dict_pre_hook(refuse_wrapped_state),
        ):
            weakref.finalize(self, hook.remove).atexit = False
        weakref.finalize(self, self._board.close).atexit = False
        self._leaving = Leaving(type(self).__name__, is_real=getattr(within, "group", None) is not None)
        weakref.finalize(self, self._leaving.warn)
        self._joining: Joining | None = None
        if elastic is not None:
            self._joining = Joining(elastic, self._memberships[0], contents, self._board, self._schedule)
            self._joining.begin(self.load_state_dict)

    def _make_fragments(
        self, bucket_bytes: int, reduce_dtype: torch.dtype | None, copies: torch.device | None
    ) -> list[list[Fragment]]:
        fragments = []
        for place, (level, membership) in enumerate(zip(self._levels, self._memberships, strict=True)):
            outer = None if level.outer is None else Outer(level, self._contents.groups)
            reduction = Reduction(bucket_bytes, reduce_dtype, ordered=level.ordered)
            fragments.append(
                [
                    Fragment(level, place, number, self._contents, membership, reduction, outer, copies)
                    for number in range(level.parts)
                ]
            )
        return fragments

    def __repr__(self) -> str:
        everyone, node = self._everyone, self._subgroup
        after = "every rank by itself" if node is None else ranks_in_words(node.ranks, everyone.ranks)
        warmup = warmup_in_words(self._schedule.warmup)
        lines = [
            f"ranks: {everyone.size}, replicas: {self.replicas}",
            f"gradients: averaged over all ranks in warm-up ({warmup}); then {after} ({self._why_subgroup})",
        ]
        for level, membership, outer in zip(self._levels, self._memberships, self.outers, strict=True):
            lines.append(f"parameters: {level_in_words(level, membership.peers, everyone, outer)}")
        done = [number_of(self.steps, "step"), number_of(self.syncs, "round"), bytes_in_words(self.bytes_sent)]
        return block(type(self).__name__, [*lines, f"done: {', '.join(done)} sent"], self.optim)

    @property
    def steps(self) -> int:
        """The number of steps made."""
        return self._schedule.step

    @property
    def syncs(self) -> int:
        """The number of rounds begun."""
        return self._board.count

    @property
    def is_local(self) -> bool:
        """Whether the current step is after warm-up."""
        return self._schedule.is_local

    @property
    def agreed(self) -> bool:
        """Whether all replicas have the same parameters now: in warm-up, and after a round until the next step.

        If not, ranks must save their own parameters and their own :meth:`state_dict`, or call :meth:`sync` first. The
        state of the inner optimizer may differ either way, unless ``state="average"`` averages it.
        """
        if (self._everyone.size == 1 and self._elastic is None) or self._schedule.local_steps == 0:
            return True
        return not self._board.top_is_open and (self._made_equal or not self._levels[-1].kept)

    @property
    def bytes_sent(self) -> int:
        """The number of bytes this rank has sent to others since training began, loaded checkpoints included.

        It counts parameters, optimizer state and buffers, gradients (in warm-up and inside a node), and the few bytes
        with which ranks compare and vote. It does not count what a ``comm_hook`` of yours sends, nor what FSDP2 does.
        """
        return self._traffic.sent

    @property
    def last_round(self) -> RoundReport | None:
        """What the newest round did, or None before the first."""
        return self._board.reports.last

    def register_round_hook(self, function: Callable[[RoundReport], Any], *, norms: bool = False) -> RoundHook:
        """Call a function with a :class:`offbeat.RoundReport` when a round has ended, on the training thread.

        Args:
            function: called with the report.
            norms: also compute the norms in the report, from now on; this takes two passes over the parameters a round.

        Returns:
            A handle; its ``remove()`` ends the calls.
        """
        self._board.reports.functions.append(function)
        self._board.reports.norms = self._board.reports.norms or norms
        return RoundHook(self._board.reports, function)

    def seen(self, amount: float) -> None:
        """With ``weighted=True``: tell how much data this rank has trained on since the last call.

        Args:
            amount: the number of samples or tokens; ranks must use the same unit.
        """
        if not self._weighted:
            raise ValueError("seen() needs weighted=True, but all ranks have the same weight; pass weighted=True")
        check_one_number("the amount given to seen()", amount)
        if not (amount >= 0 and math.isfinite(amount)):
            raise ValueError(f"seen() takes a non-negative, finite number, but got {amount!r}")
        self._board.see(amount)

    @property
    def replicas(self) -> int:
        """The number of replicas: ranks that average their gradients count as one.

        With :class:`offbeat.Elastic` the number that was given to it, or else of those in the last round.
        """
        if self._elastic is not None:
            membership = self._memberships[0]
            present = membership.founders if membership.peers is None else membership.peers.size
            return self._elastic.replicas or max(1, int(present))
        return int(self._everyone.size) // (1 if self._subgroup is None else self._subgroup.size)

    @property
    def outer(self) -> Optimizer | None:
        """The outer optimizer of the highest level that has one. Its ``param_groups`` are live: schedule them."""
        optimizers = [optimizer for optimizer in self.outers if optimizer is not None]
        return optimizers[-1] if optimizers else None

    @property
    def outers(self) -> list[Optimizer | None]:
        """The outer optimizer of each level, or None."""
        return [None if outer is None else outer.optimizer for outer in outers_of(self._board)]

    def anchors(self, level: int = -1) -> dict[str, Tensor]:
        """The anchors of a level by parameter name: where the outer optimizer is, the same on every rank."""
        outer = outers_of(self._board)[level]
        return {} if outer is None else dict(outer.anchors)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the optimizer's step, then exchange what is due.

        If a collective fails, its error is raised and parameters keep the values after the step.
        """
        if not self.optim.state and _torch.is_creating_state():
            return self._create_state()
        with self._scaled_step():
            if self._joining is not None:
                self._joining.before_step()
                self._joining.hand_over(self.state_dict)
            self._anchoring.before_step(type(self).__name__)
            self._made_equal, self._steps_made = False, None
            for outer in filter(None, outers_of(self._board)):
                outer.note_rates()
            self._is_stepping = True
            try:
                if closure is None:
                    self._compare_closures(False)
                loss = self._step_inner(closure)
            finally:
                self._is_stepping = self._averaged_before = False
                if self._gradient_mean is not None:
                    self._gradient_mean.forget()
            self._board.move()
            due = self._schedule.due()
            try:
                for level, _ in due:
                    self._schedule.exchanged(level)
                if due:
                    check_cover(self._ddp, self._contents.params(), self._everyone.size)
                self._board.after_step(self._schedule.step, due)
            finally:
                self._schedule.advance()  # even if a round failed, so that all ranks count the same
                self._leaving.step(apart=not self.agreed, syncs=self.syncs)
            return loss

    def _create_state(self) -> None:
        """A step of the inner optimizer that torch.distributed.checkpoint makes. Do not count it as a step."""
        self._is_stepping = True
        try:
            self.optim.step()
        finally:
            self._is_stepping = False

    def sync(self) -> None:
        """Make all replicas equal now, independently of the schedule. Call it on every rank, after the same step."""
        self._anchoring.before_sync()
        late: list[BaseException] = []
        problems: list[BaseException] = []
        attempt(late, self._board.land_all, at_the_end=True)
        for fragment in self._board.top:
            attempt(problems, self._board.run, fragment, self._schedule.step, now=True)
        raise_together(problems)
        self._schedule.exchanged_already()
        self._end_together(late)

    def finish(self) -> None:
        """Call it when this rank has no data left: takes part in rounds until all ranks are done.

        A rank has a weight in the round after its last step, and none after that. When this method returns, all
        replicas are equal, and :attr:`steps` is the largest number of steps of any rank. (If ``nonfinite="skip"`` has
        skipped the last round, which warns, replicas still differ and :attr:`agreed` is False.)

        Raises:
            RuntimeError: it is warm-up, or ranks of a node average gradients at every step, and other ranks may still
                have data: agree on the number of steps before training. Or this rank has had no batch under
                ``DistributedDataParallel(static_graph=True)``, whose first pass needs one of every rank.
        """
        if self._everyone.size == 1 and not self._has_outer and self._elastic is None:
            self._board.land_all(at_the_end=True)
            return
        self._check_can_finish()
        if not self._schedule.is_local:
            return
        self._anchoring.at_the_end()
        rebuilding = None if self._attachment is None else self._attachment.take_part_in_first_passes()
        if self._steps_made is None:
            self._steps_made = self._schedule.step
        problems: list[BaseException] = []
        while True:
            outcome = self._take_part(self._schedule.due(), problems)
            if outcome is not None:
                break
            self._schedule.advance_to_due(self._next_landing())  # even if a round failed: the others count on
            if self._joining is not None:
                self._joining.before_step()
                if self._board.failed_in_a_row >= ATTEMPTS:
                    raise ExchangeError(f"{ATTEMPTS} rounds failed one after the other; the warnings say why")
            raise_together(problems)
        if rebuilding is not None:
            rebuilding.join()
        self._schedule.go_to(max(outcome.most_steps, self._steps_made))
        self._steps_made = None
        self._end_together(problems)

    def _check_can_finish(self) -> None:
        """Raise if ranks average gradients at every step, and not all are at the end: they would wait for this one.

        They are in step with each other, so that all arrive within a moment if they are at the end too.
        """
        is_local = self._schedule.is_local
        lacks_first_pass = self._attachment is not None and self._attachment.lacks_first_pass
        asks_all = self._ddp is not None and bool(self._ddp.find_unused_parameters)
        together = self._subgroup if is_local and not (lacks_first_pass or asks_all) else self._everyone
        if together is None or together.size == 1:
            return
        name = f"offbeat/{self._token}/finish/{self.steps}.{min(together.ranks)}"
        if all_arrive(together, name):
            return
        for membership in self._memberships:
            membership.close()
        if is_local and lacks_first_pass:
            raise RuntimeError(
                "finish() was called on a rank that has had no batch, while DistributedDataParallel(static_graph=True) "
                "waits for the first batch of every rank; its connections were closed, so that the others' rounds fail "
                "soon. Give every rank at least one batch, or leave static_graph out"
            )
        if is_local and asks_all:
            raise RuntimeError(
                "finish() was called while other ranks have data, and find_unused_parameters=True makes "
                "DistributedDataParallel ask all ranks at every step which parameters they used; the connections of "
                "this rank were closed, so that the others' rounds fail soon. Pass find_unused_parameters=False, or "
                "make equally many steps on every rank"
            )
        where = "inside its node" if is_local else "over all ranks, because it is still warm-up,"
        raise RuntimeError(
            f"finish() was called after {number_of(self.steps, 'step')}, while gradients are averaged {where} at every "
            "step, so that the other ranks would wait for this one; its connections were closed, so that their rounds "
            "fail soon. Agree on the number of steps before training: take the smallest number of batches of any rank, "
            "with torch.distributed.all_reduce and ReduceOp.MIN"
        )

    def _take_part(self, due: Sequence[tuple[int, int]], problems: list[BaseException]) -> Outcome | None:
        """On a rank without data: do what is due after a step of the other ranks.

        Returns:
            The outcome of the last round, if no rank has data left and all agree.
        """
        board, step, steps_made = self._board, self._schedule.step, self._steps_made or 0
        attempt(problems, board.land_due, step, due, at_the_end=True)
        for place, number in due:
            self._schedule.exchanged(place)
            is_top = place == len(self._levels) - 1
            fragments = [board.fragments[place][number]]
            try:
                outcome = board.take_part(
                    fragments[0], step, may_be_last=is_top, steps_made=steps_made, problems=problems
                )
                if outcome is not None and is_top:
                    for other in board.top:
                        if other is not fragments[0]:
                            board.take_part(other, step, may_be_last=True, steps_made=steps_made, problems=problems)
                    # Once more: a rank that has missed the end of the last round is not left alone with it.
                    if outcome.meeting is not None:
                        outcome.meeting.commit()
                    return outcome
            except Exception as error:
                problems.append(error)
        return None

    def _end_together(self, problems: Sequence[BaseException]) -> None:
        """Replicas are equal. Rounds that failed before that are warned of: there is nothing to be done again."""
        self._made_equal = True
        self._leaving.step(apart=not self.agreed, syncs=self.syncs)
        for error in problems:
            warnings.warn(f"a round failed before the last one, after which replicas agree: {error}", stacklevel=3)

    def _next_landing(self) -> int | None:
        """The first step after which a round in flight lands."""
        board = self._board
        steps = [
            flight.pending.step + board.fragments[place][number].level.delay
            for (place, number), flight in board.flights.items()
        ]
        return min(steps, default=None)

    @property
    def _has_outer(self) -> bool:
        return any(outer is not None for outer in outers_of(self._board))

    def average_gradients(self) -> None:
        """For modules without DDP: average gradients now, for example to clip them before ``step()``.

        Otherwise ``step()`` does it. With DDP this does nothing, because backward has averaged them. Call it on every
        rank, and with a scaler after ``scaler.unscale_(optimizer)``.
        """
        self._reduce_gradients(False)

    def _gradient_group(self) -> Any:
        """The process group over which gradients of the current step are averaged; None if they are not."""
        peers = self._gradient_peers()
        return None if peers is None else peers.group

    def _gradient_peers(self) -> Any:
        return self._subgroup if self._schedule.settle() else self._everyone

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly: inner and outer state, anchors, residuals, counters, rounds in flight.

        Between rounds ranks differ, so that each must save its own. A round in flight is waited for; after loading it
        is applied at the step at which it would have been. Saving works after a round has failed, too.
        """
        schedule = self._schedule.state_dict()
        step = schedule.pop("step")
        own = {
            "wrapper": type(self).__name__,
            "replica": self._replica(),
            "replicas": self.replicas,
            "agreed": self.agreed,
            **schedule,
            **save_rounds(self._board, anchored=self._anchoring.is_anchored),
            "averaged": self._contents.averaged(),
            "bytes_sent": self.bytes_sent,
        }
        self._leaving.save()
        inner = self._inner_state_dict()
        own["stateful"] = [key for key in inner["state"] if isinstance(key, int)]
        # In a tuple, which torch.distributed.checkpoint keeps in one piece: what is in it depends on the step.
        return self._finish_state_dict({**inner, "step": step, "replica": (own,)})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class, of ``PostLocalSGDOptimizer``, or of the optimizer alone.

        A checkpoint without anchors starts them from the parameters at the next step; load the model first. Warns if it
        is another replica's, saved when replicas differed: what this one had learned since the last round is lost.
        """
        state_dict = self._begin_load(state_dict)
        step, own = state_dict.pop("step", None), own_part(state_dict.pop("replica", None))
        if "param_groups" in state_dict:
            state_dict = numbered(state_dict)
            check_complete(state_dict, own)
        averaged = self._contents.averaged()
        self._contents.load_averaged(own.get("averaged", averaged))  # also what has been frozen since
        try:
            check_rounds(own, self._board, self._contents)
            self.optim.load_state_dict(state_dict)
        except BaseException:
            self._contents.load_averaged(averaged)
            raise
        if step is None:
            warnings.warn(
                "Loaded state dict does not contain a step counter for an averager. Setting step counter to 0.",
                stacklevel=2,
            )
        self._schedule.load_state_dict({**own, "step": step or 0})
        anchored = load_rounds(own, self._board, self._contents.params())
        apart = str(own.get("wrapper", "another class")) if not own.get("agreed", True) else None
        self._anchoring.load(begun=bool(step), anchored=anchored, apart=apart)
        if self._elastic is None:
            self._traffic.sent = int(own.get("bytes_sent", self._traffic.sent))
        self._made_equal, self._steps_made = bool(own.get("agreed")), None
        if not own.get("agreed", True) and own["replica"] != self._replica() and self.replicas > 1:
            warnings.warn(
                f"this state was saved by replica {own['replica']} of {own['replicas']} after step {step}, between "
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
        return int(min(everyone.ranks.index(rank) for rank in ranks if rank in everyone.ranks))

    def join_hook(self, **kwargs: Any) -> Any:
        """Raise: :meth:`finish` takes the place of ``torch.distributed.algorithms.Join``."""
        raise RuntimeError(
            f"{type(self).__name__} cannot be used with torch.distributed.algorithms.Join; call finish() on every rank "
            "when it has no data left"
        )

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
            self._anchoring.averages_gradients = True
        elif self._subgroup is not None or self._schedule.warmup != 0:
            raise ValueError(
                "the optimizer is overlapped and the module is not in DistributedDataParallel, so gradients are used "
                "before step() could average them; pass warmup=0 and subgroup=None, or wrap the module"
            )

    def _together(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Average the loss along with the gradients, so that LBFGS decides the same on every rank."""
        peers = self._gradient_peers()
        if peers is None or peers.size == 1:
            return closure

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


def _entry(level: Level) -> Entry:
    """A level as the schedule sees it."""
    return Entry(
        level.every,
        level.phase,
        level.parts,
        covers=level.parts == 1 and (level.outer is None or not level.delay),
        can_be_covered=level.outer is None,
    )
