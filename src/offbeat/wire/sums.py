"""``CodedMean``: sums encoded values over ranks, so that every rank gets the same bits."""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.wire.codecs.codec import Codec, NotFinite
from offbeat.wire.codecs.kernels import all_finite
from offbeat.wire.peers import Peers, Work

__all__ = ["CodedMean"]

#: Bytes before the codes of a message: a status, and zeros that keep the codes aligned.
HEADER = 8
_PRESENT, _ABSENT, _BAD = 0, 1, 2


class CodedMean:
    """The sum over ranks of encoded values, the same bits on every rank.

    With two ranks, each sends all its codes to the other, and both add up the two in the order of ranks. With three or
    more, each rank owns one part of the values: codes travel to their owner (all-to-all), which decodes and adds them
    in float32 in the order of ranks, encodes the sum and sends it to all (all-gather). All ranks, the owner too, decode
    these codes. Results do not depend on the transport or on which rank computes them.

    It is a mean when the caller scales the values by each rank's share first: ``x * (1 / size)``, or by tokens.

    **Devices.** Values are encoded, decoded and added up on their own device. Where the peers cannot exchange tensors
    of that device, only codes are copied to :attr:`Peers.device` and back.

    **Not finite.** A rank whose values contain NaN or infinity still takes part, with a mark in place of codes. Every
    rank then raises :class:`NotFinite` with the (global) numbers of these ranks, and none waits for another. The same
    holds if the sum overflows.

    Buffers for messages are kept for the next reduction. One object may run several at the same time.

    Args:
        codec: for values and, with three or more ranks, for sums.
        return_sum_error: with three or more ranks, add what is lost in encoding a sum to the ``residual`` of the rank
            that owns it, so that error feedback makes up for this loss too. By default a residual contains only what
            the rank lost in encoding its own values.
        decay: the part of a residual that is fed back, from above 0 to 1. The caller applies it to its own values; here
            it is for sums that a rank of weight 0 owns, see ``residual`` of :meth:`reduce`.
    """

    def __init__(self, codec: Codec, *, return_sum_error: bool = False, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f"the decay {decay} of error feedback must be above 0 and at most 1")
        self.codec, self.return_sum_error, self.decay = codec, return_sum_error, float(decay)
        self._pool = _Pool()

    def bytes_sent(self, numel: int, size: int) -> int:
        """Return the bytes one rank sends to others in :meth:`reduce`, the same for every rank.

        An all-gather counts once for each rank that gets the message.
        """
        if size < 3:
            return (size - 1) * (HEADER + self.codec.encoded_bytes(numel))
        return 2 * (size - 1) * self._message_bytes(numel, size)

    def reduce(
        self,
        x: Tensor,
        peers: Peers,
        weight: float = 1.0,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of all ranks' values, as encoded.

        Args:
            x: this rank's values, already scaled by ``weight``: flat, contiguous, float32, of one size on all ranks.
            peers: the ranks.
            weight: this rank's share. It is not applied here. With 0 the rank is left out of the sum: its ``x`` is not
                read and may contain anything.
            residual: is set to what encoding ``x`` lost. May be ``x``. Keep it only if this does not raise: then it is
                unchanged on the ranks named in the error and may have changed on others. With ``weight=0`` nothing of
                ``x`` is lost, and it is unchanged, with one exception: with ``return_sum_error`` and three or more
                ranks, ``decay`` times the part that this rank owns is added to the sum that it encodes, and replaced
                by what that loses. It must contain what was lost before, then.
            out: where to put the sum; may be ``x``, if ``residual`` is not. A new tensor by default.

        Raises:
            NotFinite: on every rank; see the class.
            ValueError: a tensor has another dtype, layout, device or size than it must have.
        """
        steps = self.steps(x, peers, weight, residual, out)
        while True:
            try:
                work = next(steps)
            except StopIteration as end:
                total: Tensor = end.value
                return total
            work.wait()

    def steps(
        self,
        x: Tensor,
        peers: Peers,
        weight: float = 1.0,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Generator[Work, None, Tensor]:
        """:meth:`reduce` for callers that do something else while they wait.

        Yields each collective it has started; wait for it before going on. Two reductions may be interleaved if all
        ranks do so in the same order.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight={weight} must be a finite number that is not negative")
        # Before anything is read: kernels get addresses, and would read other numbers than those of x.
        for label, tensor in (("x", x), ("residual", residual), ("out", out)):
            if tensor is not None:
                _check(label, tensor, x)
        out = torch.empty_like(x) if out is None else out
        if residual is not None and residual.data_ptr() == out.data_ptr() and x.numel():
            raise ValueError("residual and out are the same tensor, and each would overwrite the other")
        status = _ABSENT if not weight else _PRESENT if all_finite(x) else _BAD
        exchange = self._through_owners if peers.size > 2 else self._to_all
        buffers = _Buffers(self._pool, x.device, peers)
        yield from exchange(x, peers, status, residual, out, buffers)
        buffers.give_back()  # not after an error: the transport may still write to them
        return out

    def _to_all(
        self, x: Tensor, peers: Peers, status: int, residual: Tensor | None, out: Tensor, buffers: _Buffers
    ) -> Generator[Work, None, None]:
        own = buffers.new(HEADER + self.codec.encoded_bytes(x.numel()))
        self._write(own, status, x, residual)
        every = buffers.to_receive(peers.size * own.numel())
        yield peers.all_gather(every, buffers.to_send(own))
        statuses = every.view(peers.size, -1)[:, 0].tolist()
        self._sum(list(buffers.received(every).view(peers.size, -1)), statuses, out, peers)
        if not all_finite(out):  # on all ranks alike
            raise NotFinite(_OVERFLOW.format("all"), peers.ranks)

    def _through_owners(
        self, x: Tensor, peers: Peers, status: int, residual: Tensor | None, out: Tensor, buffers: _Buffers
    ) -> Generator[Work, None, None]:
        rank, size = peers.rank, peers.size
        length = self._message_bytes(x.numel(), size)
        parts = [slice(*self._bounds(x.numel(), owner, size)) for owner in range(size)]
        # What a rank sends to itself does not go through the transport.
        own, outgoing = buffers.new(length), buffers.new((size - 1) * length)
        for owner, message in enumerate(_insert(own, rank, outgoing.view(-1, length))):
            self._write(message, status, x[parts[owner]], None if residual is None else residual[parts[owner]])
        incoming = buffers.to_receive((size - 1) * length)
        splits = [length if other != rank else 0 for other in range(size)]
        yield peers.all_to_all(incoming, buffers.to_send(outgoing), splits, splits)
        statuses = _insert(status, rank, incoming.view(-1, length)[:, 0].tolist())
        total = torch.empty_like(x[parts[rank]])
        self._sum(_insert(own, rank, buffers.received(incoming).view(-1, length)), statuses, total, peers)

        kept = residual[parts[rank]] if residual is not None and self.return_sum_error else None
        if kept is not None and status == _ABSENT:
            total.add_(kept, alpha=self.decay)  # a rank that is present has added it to its own values
        self._write(own, _PRESENT if all_finite(total) else _BAD, total, None if kept is None else total)
        every = buffers.to_receive(size * length)
        yield peers.all_gather(every, buffers.to_send(own))
        if overflowed := _ranks_with(_BAD, every.view(size, -1)[:, 0].tolist(), peers):
            raise NotFinite(_OVERFLOW.format(f"the part that is added up on {_name(overflowed)}"), overflowed)
        for part, message in zip(parts, buffers.received(every).view(size, -1), strict=True):
            self.codec.decode(self._codes(message, out[part]), out[part])
        if kept is not None and status == _ABSENT:
            kept.copy_(total)
        elif kept is not None:
            kept.add_(total)

    def _write(self, message: Tensor, status: int, values: Tensor, residual: Tensor | None) -> None:
        """Encode the values of a present rank as a message; write only the status of another."""
        codes = self._codes(message, values)
        message[:HEADER] = 0
        message[HEADER + codes.numel() :] = 0
        if status == _PRESENT:
            self.codec.encode_finite(values, codes, residual)
        else:
            codes.zero_()
            message[0] = status

    def _sum(self, messages: Sequence[Tensor], statuses: Sequence[int], out: Tensor, peers: Peers) -> None:
        """Add up the messages of present ranks in order. Raises :class:`NotFinite` if one is marked as such."""
        if bad := _ranks_with(_BAD, statuses, peers):
            raise NotFinite(
                f"the values of {_name(bad)} are NaN or infinite, and nothing was reduced; look for the overflow that "
                "made them, or give these ranks the weight 0 in this exchange",
                bad,
            )
        present = [message for message, status in zip(messages, statuses, strict=True) if status != _ABSENT]
        self.codec.decode_sum([self._codes(message, out) for message in present], out)

    def _codes(self, message: Tensor, values: Tensor) -> Tensor:
        return message[HEADER : HEADER + self.codec.encoded_bytes(values.numel())]

    def _bounds(self, numel: int, owner: int, size: int) -> tuple[int, int]:
        """Return the bounds of the part that a rank owns: whole blocks; the last parts may be short or empty."""
        part = -(-numel // (size * self.codec.block)) * self.codec.block
        return min(owner * part, numel), min((owner + 1) * part, numel)

    def _message_bytes(self, numel: int, size: int) -> int:
        return HEADER + self.codec.encoded_bytes(self._bounds(numel, 0, size)[1])


class _Buffers:
    """The buffers of one reduction: on the device of the values, and on one whose tensors the peers can exchange."""

    def __init__(self, pool: _Pool, device: torch.device, peers: Peers) -> None:
        self._pool, self._device, self._taken = pool, device, list[Tensor]()
        self._crosses = not peers.can_exchange(device)
        self._transport = peers.device if self._crosses else device

    def new(self, count: int) -> Tensor:
        """Return a buffer on the device of the values."""
        return self._take(count, self._device)

    def to_receive(self, count: int) -> Tensor:
        """Return a buffer that the peers can write to."""
        return self._take(count, self._transport)

    def to_send(self, message: Tensor) -> Tensor:
        """Return the message where the peers can read it."""
        return self.to_receive(message.numel()).copy_(message) if self._crosses else message

    def received(self, message: Tensor) -> Tensor:
        """Return a message of the peers on the device of the values."""
        return self.new(message.numel()).copy_(message) if self._crosses else message

    def give_back(self) -> None:
        """Return all buffers to the pool."""
        self._pool.give(self._taken)

    def _take(self, count: int, device: torch.device) -> Tensor:
        if self._device.type != "cpu":  # torch's allocators keep this memory; copies from pinned memory are faster
            return torch.empty(count, dtype=torch.uint8, device=device, pin_memory=device.type == "cpu")
        self._taken.append(self._pool.take(count))
        return self._taken[-1][:count]


class _Pool:
    """CPU buffers that are used again: new memory costs a page fault for each 4 KB, more time than encoding takes."""

    #: Buffers that are kept: those of one exchange in flight and of the next.
    KEPT = 8

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    def take(self, count: int) -> Tensor:
        """Return a uint8 buffer of at least ``count`` elements with any content."""
        with self._lock:
            # A buffer that is much larger is for larger messages.
            fitting = [i for i, buffer in enumerate(self._free) if count <= buffer.numel() <= 2 * count]
            if fitting:
                return self._free.pop(min(fitting, key=lambda i: self._free[i].numel()))
        return torch.empty(count, dtype=torch.uint8)

    def give(self, buffers: list[Tensor]) -> None:
        """Keep buffers that nobody reads or writes any more."""
        with self._lock:
            self._free = [*self._free, *buffers][-self.KEPT :]

    def __reduce__(self) -> Any:
        return _Pool, ()  # a copy has buffers of its own


_OVERFLOW = "the sum over ranks of {} is beyond float32, and nothing was reduced; scale the values down first"


def _check(label: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.dtype != torch.float32 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{label} is a {tensor.dtype} tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}, and "
            f"must be flat, contiguous and float32; pass {label}.float().flatten(), and copy the result back"
        )
    if tensor.device != x.device or tensor.numel() != x.numel():
        raise ValueError(
            f"{label} has {tensor.numel()} elements on {tensor.device}, and x has {x.numel()} on {x.device}; make it "
            "with torch.empty_like(x)"
        )


def _insert(own: Any, rank: int, others: Any) -> list[Any]:
    """Return the messages, or the statuses, of all ranks in order."""
    return [*others[:rank], own, *others[rank:]]


def _ranks_with(status: int, statuses: Sequence[int], peers: Peers) -> list[int]:
    return [peers.ranks[i] for i, other in enumerate(statuses) if other == status]


def _name(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
