"""``CodedMean``: sums encoded values over ranks, so that every rank gets the same bits."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from offbeat.wire.base import Codec, NotFinite
from offbeat.wire.kernels import all_finite
from offbeat.wire.peers import Peers, Work
from offbeat.wire.scratch import Scratch

__all__ = ["CodedMean"]

#: Bytes before the codes of a message: a status, and zeros that keep the codes aligned.
HEADER = 8
_HERE, _ABSENT, _BAD = 0, 1, 2


class CodedMean:
    """The sum over ranks of encoded values, the same bits on every rank.

    With two ranks, each sends all its codes to the other, and both add up the two in the order of ranks. With three or
    more, each rank owns one part of the values: codes travel to their owner (all-to-all), which decodes and adds them
    in float32 in the order of ranks, encodes the sum and sends it to all (all-gather). All ranks, the owner too, decode
    these codes. Results do not depend on the transport or on which rank computes them.

    It is a mean when the caller scales the values by each rank's share first: ``x * (1 / size)``, or by tokens.

    **Not finite.** A rank whose values hold NaN or infinity still takes part, with a mark in place of codes. Every rank
    then raises :class:`NotFinite` with the (global) numbers of these ranks, and none waits for another. The same holds
    if the sum overflows.

    Buffers for messages are kept for the next reduction. One object may run several at the same time.

    Args:
        codec: for values and, with three or more ranks, for sums.
        return_sum_error: with three or more ranks, add what is lost in encoding a sum to the ``residual`` of the rank
            that owns it, so that error feedback makes up for this loss too. By default a residual holds only what the
            rank lost in encoding its own values.
        decay: the part of a residual that is fed back, from above 0 to 1. The caller applies it to its own values; here
            it is for sums that a rank of weight 0 owns, see ``residual`` of :meth:`reduce`.
    """

    def __init__(self, codec: Codec, *, return_sum_error: bool = False, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f"the decay {decay} of error feedback must be above 0 and at most 1")
        self.codec, self.return_sum_error, self.decay = codec, return_sum_error, float(decay)
        self._scratch = Scratch()

    def bytes_sent(self, numel: int, size: int) -> int:
        """The bytes one rank sends to others in :meth:`reduce`.

        It is the same for every rank. An all-gather counts once for each rank that gets the message.
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
        """The sum of all ranks' values, as encoded.

        Args:
            x: this rank's values, already scaled by ``weight``: flat, contiguous, float32, of one size on all ranks.
            peers: the ranks.
            weight: this rank's share. It is not applied here. With 0 the rank is left out of the sum: its ``x`` is not
                read and may hold anything.
            residual: is set to what encoding ``x`` lost. May be ``x``. Keep it only if this does not raise: then it is
                unchanged on the ranks named in the error and may have changed on others. With ``weight=0`` nothing of
                ``x`` is lost, and it is unchanged, but for one thing: with ``return_sum_error`` and three or more
                ranks, ``decay`` times the part that this rank owns is added to the sum that it encodes, and replaced
                by what that loses. It must hold what was lost before, then.
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
        """:meth:`reduce` for those who do something else while they wait.

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
        if weight and peers.size > 1:
            yield from self._exchange(x, peers, True, residual, out)
        elif peers.size > 1:
            yield from self._exchange(x, peers, False, residual, out)
        elif weight:
            data = self._scratch.take(self.codec.encoded_bytes(x.numel()), x.device)
            self.codec.encode(x, data, residual)
            self.codec.decode(data, out)
            self._scratch.give(data)
        else:
            out.zero_()
        return out

    def _exchange(
        self, x: Tensor, peers: Peers, present: bool, residual: Tensor | None, out: Tensor
    ) -> Generator[Work, None, None]:
        run = self._through_owners if peers.size > 2 else self._pairwise
        status = _HERE if present else _ABSENT
        if present and not all_finite(x):
            status = _BAD
        yield from run(x, peers, status, residual, out)

    def _pairwise(
        self, x: Tensor, peers: Peers, status: int, residual: Tensor | None, out: Tensor
    ) -> Generator[Work, None, None]:
        mine = self._scratch.take(HEADER + self.codec.encoded_bytes(x.numel()), x.device)
        self._write(mine, status, x, residual)
        both = self._scratch.take(2 * mine.numel(), x.device)
        yield peers.all_gather(both, mine)
        messages = list(both.view(2, -1))
        self._sum(messages, out, peers)
        self._scratch.give(mine, both)
        if not all_finite(out):  # on both ranks alike
            raise NotFinite(_OVERFLOW.format("all"), peers.ranks)

    def _through_owners(
        self, x: Tensor, peers: Peers, status: int, residual: Tensor | None, out: Tensor
    ) -> Generator[Work, None, None]:
        rank, size = peers.rank, peers.size
        length = self._message_bytes(x.numel(), size)
        parts = [slice(*self._bounds(x.numel(), owner, size)) for owner in range(size)]
        # What a rank sends to itself does not go through the transport.
        sent, got, own = (self._scratch.take(count * length, x.device) for count in (size - 1, size - 1, 1))
        for owner, message in enumerate(_with(own, rank, sent)):
            self._write(message, status, x[parts[owner]], None if residual is None else residual[parts[owner]])
        splits = [length if other != rank else 0 for other in range(size)]
        yield peers.all_to_all(got, sent, splits, splits)
        total = torch.empty_like(x[parts[rank]])
        self._sum(_with(own, rank, got), total, peers)

        kept = residual[parts[rank]] if residual is not None and self.return_sum_error else None
        if kept is not None and status == _ABSENT:
            total.add_(kept, alpha=self.decay)  # a rank that is there has added it to its own values
        rest = None if kept is None else total
        self._write(own, _HERE if all_finite(total) else _BAD, total, rest)
        everyone = self._scratch.take(size * length, x.device)
        yield peers.all_gather(everyone, own)
        sums = list(everyone.view(size, -1))
        if overflowed := [peers.ranks[i] for i in _ranks_with(_BAD, sums)]:
            raise NotFinite(_OVERFLOW.format(f"the part that is added up on {_name(overflowed)}"), overflowed)
        for owner, message in enumerate(sums):
            self.codec.decode(self._codes(message, out[parts[owner]]), out[parts[owner]])
        if kept is not None and status == _ABSENT:
            kept.copy_(total)
        elif kept is not None:
            kept.add_(total)
        # Only now: buffers of an exchange that failed may still be written to.
        self._scratch.give(sent, got, own, everyone)

    def _write(self, message: Tensor, status: int, values: Tensor, residual: Tensor | None) -> None:
        """Make a message of values that are finite, unless the status says otherwise."""
        codes = self._codes(message, values)
        message[:HEADER] = 0
        message[HEADER + codes.numel() :] = 0
        if status == _HERE:
            self.codec.encode_finite(values, codes, residual)
        else:
            codes.zero_()
            message[0] = status

    def _sum(self, messages: Sequence[Tensor], out: Tensor, peers: Peers) -> None:
        """Add up the messages in order. Raises :class:`NotFinite` if one is marked so."""
        if bad := [peers.ranks[i] for i in _ranks_with(_BAD, messages)]:
            raise NotFinite(
                f"the values of {_name(bad)} are NaN or infinite, and nothing was reduced; look for the overflow that "
                "made them, or give these ranks the weight 0 in this exchange",
                bad,
            )
        absent = _ranks_with(_ABSENT, messages)
        present = [message for rank, message in enumerate(messages) if rank not in absent]
        self.codec.decode_sum([self._codes(message, out) for message in present], out)

    def _codes(self, message: Tensor, values: Tensor) -> Tensor:
        return message[HEADER : HEADER + self.codec.encoded_bytes(values.numel())]

    def _bounds(self, numel: int, owner: int, size: int) -> tuple[int, int]:
        """Where the part of a rank begins and ends: whole blocks, and the last parts may be short or empty."""
        part = -(-numel // (size * self.codec.block)) * self.codec.block
        return min(owner * part, numel), min((owner + 1) * part, numel)

    def _message_bytes(self, numel: int, size: int) -> int:
        return HEADER + self.codec.encoded_bytes(self._bounds(numel, 0, size)[1])


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


def _with(own: Tensor, rank: int, others: Tensor) -> list[Tensor]:
    """The messages of all ranks in order."""
    rows = list(others.view(-1, own.numel()))
    return [*rows[:rank], own, *rows[rank:]]


def _ranks_with(status: int, messages: Sequence[Tensor]) -> list[int]:
    found: list[int] = torch.stack([message[0] for message in messages]).tolist()
    return [rank for rank, mark in enumerate(found) if mark == status]


def _name(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
