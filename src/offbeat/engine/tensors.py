"""Properties of tensors that the engine needs: plain or distributed, and their layout in memory."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat._torch import is_fake, local_tensor, version_of

#: The types of tensors whose memory simply holds their values.
PLAIN = (Tensor, torch.nn.Parameter)
_HALF = (torch.float16, torch.bfloat16)


def is_plain(t: Any) -> bool:
    """Return whether ``t`` is a Tensor or a Parameter and not an instance of another subclass."""
    return type(t) in PLAIN


def is_dtensor(t: Any) -> bool:
    """Return whether ``t`` is a DTensor. Does not import torch.distributed.tensor if nothing else has."""
    if type(t) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def is_plain_shard(placement: Any) -> bool:
    """Whether this placement of a DTensor cuts it into even pieces in the order of the ranks."""
    return type(placement) is sys.modules["torch.distributed.tensor"].Shard


def local(t: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    if not is_dtensor(t):
        return t
    shard = local_tensor(t)
    # A collective may still be writing to it.
    return shard.wait() if hasattr(shard, "wait") else shard  # type: ignore[no-any-return]


def changes(t: Tensor) -> int:
    """A number that grows when a tensor is changed in place.

    FSDP2 adds to the shard of a DTensor, which the version of the DTensor itself does not tell.
    """
    return version_of(t) + version_of(local(t)) if is_dtensor(t) else version_of(t)


def distributed_like(like: Any, shard: Tensor) -> Tensor:
    """A DTensor with the placements of ``like``, of which ``shard`` is this rank's part."""
    whole: Tensor = type(like).from_local(
        shard, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )
    return whole


def distributed_part(like: Any, shape: Sequence[int], follows: Callable[[int], bool], value: float) -> Tensor:
    """A DTensor for state of another shape than its parameter: ``value`` everywhere.

    Args:
        like: the parameter, a DTensor.
        shape: the shape of the state.
        follows: whether a dimension of the state is cut as that dimension of the parameter is.
    """
    shard, sizes = local(like).detach(), list(shape)
    placements = part_placements(like, follows)
    for placement in placements:
        if placement.is_shard():
            sizes[placement.dim] = shard.shape[placement.dim]
    stride = torch.empty(tuple(shape), device="meta").stride()
    whole: Tensor = type(like).from_local(
        shard.new_full(sizes, value), like.device_mesh, placements, shape=torch.Size(shape), stride=stride
    )
    return whole


def part_placements(like: Any, follows: Callable[[int], bool]) -> list[Any]:
    """How state of another shape than its parameter is placed: cut where it follows the parameter, else whole."""
    replicate = sys.modules["torch.distributed.tensor"].Replicate()
    return [
        replicate if placement.is_shard() and not follows(placement.dim) else placement for placement in like.placements
    ]


def has_storage(t: Tensor) -> bool:
    """Return whether the tensor has memory that a kernel can read."""
    try:
        return t.data_ptr() != 0 or t.numel() == 0
    except RuntimeError:  # a functorch or fake tensor
        return False


def lost_memory(t: Tensor) -> bool:
    """Return whether the storage of a plain tensor is too small for it: somebody has freed or shrunk it."""
    if not is_plain(t) or t.layout is not torch.strided or t.device.type == "meta" or not t.numel():
        return False
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    try:
        return (t.storage_offset() + last + 1) * t.itemsize > t.untyped_storage().nbytes()
    except RuntimeError:  # a functorch tensor, which has none
        return False


def has_values(t: Tensor) -> bool:
    """Return whether the tensor has values: it is neither a meta tensor nor a fake one."""
    return t.device.type != "meta" and (is_plain(t) or not is_fake(t))


def compute_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype to compute in: the widest of the operands' dtypes, and at least float32."""
    dtype = functools.reduce(torch.promote_types, dtypes)
    return torch.float32 if dtype in _HALF else dtype


def is_dense(t: Tensor) -> bool:
    """Return whether the elements fill one block of memory without gaps or overlap, in any order of dimensions."""
    if t.is_contiguous():
        return True
    expected = 1
    for size, stride in sorted(
        ((size, stride) for size, stride in zip(t.shape, t.stride(), strict=True) if size != 1), key=lambda x: x[1]
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape have the same strides (dimensions of size 1 do not matter)."""
    if a.stride() == b.stride() or (a.is_contiguous() and b.is_contiguous()):
        return True
    return all(x == y for size, x, y in zip(a.shape, a.stride(), b.stride(), strict=True) if size != 1)


def match_layout(t: Tensor, like: Tensor) -> Tensor:
    """``t`` itself if it is dense and has the strides of ``like``, else a copy that does."""
    if is_dense(t) and same_layout(t, like):
        return t
    return torch.empty_like(like, dtype=t.dtype, memory_format=torch.preserve_format).copy_(t)


def cut(row: Sequence[Tensor], elements: int) -> Iterator[Sequence[Tensor]]:
    """Cut tensors of one shape into pieces of ``elements`` elements, in memory order. Not cut if strides differ."""
    p = row[0]
    if p.numel() <= elements or not all(is_plain(t) and is_dense(t) and same_layout(p, t) for t in row):
        yield row
        return
    yield from zip(*(torch.split(flat(t.detach()), elements) for t in row), strict=True)


def flat(t: Tensor) -> Tensor:
    """A dense tensor as one dimension, in memory order; shares the storage."""
    return t.view(-1) if t.is_contiguous() else t.as_strided((t.numel(),), (1,), t.storage_offset())
