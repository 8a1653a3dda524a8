"""Buckets from DistributedDataParallel: reduced first, by whatever hook the user has, then stepped.

On the CPU a thread of our own steps a bucket while backward computes and gloo sends the next ones; on a GPU a stream of
our own does. DDP waits for both at the end of backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from offbeat.overlap.arrivals import Arrivals, refuse_graph
from offbeat.overlap.core import Core
from offbeat.overlap.passes import current_pass, is_nested, queue_callback

__all__ = ["DdpSource", "check_ddp"]

#: By DDP module, the hook that was registered with it. DDP cannot forget a hook, so a removed one goes on reducing.
_hooks: Any = WeakIdKeyDictionary()

_WIDE = (torch.float32, torch.float64)


def check_ddp(ddp: DistributedDataParallel, comm_hook: Any) -> None:
    """Raise if buckets of this module cannot be stepped, or its hook is taken."""
    if ddp.mixed_precision is not None:
        raise ValueError("DDP's mixed_precision cannot be overlapped; use torch.autocast, or fully_shard's policy")
    ours = _hooks.get(ddp)
    if ours is None and ddp._comm_hooks:
        name = getattr(ddp._comm_hooks[0][0], "__name__", "a hook")
        raise ValueError(
            f"this DistributedDataParallel module has a communication hook already ({name}) and can have only one; "
            "do not register it, give it as overlap(..., comm_hook=, comm_state=)"
        )
    if ours is not None and getattr(ours.inner, "keeps_its_place", False) and comm_hook is not None:
        raise ValueError(
            "LocalSGD reduces the gradients of this DistributedDataParallel module; give it the communication hook, as "
            "LocalSGD(..., comm_hook=)"
        )
    if ours is not None and ours.sources and comm_hook is not None:
        raise ValueError(
            "another optimizer is overlapped with this DistributedDataParallel module already, and the communication "
            "hook serves both; give comm_hook= in the first call of overlap() only"
        )
    if ddp._use_python_reducer:
        raise ValueError(
            "DDP's python reducer has no buckets; set torch._dynamo.config.optimize_ddp to 'ddp_optimizer'"
        )


class DdpSource:
    """One optimizer's share of a DDP module's buckets."""

    def __init__(self, core: Core, ddp: DistributedDataParallel, comm_hook: Any, comm_state: Any) -> None:
        self.core = core
        self._removed = False
        self._pass: int | None = None
        self._step = core.steps
        self._running = False
        self._local: set[int] = set()
        self._arrivals = Arrivals(self, ddp)
        self._hook = _hooks.get(ddp)
        if self._hook is None:
            hook = _CommHook(ddp)
            ddp.register_comm_hook(None, hook.registered())  # raises if DDP has a built-in one
            self._hook = _hooks[ddp] = hook
        if not self._hook.sources and not getattr(self._hook.inner, "keeps_its_place", False):
            self._hook.inner, self._hook.state = comm_hook, comm_state
        self._hook.add(self)
        if self._hook.inner is not None:  # ranks may get different gradients
            core.agreeing.append(ddp.process_group)
        self.look_at_params()

    def reduce_with(self, hook: Any) -> None:
        """Have buckets reduced by this communication hook, which gives all ranks of a bucket's group the same."""
        if self._hook.inner is not None and self._hook.inner is not hook:
            raise ValueError(
                "overlap() was given a communication hook, and a bucket can be reduced only once; give it as "
                "LocalSGD(..., comm_hook=) instead"
            )
        self._hook.inner, self._hook.state = hook, None

    def look_at_params(self) -> None:
        """The optimizer's parameters are others than before."""
        self._arrivals.cover(self.core.everyone)

    def arrived(self, p: Tensor) -> None:
        """This rank's gradient of a parameter is there, not reduced yet.

        DDP tells of parameters that no rank used that their gradient is zero; here it is learnt which this rank did.
        """
        if self._removed:
            raise RuntimeError("a backward pass went on after handle.remove(); call remove() between steps")
        self.core.receive(p)
        if self.core.is_new(self._step):
            self.begin_step()
        refuse_graph(p.grad)
        self._hook.note_storage(p)
        self._local.add(id(p))
        if self.core.accumulate > 1 and current_pass() != self._pass and not is_nested():
            # With accumulate=N every pass counts, under no_sync() or not.
            with self.core.lock:
                self.core.begin_pass()
            self._pass = current_pass()

    def share(self, params: Sequence[Tensor], *, first: bool) -> tuple[list[int], list[int]] | None:
        """Which of a bucket's parameters are this optimizer's, and which of those to step when the bucket is reduced.

        A parameter this rank did not use may be unused everywhere, and must then be left alone. DDP knows only at
        the end of backward; what it leaves in ``.grad`` is stepped by ``optimizer.step()``.

        Returns:
            Positions in the bucket, and positions in that list; None if it is not the time.
        """
        if self._removed:
            raise RuntimeError("a backward pass went on after handle.remove(); call remove() between steps")
        if first:
            self._running = True
            with self.core.lock:
                self.core.note_arrival()
                if self.core.look_at_groups():
                    self.look_at_params()
                if self.core.accumulate == 1:
                    self.core.begin_pass()
        if not self.core.is_last_pass:
            return None
        mine = [i for i, p in enumerate(params) if p in self._arrivals]
        return mine, [k for k, i in enumerate(mine) if id(params[i]) in self._local]

    def end_pass(self) -> None:
        """DDP has put the reduced gradients into ``.grad``."""
        with self.core.lock:
            self._running = False
            if self.core.is_last_pass:
                self.core.free(list(self.core.stepped.values()))
            for p in self.core.everyone:
                if self.core.clip is not None:
                    self.core.clip.moved(p)
                if self.core.scaling is not None:
                    self.core.scaling.moved(p)

    def flush(self) -> None:
        """DDP has waited for all buckets."""

    def begin_step(self) -> None:
        """Gradients from here on belong to the next step."""
        self._local.clear()
        self._pass, self._step = None, self.core.steps
        self._running = False

    @property
    def is_running(self) -> bool:
        """Whether buckets of a backward pass are on their way."""
        return self._running

    def remove(self) -> None:
        """Take hooks away; DDP goes on as if there had never been an overlap."""
        self._removed = True
        self._arrivals.remove()
        self._hook.remove(self)


class _CommHook:
    """The one hook of a DDP module: reduces as the user's hook or DDP itself would, then has optimizers step."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self.inner: Any = None
        self.state: Any = None
        self._sources: list[weakref.ref[DdpSource]] = []  # kept alive by their optimizers
        self._thread: ThreadPoolExecutor | None = None
        self._error: BaseException | None = None
        self._was_inside: dict[int, int] = {}  # by parameter, the storage its gradient was added up in
        self._streams: dict[torch.device, Any] = {}

    def registered(self) -> Any:
        """What DDP is given: a function, unannotated, because DDP compares annotations as objects."""

        def offbeat_overlap(state, bucket):  # type: ignore[no-untyped-def]
            return self.run(bucket)

        return offbeat_overlap

    @property
    def sources(self) -> list[DdpSource]:
        """The optimizers that step this module's buckets."""
        found = [source() for source in self._sources]
        return [source for source in found if source is not None]

    def add(self, source: DdpSource) -> None:
        """One optimizer more."""
        self._sources.append(weakref.ref(source))

    def remove(self, source: DdpSource) -> None:
        """One optimizer less. The user's hook stays: without it the numbers would change."""
        self._sources = [other for other in self._sources if other() is not source]
        if not self.sources and self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def run(self, bucket: Any) -> Future[Any]:
        """DDP's call: a bucket holds this rank's gradients."""
        params, buffer = bucket.parameters(), bucket.buffer()
        # A rank that has run out of data (join()) reduces zeros outside of any backward, to keep the others going.
        sources = self.sources if current_pass() != -1 else []
        shares = [(source, source.share(params, first=bucket.index() == 0)) for source in sources]
        if bucket.is_last() and sources:
            # DDP's own end of backward is queued after this hook returns; ours must come after that.
            ends = [weakref.ref(source) for source in sources]
            queue_callback(lambda: queue_callback(lambda: self._end_all(ends)))
        wanted = [(source, share) for source, share in shares if share is not None and share[0]]
        views = bucket.gradients() if wanted and buffer.layout == torch.strided else []
        # Dividing by a power of two commutes with adding, so it can wait for the thread or stream that steps, out of
        # backward's way. (Not for half precision, where small gradients would lose digits; nor where nobody steps.)
        ranks = self._ranks()
        late = bool(views) and self.inner is None and ranks & (ranks - 1) == 0 and buffer.dtype in _WIDE
        if self.inner is not None:
            reduced: Future[Any] = self.inner(self.state, bucket)
        else:
            if not late:
                self._divide(bucket, buffer, ranks)
            reduced = self._sum(buffer)
        if not views:
            return reduced
        divide = ranks if late else 1
        jobs = [(source, [params[i] for i in mine], [views[i] for i in mine], now) for source, (mine, now) in wanted]
        if buffer.device.type == "cpu":
            return self._step_in_thread(reduced, buffer, jobs, divide)
        return self._step_in_stream(reduced, buffer, jobs, divide)

    def note_storage(self, p: Tensor) -> None:
        """This rank's gradient has been added up, and DDP has not copied it yet."""
        ddp = self._ddp()
        if ddp is not None and ddp.gradient_as_bucket_view and p.grad is not None and not p.grad.is_sparse:
            self._was_inside[id(p)] = p.grad.untyped_storage().data_ptr()

    def _end_all(self, sources: list[weakref.ref[DdpSource]]) -> None:
        error, self._error = self._error, None
        for source in sources:
            found = source()
            if found is not None and not found._removed:
                found.end_pass()
        if error is not None:
            raise error

    def _ranks(self) -> int:
        ddp = self._ddp()
        assert ddp is not None
        if ddp._join_config.enable and not ddp._divide_by_initial_world_size:
            raise RuntimeError(
                "overlap() divides by the number of ranks there were at first; "
                "leave divide_by_initial_world_size=True in join()"
            )
        return dist.get_world_size(ddp.process_group)

    def _divide(self, bucket: Any, buffer: Tensor, ranks: int) -> None:
        """As DDP does it: what has been added up in the bucket itself is divided, what was copied there multiplied."""
        ddp = self._ddp()
        assert ddp is not None
        if ranks & (ranks - 1) == 0 or not ddp.gradient_as_bucket_view:
            buffer.mul_(1 / ranks)
            return
        storage = buffer.untyped_storage().data_ptr()
        for p, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self._was_inside.get(id(p)) == storage:
                view.div_(ranks)
            else:
                view.mul_(1 / ranks)

    def _sum(self, buffer: Tensor) -> Future[Any]:
        ddp = self._ddp()
        assert ddp is not None
        work = dist.all_reduce(buffer, group=ddp.process_group, async_op=True)
        reduced: Future[Any] = work.get_future().then(lambda done: done.value()[0])
        return reduced

    def _step_in_thread(self, reduced: Future[Any], buffer: Tensor, jobs: list[Any], divide: int) -> Future[Any]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="offbeat-overlap")
        thread, finished, threads = self._thread, Future[Any](), torch.get_num_threads()

        def step(result: Tensor) -> None:
            try:
                if torch.get_num_threads() != threads:  # sums depend on it
                    torch.set_num_threads(threads)
                result = _run(jobs, buffer, result, divide)
            except BaseException as error:
                self._fail(jobs, error)
            jobs.clear()  # DDP goes on with the next line, and this frame may live a little longer
            # An error is raised at the end of backward, as what it is; DDP would wrap it and be of no use afterwards.
            finished.set_result(result)

        def when_reduced(done: Future[Any]) -> None:
            try:
                thread.submit(step, _flat(done.value()))
            except BaseException as error:
                self._fail(jobs, error)
                finished.set_result(buffer)

        reduced.add_done_callback(when_reduced)
        return finished

    def _fail(self, jobs: list[Any], error: BaseException) -> None:
        """Remember an error for the end of backward; nobody may step with what it left."""
        self._error = error
        for source, *_ in jobs:
            source.core.spoiled = f"a bucket was not reduced or not stepped ({type(error).__name__}: {error})"

    def _step_in_stream(self, reduced: Future[Any], buffer: Tensor, jobs: list[Any], divide: int) -> Future[Any]:
        device = buffer.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        ours = self._streams[device]
        # Backward reads these parameters in kernels that are queued already, and must have done so.
        read = torch.cuda.current_stream(device).record_event()

        def step(done: Future[Any]) -> Tensor:
            result = buffer
            try:
                result = _flat(done.value())
                with torch.cuda.device(device):
                    theirs = torch.cuda.current_stream(device)
                    ours.wait_event(read)
                    ours.wait_stream(theirs)
                    with torch.cuda.stream(ours):
                        result.record_stream(ours)
                        result = _run(jobs, buffer, result, divide)
                    theirs.wait_stream(ours)
            except BaseException as error:
                self._fail(jobs, error)
            return result

        return reduced.then(step)


def _flat(value: Any) -> Tensor:
    """A hook's result, which may be a tensor or a list of one."""
    found: Tensor = value if isinstance(value, Tensor) else value[0]
    return found


def _run(jobs: list[Any], buffer: Tensor, result: Tensor, divide: int) -> Tensor:
    """Step a reduced bucket; returns what DDP is to bring into ``.grad``."""
    if divide != 1:
        result.mul_(1 / divide)
    if result.dtype != buffer.dtype:
        buffer.copy_(result)  # as DDP would bring it into .grad
        result = buffer
    for source, params, views, now in jobs:
        grads = views
        if result.data_ptr() != buffer.data_ptr():  # the hook made a new tensor
            shift = result.storage_offset() - buffer.storage_offset()
            grads = [result.as_strided(g.shape, g.stride(), g.storage_offset() + shift) for g in views]
        with source.core.lock:
            source.core.bucket(params, grads, now)
    return result
