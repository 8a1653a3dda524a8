"""The buckets of one backward pass, on their way through the stages of :func:`offbeat.codec_hook`.

Whatever happens to the pass, the future of every bucket is completed: somebody may be waiting for it in another thread.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor
from torch.futures import Future

from offbeat.passes import current_pass, queue_callback
from offbeat.wire.base import NotFinite
from offbeat.wire.coded import CodedMean
from offbeat.wire.peers import Peers, Work

__all__ = ["BucketPass", "Lost"]

#: By the number of a bucket: the ids of its parameters, and what encoding has lost of it.
Lost = dict[int, tuple[tuple[int, ...], Tensor]]

_ABORTED = (
    "this bucket was not averaged, because the backward pass that it belongs to failed; find its error, which "
    "backward() has raised"
)


class BucketPass:
    """The buckets of one backward pass.

    Args:
        mean: averages encoded values.
        not_finite: ``"raise"`` or ``"nan"``; see :class:`offbeat.CodecState`.
        scale: what the loss was multiplied by.

    Attributes:
        lost: what encoding has lost in this pass.
        is_sound: whether every bucket so far was finite, and none was given up.
        is_complete: whether all buckets of the pass have been here.
    """

    def __init__(self, mean: CodedMean, not_finite: str, scale: float) -> None:
        self.scale = scale
        self.lost: Lost = {}
        self.is_sound, self.is_complete = True, False
        self._mean, self._not_finite = mean, not_finite
        self._running: list[_Bucket] = []

    def watch(self) -> None:
        """Give up the buckets that are on their way if the backward pass that runs in this thread fails."""
        if current_pass() != -1:  # a rank without data, under join(), is outside of backward
            queue_callback(_Watch(self))

    def advance(self) -> None:
        """Bring each bucket on by one stage. Older ones first: their collective was due before that of a newer one."""
        for one in list(self._running):
            if self._advance(one):
                self._running.remove(one)

    def start(
        self, buffer: Tensor, number: int, layout: tuple[int, ...], peers: Peers, values: Tensor, pending: Tensor | None
    ) -> Future[Tensor]:
        """Send a bucket on its way, and return the future of its mean.

        Args:
            buffer: where the mean is to be.
            number: which bucket of the pass it is.
            layout: the ids of its parameters.
            values: this rank's part of the mean, in float32; holds the sum later.
            pending: the values with what encoding has lost before; holds what it loses now, later.
        """
        one = _Bucket(buffer, number, layout, values, pending)
        one.steps = self._mean.steps(values if pending is None else pending, peers, 1.0, pending, values)
        self._running.append(one)
        if self._advance(one):
            self._running.remove(one)
        return one.future

    def drain(self) -> None:
        """Bring all buckets home."""
        while self._running:
            self.advance()
        self.is_complete = True

    def abort(self, error: BaseException | None = None) -> None:
        """Complete the futures of all buckets that are on their way with an error."""
        running, self._running = self._running, []
        for one in running:
            self.is_sound = False
            one.fail(error if isinstance(error, Exception) else RuntimeError(_ABORTED))

    def _advance(self, one: _Bucket) -> bool:
        """Wait for the collective of a bucket and start the next. Returns whether there is none."""
        try:
            if one.work is not None:
                one.work.wait()
            one.work = next(one.steps)
            return False
        except StopIteration:
            if one.pending is not None:
                self.lost[one.number] = (one.layout, one.pending)
            one.finish()
        except NotFinite as error:
            self.is_sound = False
            if self._not_finite == "raise":
                # DDP raises it at the end of backward. An exception here would leave DDP in the middle of a pass.
                one.fail(error)
            else:
                one.sum.fill_(float("nan"))
                one.finish()
        return True


class _Bucket:
    """One bucket on its way."""

    steps: Generator[Work, None, Tensor]

    def __init__(
        self, buffer: Tensor, number: int, layout: tuple[int, ...], values: Tensor, pending: Tensor | None
    ) -> None:
        self.number, self.layout, self.sum, self.pending = number, layout, values, pending
        self.work: Work | None = None
        self._buffer = buffer
        self.future: Future[Tensor] = Future(devices=[buffer.device]) if buffer.is_cuda else Future()

    def finish(self) -> None:
        """Write the mean to the buffer."""
        if self.sum is not self._buffer:
            largest = torch.finfo(self._buffer.dtype).max
            if largest < torch.finfo(torch.float32).max:
                # What encoding has rounded up, or what was lost before, must not become infinity here. NaN stays NaN.
                self.sum.clamp_(-largest, largest)
            self._buffer.copy_(self.sum)
        self.future.set_result(self._buffer)

    def fail(self, error: Exception) -> None:
        """Complete the future with an error."""
        self.future.set_exception(error)  # type: ignore[arg-type]


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
