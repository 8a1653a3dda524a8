"""Compare things on all ranks. A difference raises the same error on every rank, which names what differs and where.

:func:`check_same` compares a mapping of names to values. While all ranks have the same, it exchanges two numbers. Only
after a difference the ranks also exchange what they have, to tell which name it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Difference", "Peers", "check_same", "check_same_bits"]

#: How much of a value an error message shows.
SHOWN = 200


class Peers(Protocol):
    """Ranks that can exchange tensors. Collectives return something with ``wait()``."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Any:
        """Replace the tensor by the sum (or ``"max"``) over all ranks."""

    def all_gather(self, out: Tensor, own: Tensor) -> Any:
        """Collect the flat tensors of all ranks in ``out``, one after the other."""


class Difference(NamedTuple):
    """The first name whose values differ, and what each rank has: the value as text, or None if it has none."""

    name: str
    values: list[str | None]

    def __str__(self) -> str:
        """Describe who has what, such as ``0.1 on rank 0, 2, 0.2 on rank 1``."""
        ranks: dict[str | None, list[int]] = {}
        for rank, value in enumerate(self.values):
            ranks.setdefault(value, []).append(rank)
        return ", ".join(
            f"{'nothing' if value is None else value} on rank {', '.join(map(str, having))}"
            for value, having in ranks.items()
        )


def check_same(
    values: Mapping[str, Any],
    peers: Peers | dist.ProcessGroup | None,
    device: torch.device,
    explain: Callable[[Difference], Exception],
    *,
    error: Exception | None = None,
) -> None:
    """Raise, on every rank alike, unless all ranks have the same values and none has an error.

    Every rank must call this together.

    Args:
        values: what this rank has, by name. Values are compared by their ``repr``.
        peers: the ranks: peers, a process group, or None for all ranks.
        device: where the ranks exchange tensors.
        explain: makes the error from the first difference.
        error: why this rank cannot go on, if that is so. This rank then raises it; the others raise a RuntimeError.
    """
    ranks = _Group(peers) if peers is None or isinstance(peers, dist.ProcessGroup) else peers
    text = "" if error is not None else repr({name: repr(value) for name, value in values.items()})
    if _are_same(torch.tensor(_digest(text), dtype=torch.int64, device=device), ranks) and error is None:
        return
    said = _exchange_text(_shortened(values, error), ranks, device)
    if error is not None:
        raise error
    failed = [f"rank {rank}: {words['error']}" for rank, words in enumerate(said) if "error" in words]
    if failed:
        raise RuntimeError(
            f"another rank cannot go on, so no rank does, and none has changed anything ({'; '.join(failed)})"
        )
    entries = [words["values"] for words in said]
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    for name in names:
        having = [entry.get(name) for entry in entries]
        if any(value != having[0] for value in having):
            raise explain(Difference(name, [None if value is None else value[1] for value in having]))
    raise explain(Difference("the order of names", [", ".join(entry) for entry in entries]))


def check_same_bits(tensors: Sequence[Tensor], group: Any, explain: Callable[[], Exception]) -> None:
    """Raise, on every rank alike, unless all ranks of the group have the same tensors, bit for bit.

    Makes one pass over the tensors: their bits are summed as integers, so the order does not matter.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for t in tensors:
        total += t.contiguous().view(_INTEGERS[t.element_size()]).sum(dtype=torch.int64)
    if not _are_same(total & (2**62 - 1), _Group(group)):
        raise explain()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Group:
    """A process group as :class:`Peers`."""

    def __init__(self, group: Any) -> None:
        self.group, self.size = group, dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Any:
        return dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=self.group, async_op=True)

    def all_gather(self, out: Tensor, own: Tensor) -> Any:
        return dist.all_gather_into_tensor(out, own, group=self.group, async_op=True)


def _are_same(number: Tensor, ranks: Peers) -> bool:
    """Return whether all ranks have the same non-negative number."""
    pair = torch.stack([number, -number])
    ranks.all_reduce(pair, "max").wait()
    high, low = pair.tolist()
    return bool(high == -low)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def _shortened(values: Mapping[str, Any], error: Exception | None) -> str:
    """Return a digest and the beginning of each value as JSON, from which other ranks can tell what differs."""
    if error is not None:
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:SHOWN]})
    words = {name: repr(value) for name, value in values.items()}
    return json.dumps(
        {"values": {n: [_digest(w), w if len(w) <= SHOWN else f"{w[:SHOWN]}..."] for n, w in words.items()}}
    )


def _exchange_text(text: str, ranks: Peers, device: torch.device) -> list[dict[str, Any]]:
    """Return the text of every rank, decoded, in the order of ranks."""
    encoded = text.encode()
    length = torch.tensor([len(encoded)], dtype=torch.int64, device=device)
    ranks.all_reduce(length, "max").wait()
    size = int(length.item())
    padded = torch.tensor(list(encoded.ljust(size)), dtype=torch.uint8, device=device)
    out = torch.empty(ranks.size * size, dtype=torch.uint8, device=device)
    ranks.all_gather(out, padded).wait()
    everything = bytes(out.tolist())
    return [json.loads(everything[i * size : (i + 1) * size]) for i in range(ranks.size)]
