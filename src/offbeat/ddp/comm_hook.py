"""``CommHook``: the one communication hook that offbeat registers with a DDP module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from offbeat import _torch
from offbeat.ddp.background import Background
from offbeat.ddp.bucket_numbers import BucketNumbers
from offbeat.ddp.codec_hook import CodecState
from offbeat.ddp.mean import DdpMean
from offbeat.passes import current_pass, queue_callback

__all__ = ["CommHook", "Listener", "Reducer", "UserHook"]


class Reducer(Protocol):
    """Reduces the buckets of a DDP module in place of DDP's own mean."""

    @property
    def conflict(self) -> str:
        """The error message for someone who asks for another reducer while this one is in use."""

    def reduce(self, bucket: Any) -> Future[Any]:
        """Start to reduce a bucket (a :class:`torch.distributed.GradBucket`)."""


class Listener(Protocol):
    """Receives the buckets of a DDP module once they are reduced."""

    def bucket_filled(self, params: Sequence[Tensor], index: int) -> Callable[[Sequence[Tensor]], None] | None:
        """Called when a bucket holds this rank's gradients, before it is reduced.

        Args:
            params: the bucket's parameters.
            index: the number of the bucket, from 0 in every backward pass.

        Returns:
            A function to call with the reduced gradients while backward goes on, or None to leave this bucket alone.
        """

    def pass_ended(self) -> None:
        """Called at the end of a backward pass, when DDP has copied the reduced gradients into ``.grad``."""

    def failed(self, error: BaseException) -> None:
        """Called when a bucket could not be reduced, or when a function of :meth:`bucket_filled` failed."""


class UserHook:
    """A :class:`Reducer` that calls a DDP communication hook."""

    def __init__(self, hook: Callable[[Any, Any], Future[Any]], state: Any) -> None:
        self._hook, self._state = hook, state

    @property
    def conflict(self) -> str:
        """See :class:`Reducer`."""
        return (
            f"the communication hook {_name(self._hook)} reduces the gradients of this DistributedDataParallel module "
            "already, and a bucket can be reduced only once"
        )

    def reduce(self, bucket: Any) -> Future[Any]:
        """See :class:`Reducer`."""
        return self._hook(self._state, bucket)

    def abort(self) -> None:
        """Give up buckets that are on their way, if the hook is one that keeps them for a while."""
        if isinstance(self._state, CodecState):
            self._state.abort()


class CommHook:
    """Reduces the buckets of a DDP module and hands them to listeners. Get one from :meth:`register`."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self._mean = DdpMean(ddp)
        self._reducer: Reducer | None = None
        self._listeners: list[weakref.ref[Listener]] = []
        self._background = Background()
        self._error: tuple[int, BaseException] | None = None  # and the pass that it belongs to
        self._passes = 0  # that have begun
        self._numbers = BucketNumbers()

    @staticmethod
    def find(ddp: DistributedDataParallel, *, instead: str) -> CommHook | None:
        """The hook that is registered with this module, or None if it has none.

        Raises:
            ValueError: the user has registered a hook. ``instead`` is the end of the message: what to do instead.
        """
        hooks = _torch.comm_hooks(ddp)
        if not hooks:
            return None
        hook, state = hooks[0]
        if hook is _offbeat_comm_hook and state is None:  # of the module that this one is a copy of
            hooks.clear()
            return None
        if isinstance(state, CommHook) and state._ddp() is ddp:
            return state
        raise ValueError(
            f"this DistributedDataParallel module has a communication hook already ({_name(hook)}) and can have only "
            f"one; do not register it, {instead}"
        )

    @classmethod
    def register(cls, ddp: DistributedDataParallel) -> CommHook:
        """The hook of this module, registered with DDP if it is not yet. Call :meth:`find` first."""
        hook = cls.find(ddp, instead="let offbeat register its own")
        if hook is None:
            hook = cls(ddp)
            try:
                ddp.register_comm_hook(hook, _offbeat_comm_hook)
            except BaseException:  # DDP has a built-in hook; it notes ours before it finds out
                _torch.comm_hooks(ddp).clear()
                raise
        return hook

    def __reduce__(self) -> Any:
        return _nobody, ()  # copied with a DDP module's list of hooks; the copy's reducer does not have the hook

    @property
    def reducer(self) -> Reducer | None:
        """The object that reduces buckets; None is DDP's own mean."""
        return self._reducer

    def reduce_with(self, reducer: Reducer) -> None:
        """Reduce buckets with this from now on. Raises ValueError if there is a reducer already."""
        if self._reducer is not None:
            raise ValueError(self._reducer.conflict)
        self._reducer = reducer

    def release(self, reducer: Reducer) -> None:
        """Go back to DDP's own mean, if this is the reducer."""
        if self._reducer is reducer:
            self._reducer = None

    @property
    def listeners(self) -> list[Listener]:
        """The listeners that are alive; they are referenced weakly."""
        alive = [listener() for listener in self._listeners]
        return [listener for listener in alive if listener is not None]

    def add_listener(self, listener: Listener) -> None:
        """Hand reduced buckets to this listener too."""
        self._listeners.append(weakref.ref(listener))

    def remove_listener(self, listener: Listener) -> None:
        """Hand no more buckets to this listener. The reducer stays the same."""
        self._listeners = [other for other in self._listeners if other() is not listener]
        if not self.listeners:
            self._background.stop()

    def settle(self) -> None:
        """Wait until no bucket is on its way any more, after a backward pass that failed."""
        if current_pass() != -1:
            return  # a bucket may wait for others of the pass that is running
        if isinstance(self._reducer, UserHook):
            self._reducer.abort()
        self._background.settle()

    def stand_in(self, p: Tensor) -> None:
        """Call when ``p.grad`` has taken the place of a gradient that DDP would have accumulated in its bucket."""
        self._mean.stand_in(p)

    def run(self, bucket: Any) -> Future[Any]:
        """Called by DDP when a bucket holds this rank's gradients."""
        params, buffer = bucket.parameters(), bucket.buffer()
        # Under join(), a rank that has no more data reduces zeros outside of backward to keep the other ranks going.
        listeners = self.listeners if current_pass() != -1 else []
        index = self._numbers.number(bucket)
        # Of several buckets called the first, the end of the pass is awaited from the second on.
        ends_pass = self._numbers.extra == 1 if self._numbers.extra else bucket.is_last()
        if index == 0:
            self._passes, self._error = self._passes + 1, None
        now = self._passes
        asked = [(listener, listener.bucket_filled(params, index)) for listener in listeners]
        if ends_pass and listeners:
            ends = [weakref.ref(listener) for listener in listeners]
            # DDP queues its own end of backward after this hook returns, and ours must come after that.
            queue_callback(lambda: queue_callback(lambda: self._end_pass(ends)))
        jobs = [(listener, job) for listener, job in asked if job is not None]
        views = bucket.gradients() if jobs and buffer.layout == torch.strided else []
        if self._reducer is not None:
            reduced, divisor = self._reducer.reduce(bucket), 1
        else:
            # Whoever works on the bucket can divide it too, out of backward's way.
            reduced, divisor = self._mean.start(bucket, defer=bool(views))
        if not views:
            return reduced

        def work(result: Tensor) -> Tensor:
            result, grads = _gradients(result, buffer, views, divisor)
            for _, job in jobs:
                job(grads)
            jobs.clear()  # DDP goes on when this returns, and this frame may live a little longer
            views.clear()
            return result

        def failed(error: BaseException) -> None:
            if now == self._passes:  # else of a pass that has failed already, and is over
                self._error = (now, error)  # raised at the end of backward
                for listener, _ in jobs:
                    listener.failed(error)
            jobs.clear()
            views.clear()

        return self._background.after(reduced, buffer, work, failed)

    def _end_pass(self, listeners: list[weakref.ref[Listener]]) -> None:
        found_error, self._error = self._error, None
        for listener in listeners:
            alive = listener()
            if alive is not None:
                alive.pass_ended()
        if found_error is not None and found_error[0] == self._passes:
            raise found_error[1]


def _offbeat_comm_hook(state: CommHook, bucket: Any) -> Future[Any]:
    return state.run(bucket)


def _nobody() -> None:
    """The state of the hook in copies of a DDP module."""


_offbeat_comm_hook.__annotations__ = {}  # DDP compares annotations with types, and these are strings


def _gradients(result: Tensor, buffer: Tensor, views: list[Tensor], divisor: int) -> tuple[Tensor, list[Tensor]]:
    """Return the tensor that DDP copies into ``.grad``, and the gradients in it.

    Args:
        result: what the reduction returned: the buffer itself, or another tensor of its size.
        views: the gradients in ``buffer``.
    """
    if divisor != 1:
        result.mul_(1 / divisor)
    if result.dtype != buffer.dtype:
        buffer.copy_(result)  # as DDP would convert it
        return buffer, views
    if result.data_ptr() == buffer.data_ptr():
        return result, views
    shift = result.storage_offset() - buffer.storage_offset()
    return result, [result.as_strided(g.shape, g.stride(), g.storage_offset() + shift) for g in views]


def _name(hook: Any) -> str:
    return str(getattr(hook, "__name__", "a hook"))
