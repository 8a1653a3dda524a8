"""The codecs as a communication hook of ``DistributedDataParallel``.

Buckets are exchanged in stages while backward goes on: when a bucket is full, it is encoded and sent, the bucket
before it is added up and sent back, and the one before that is decoded. All of it happens in the thread that runs
backward and in the same order on all ranks, so that no two ranks can wait for different collectives.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.futures import Future

from offbeat._types import Group
from offbeat.wire.base import Codec, NotFinite
from offbeat.wire.codec import CodecName, make_codec
from offbeat.wire.coded import CodedMean
from offbeat.wire.feedback import ErrorFeedback
from offbeat.wire.groups import members, whole
from offbeat.wire.peers import GroupPeers, Work

if TYPE_CHECKING:
    from offbeat._torch import GradBucket

__all__ = ["CodecState", "codec_hook"]


class CodecState:
    """The state of :func:`codec_hook`: one for each DDP module.

    Args:
        codec: how gradients are encoded: ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``, ``"int2"``, or a codec such as
            ``TopK(0.03)``.
        process_group: the group of the DDP module; the default group by default.
        error_feedback: the decay of what encoding loses, which is added to the next gradient. 1 keeps it whole, and
            None drops it. Takes as much memory as the gradients in float32.
        not_finite: what to do about NaN and infinity. ``"raise"`` raises :class:`NotFinite` at the end of backward on
            every rank (without :func:`offbeat.overlap`, DDP makes it a RuntimeError whose message contains this one).
            ``"nan"`` fills the bucket with NaN on every rank, for :class:`torch.amp.GradScaler` to skip the step
            on all.

    Example:
        >>> import offbeat
        >>> offbeat.CodecState("int4", error_feedback=1.0).codec
        <codec int4>

    Limits: with ``error_feedback``, residuals belong to the layout of DDP's buckets. DDP changes it once, after the
    first backward pass, and residuals start again from zero then. They are not part of a checkpoint.
    """

    def __init__(
        self,
        codec: CodecName | Codec = "int8",
        process_group: Group | None = None,
        error_feedback: float | None = None,
        not_finite: Literal["raise", "nan"] = "raise",
    ) -> None:
        made = make_codec(codec)
        if made is None:
            raise ValueError("codec=None leaves nothing for codec_hook to do; register no hook, or name a codec")
        if not_finite not in ("raise", "nan"):
            raise ValueError(f"not_finite={not_finite!r} must be 'raise' or 'nan'")
        self.codec, self.process_group, self.not_finite = made, process_group, not_finite
        self.feedback = None if error_feedback is None else ErrorFeedback(error_feedback)
        self._mean = CodedMean(made, return_sum_error=self.feedback is not None)
        self._residuals: dict[int, tuple[tuple[int, ...], Tensor]] = {}
        self._running: list[_Bucket] = []

    def run(self, bucket: GradBucket) -> Future[Tensor]:
        """Called by DDP when a bucket is full."""
        if bucket.index() == 0:
            self._running.clear()  # of a backward pass that failed
        try:
            # Older buckets first: the collective they start next was due before this one's first.
            self._running = [one for one in self._running if not one.advance()]
            new = _Bucket(self, bucket)
            if not new.is_done:
                self._running.append(new)
            while bucket.is_last() and self._running:
                self._running = [one for one in self._running if not one.advance()]
        except BaseException:
            self._running.clear()
            raise
        return new.future

    def residual(self, bucket: GradBucket) -> Tensor | None:
        """What encoding lost of this bucket in the last backward pass."""
        layout, residual = self._residuals.get(bucket.index(), ((), None))
        return residual if layout == _layout(bucket) else None

    def keep(self, bucket: GradBucket, residual: Tensor) -> None:
        """Set the :meth:`residual` of a ``bucket``."""
        self._residuals[bucket.index()] = (_layout(bucket), residual)


class _Bucket:
    """One bucket on its way."""

    def __init__(self, state: CodecState, bucket: GradBucket) -> None:
        self._state, self._bucket = state, bucket
        self._buffer: Tensor = bucket.buffer()
        device = self._buffer.device
        self.future: Future[Tensor] = Future(devices=[device]) if device.type == "cuda" else Future()
        self.is_done = False
        group = whole(state.process_group)
        peers = GroupPeers(group, members(group))
        values = self._buffer if self._buffer.dtype == torch.float32 else self._buffer.to(torch.float32)
        values.div_(peers.size)
        self._sum, self._pending = values, None
        if state.feedback is not None:
            self._pending = state.feedback.correct(values, state.residual(bucket))
            values = self._pending
        self._steps: Generator[Work, None, Tensor] = state._mean.steps(values, peers, 1.0, self._pending, self._sum)
        self._work: Work | None = None
        self.advance()

    def advance(self) -> bool:
        """Wait for the collective under way and start the next. Returns whether there is none."""
        try:
            if self._work is not None:
                self._work.wait()
            self._work = next(self._steps)
            return False
        except StopIteration:
            if self._pending is not None:
                self._state.keep(self._bucket, self._pending)
        except NotFinite as error:
            self.is_done = True
            if self._state.not_finite == "raise":
                # DDP raises it at the end of backward. An exception here would leave DDP in the middle of a pass.
                self.future.set_exception(error)  # type: ignore[arg-type]
                return True
            self._sum.fill_(float("nan"))
        if self._sum is not self._buffer:
            self._buffer.copy_(self._sum)
        self.is_done = True
        self.future.set_result(self._buffer)
        return True


def _layout(bucket: GradBucket) -> tuple[int, ...]:
    return tuple(id(p) for p in bucket.parameters())


def codec_hook(state: CodecState, bucket: GradBucket) -> Future[Tensor]:
    """DDP communication hook: averages gradients over ranks in encoded form, with the same bits on every rank.

    Register it with DDP, or pass it to :func:`offbeat.overlap` as ``comm_hook``, with ``comm_state``.

    Args:
        state: the codec and what it remembers; one for each DDP module.
        bucket: the bucket of gradients that DDP has filled, a :class:`torch.distributed.GradBucket`.

    Returns:
        A future of the averaged bucket.

    Example:
        >>> import torch, torch.distributed as dist, offbeat
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> ddp.register_comm_hook(offbeat.CodecState("int8"), offbeat.codec_hook)
        >>> ddp(torch.ones(3, 4)).sum().backward()
        >>> dist.destroy_process_group()
    """
    return state.run(bucket)


codec_hook.__annotations__ = {}  # DDP compares annotations with types, and these are strings
