"""What ranks that share matrices exchange besides the matrices: checks that they agree, norms, and state."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat._torch import foreach_copy_
from offbeat.engine.options import Options
from offbeat.engine.owners import rounds

__all__ = [
    "check_same_gradients",
    "check_same_kinds",
    "check_same_norms",
    "check_same_parameters",
    "check_same_step",
    "check_shared_work",
    "norms_of_owners",
    "send_from_owners",
]

#: Bytes of state that are sent at once. A single tensor may need more.
PACKED_BYTES = 64 << 20


def check_same_parameters(shapes: Any, group: Any, device: torch.device) -> None:
    """Raise on all ranks unless all ranks of the group pass the same shapes."""
    if not _same(repr(shapes), group, device):
        raise RuntimeError(
            "the ranks have different parameters, or the same in another order, so they cannot share the work; build "
            "the same model and the same groups on every rank"
        )


def check_same_gradients(gradients: Sequence[Tensor], group: Any) -> None:
    """Raise on all ranks unless all ranks of the group have the same gradients, bit for bit.

    Makes one pass over the gradients: their bits are summed as integers, so the order does not matter.
    """
    total = torch.zeros((), dtype=torch.int64, device=gradients[0].device)
    for g in gradients:
        total += g.contiguous().view(_WORDS[g.element_size()]).sum(dtype=torch.int64)
    if not _agree(total & (2**62 - 1), group):
        raise RuntimeError(
            "the ranks have different gradients, so they cannot share the work on the same matrices; average gradients "
            "before step() (as DDP does), share with the ranks that have the same, or leave share_matrices() out"
        )


def check_same_kinds(kinds: Sequence[str], group: Any, device: torch.device) -> None:
    """Raise on all ranks unless the same parameters have gradients, of the same types, on every rank."""
    if not _same(repr(kinds), group, device):
        raise RuntimeError(
            "the ranks have gradients for different parameters, so they cannot compute one norm of all gradients; make "
            "sure that all ranks use the same parameters, or fill in zeros for gradients that are missing"
        )


def check_same_norms(norms: Sequence[Tensor], group: Any) -> None:
    """Raise on all ranks unless every rank has the same norms of gradients that DDP does not reduce."""
    if not _same(repr([norm.item() for norm in norms]), group, norms[0].device):
        raise RuntimeError(
            "parameters outside of the DistributedDataParallel module have different gradients on the ranks, so the "
            "ranks would clip differently; average these gradients first, or put the parameters into the module"
        )


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same(text: str, group: Any, device: torch.device) -> bool:
    return _agree(torch.tensor(zlib.crc32(text.encode()), dtype=torch.int64, device=device), group)


def _agree(number: Tensor, group: Any) -> bool:
    pair = torch.stack([number, -number])
    dist.all_reduce(pair, dist.ReduceOp.MAX, group=group)
    high, low = pair.tolist()
    return bool(high == -low)


def check_same_step(
    names: Sequence[str], about: Mapping[str, str], group: Any, device: torch.device, error: Exception | None = None
) -> None:
    """Raise, on every rank alike, if a rank cannot take the step or if the ranks would take different ones.

    Two numbers are exchanged. Only if they differ, one more for each name tells what it is that differs.

    Args:
        names: ``"gradients"`` and the names of options; the same on every rank.
        about: for each name what this rank has, in words.
        error: why this rank cannot take the step.

    Raises:
        Exception: ``error``, on the ranks that have one.
        RuntimeError: another rank has an error, or the ranks differ.
    """
    digest = -1 if error is not None else zlib.crc32(repr([about[name] for name in names]).encode())
    same = _agree(torch.tensor(digest, dtype=torch.int64, device=device), group)
    if error is not None:
        if not same:
            _compare([1] + [0] * len(names), group, device)
        raise error
    if same:
        return
    failed, *alike = _compare([0] + [zlib.crc32(about[name].encode()) for name in names], group, device)
    if not failed:
        raise RuntimeError(
            "another rank cannot take this step; the error of that rank says why. No rank has changed anything"
        )
    name = next(name for name, is_same in zip(names, alike, strict=True) if not is_same)
    if name == "gradients":
        raise RuntimeError(
            "the ranks have gradients for different matrices in this step, and each matrix needs all ranks; make sure "
            "that all ranks use the same parameters, or fill in zeros for gradients that are missing"
        )
    raise RuntimeError(
        f"the ranks have different values of the option {name!r} (here {about[name]}), so that their parameters would "
        "drift apart; set it to the same value in the param groups of every rank. No rank has changed anything"
    )


def _compare(numbers: Sequence[int], group: Any, device: torch.device) -> list[bool]:
    """For each of these numbers, whether all ranks of the group have the same."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    pair = torch.stack([mine, -mine])
    dist.all_reduce(pair, dist.ReduceOp.MAX, group=group)
    return [high == -low for high, low in zip(*pair.tolist(), strict=True)]


def check_shared_work(work: Sequence[tuple[Options, Any]], group: Any, device: torch.device) -> None:
    """Raise, on every rank alike, unless all ranks of the group are about to do the same, with the same options.

    Args:
        work: for each group of parameters its options, and what is done to which of them.
    """
    about = {"gradients": repr([what for _, what in work])}
    for name in work[0][0].words:
        about[name] = ", ".join(options.words[name] for options, _ in work)
    check_same_step(list(about), about, group, device)


def norms_of_owners(norms: Sequence[Tensor], mine: Sequence[bool], group: Any) -> list[Tensor]:
    """The norm of each matrix, from its owner. Every rank gets the same bits."""
    wide = [norm.double() if here else torch.zeros_like(norm).double() for norm, here in zip(norms, mine, strict=True)]
    found = torch.stack(wide)
    dist.all_reduce(found, group=group)  # all but one are zero, so the order of the sum does not matter
    return [one.to(norm.dtype) for one, norm in zip(found.unbind(), norms, strict=True)]


def send_from_owners(tensors: Sequence[Tensor], owners: Sequence[int], group: Any) -> None:
    """Copy each tensor from its owner to all ranks of the group, packed in buffers of bounded size."""
    kinds: dict[Any, list[Tensor]] = {}
    for t, owner in zip(tensors, owners, strict=True):
        kinds.setdefault((owner, t.dtype, t.device), []).append(t)
    for (owner, dtype, device), some in kinds.items():
        source = dist.get_global_rank(group, owner) if group is not None else owner
        for positions in rounds([t.nbytes for t in some], [0] * len(some), 1, PACKED_BYTES):
            packed = [some[i] for i in positions]
            flat = torch.empty(sum(t.numel() for t in packed), dtype=dtype, device=device)
            parts = torch.split(flat, [t.numel() for t in packed])
            pieces = [part.view(t.shape) for part, t in zip(parts, packed, strict=True)]
            foreach_copy_(pieces, packed)
            dist.broadcast(flat.view(torch.uint8), source, group=group)
            foreach_copy_(packed, pieces)
