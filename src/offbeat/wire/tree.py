"""Sends nested values with tensors from one rank to all: the structure as JSON, the tensors as they are. No pickle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.wire.peers import ExchangeError, Peers, gather

__all__ = ["broadcast_tree", "pack", "unpack"]


def pack(value: Any, tensors: list[Tensor]) -> Any:
    """The value as JSON, with its tensors put into a list.

    Raises:
        TypeError: something in it is neither a tensor nor a number, string, None, list, tuple or dictionary.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type]}
    if isinstance(value, dict):
        return {"dict": [[pack(key, tensors), pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__ if type(value) in (list, tuple) else "tuple": [pack(v, tensors) for v in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise TypeError(f"a {type(value).__name__} cannot be sent to other ranks: only tensors, numbers, strings and lists")


def unpack(header: Any, tensors: list[Tensor]) -> Any:
    """The value that :func:`pack` made this from. Takes tensors from the front of the list."""
    ((kind, inside),) = header.items()
    if kind == "tensor":
        return tensors.pop(0)
    if kind == "dict":
        return {unpack(key, tensors): unpack(item, tensors) for key, item in inside}
    if kind in ("list", "tuple"):
        items = [unpack(item, tensors) for item in inside]
        return items if kind == "list" else tuple(items)
    return inside


def shapes_of(header: Any) -> list[tuple[torch.dtype, list[int]]]:
    """The dtypes and shapes of the tensors in a header, in order."""
    ((kind, inside),) = header.items()
    if kind == "tensor":
        dtype = getattr(torch, str(inside[0]), None)
        if not isinstance(dtype, torch.dtype):
            raise ExchangeError(f"a rank sent a tensor of dtype {inside[0]!r}, which is not known here")
        return [(dtype, [int(n) for n in inside[1]])]
    if kind == "dict":
        return [shape for pair in inside for part in pair for shape in shapes_of(part)]
    return [shape for part in inside for shape in shapes_of(part)] if kind in ("list", "tuple") else []


def broadcast_tree(peers: Peers, value: Any, root: int) -> Any:
    """What the peer at position ``root`` has. All peers call it; the root gets its own value back.

    Tensors arrive in memory of their own, on the device that peers exchange on.
    """
    tensors: list[Tensor] = []
    header = pack(value, tensors) if peers.rank == root else None
    header = gather(peers, header)[root]
    if peers.rank == root:
        for tensor in tensors:  # a copy has no gaps, whatever the strides are
            copy = tensor.detach().to(peers.device).clone(memory_format=torch.contiguous_format)
            _broadcast([copy], peers, root)
        return value
    arrived = [torch.empty(shape, dtype=dtype, device=peers.device) for dtype, shape in shapes_of(header)]
    _broadcast(arrived, peers, root)
    return unpack(header, list(arrived))


def _broadcast(tensors: Sequence[Tensor], peers: Peers, root: int) -> None:
    for tensor in tensors:
        if tensor.numel():
            peers.broadcast(tensor.view(-1).view(torch.uint8), root).wait()
