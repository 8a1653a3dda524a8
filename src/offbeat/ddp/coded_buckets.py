"""The buckets of one backward pass, in the stages of :func:`offbeat.codec_hook`.

Whatever happens to the pass, the future of every bucket is completed: another thread may be waiting for it.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor
from torch.futures import Future

from offbeat.passes import current_pass, queue_callback
from offbeat.wire.codecs.codec import NotFinite
from offbeat.wire.peers import Peers, Work
from offbeat.wire.sums import CodedMean

__all__ = ["BucketPass", "CodedBucket", "Losses"]

#: By the number of a bucket: the ids of its parameters, and what encoding has lost of it.
Losses = dict[int, tuple[tuple[int, ...], Tensor]]

_ABORTED = (
    "this bucket was not averaged, because the backward pass that it belongs to failed; find its error, which "
    "backward() has raised"
)


class CodedBucket:
    """One bucket in flight.

    Args:
        buffer: where the mean is written to.
        number: which bucket of the pass it is.
        layout: the ids of its parameters.
        peers: the ranks that average.
        values: this rank's part of the mean, in float32; the sum, later.
        corrected: the values with what encoding has lost before; what it loses now, later. None without error feedback.
    """

    def __init__(
        self,
        buffer: Tensor,
        number: int,
        layout: tuple[int, ...],
        peers: Peers,
        values: Tensor,
        corrected: Tensor | None,
    ) -> None:
        self.number, self.layout, self.values, self.corrected = number, layout, values, corrected
        self.work: Work | None = None
        self._buffer, self._peers = buffer, peers
        self.future: Future[Tensor] = Future(devices=[buffer.device]) if buffer.is_cuda else Future()

    def steps(self, mean: CodedMean) -> Generator[Work, None, Tensor]:
        """Begin to average this bucket; see :meth:`CodedMean.steps`."""
        x = self.values if self.corrected is None else self.corrected
        return mean.steps(x, self._peers, 1.0, self.corrected, self.values)

    def finish(self) -> None:
        """Write the mean to the buffer."""
        if self.values is not self._buffer:
            largest = torch.finfo(self._buffer.dtype).max
            if largest < torch.finfo(torch.float32).max:
                # Rounding up when encoding, or error feedback, must not make a value infinite here. NaN stays NaN.
                self.values.clamp_(-largest, largest)
            self._buffer.copy_(self.values)
        self.future.set_result(self._buffer)

    def fail(self, error: Exception) -> None:
        """Complete the future with an error."""
        self.future.set_exception(error)  # type: ignore[arg-type]


class BucketPass:
    """The buckets of one backward pass.

    Args:
        mean: averages encoded values.
        not_finite: ``"raise"`` or ``"nan"``; see :class:`offbeat.CodecState`.
        scale: what the loss was multiplied by.

    Attributes:
        losses: what encoding has lost in this pass.
        is_sound: whether every bucket so far was finite, and none was given up.
        is_complete: whether all buckets of the pass have been averaged.
    """

    def __init__(self, mean: CodedMean, not_finite: str, scale: float) -> None:
        self.scale = scale
        self.losses: Losses = {}
        self.is_sound, self.is_complete = True, False
        self._mean, self._not_finite = mean, not_finite
        self._running: list[tuple[CodedBucket, Generator[Work, None, Tensor]]] = []

    def watch(self) -> None:
        """Give up the buckets in flight if the backward pass that runs in this thread fails."""
        if current_pass() != -1:  # a rank without data, under join(), is outside of backward
            queue_callback(_Watch(self))

    def start(self, bucket: CodedBucket) -> Future[Tensor]:
        """Encode and send a bucket, and return the future of its mean."""
        self._running.append((bucket, bucket.steps(self._mean)))
        self._advance(*self._running[-1])
        return bucket.future

    def advance(self) -> None:
        """Bring each bucket on by one stage. Older ones first: their collective was due before that of a newer one."""
        for bucket, steps in list(self._running):
            self._advance(bucket, steps)

    def drain(self) -> None:
        """Finish all buckets."""
        while self._running:
            self.advance()
        self.is_complete = True

    def abort(self, error: BaseException | None = None) -> None:
        """Complete the futures of all buckets in flight with an error."""
        running, self._running = self._running, []
        for bucket, _ in running:
            self.is_sound = False
            bucket.fail(error if isinstance(error, Exception) else RuntimeError(_ABORTED))

    def _advance(self, bucket: CodedBucket, steps: Generator[Work, None, Tensor]) -> None:
        """Wait for the collective of a bucket and start the next, or finish the bucket after the last."""
        try:
            if bucket.work is not None:
                bucket.work.wait()
            bucket.work = next(steps)
            return
        except StopIteration:
            if bucket.corrected is not None:
                self.losses[bucket.number] = (bucket.layout, bucket.corrected)
            bucket.finish()
        except NotFinite as error:
            self.is_sound = False
            if self._not_finite == "raise":
                # DDP raises it at the end of backward. An exception here would leave DDP in the middle of a pass.
                bucket.fail(error)
            else:
                bucket.values.fill_(float("nan"))
                bucket.finish()
        self._running.remove((bucket, steps))


class _Watch:
    """A callback that autograd calls at the end of a backward pass, and drops uncalled if the pass fails.

    Called at the end of a pass inside another one, it only knows that this inner one has not failed.
    """

    def __init__(self, watched: BucketPass) -> None:
        self._watched: BucketPass | None = watched

    def __call__(self) -> None:
        self._watched = None

    def __del__(self) -> None:
        if self._watched is not None:
            self._watched.abort()
