"""Makes what a replica brings to a round: its hello, and copies of what travels if training goes on meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.replicas.contents import Item, local_part
from offbeat.replicas.fragment import Fragment, sizes_of
from offbeat.replicas.hello import Hello, Rules
from offbeat.replicas.round import Codes, Offer

__all__ = ["make_offer"]


def make_offer(
    fragment: Fragment,
    step: int,
    *,
    weight: float,
    done: bool = False,
    now: bool = False,
    may_be_last: bool = False,
    steps: int = 0,
    waits: bool = False,
) -> Offer:
    """What this replica brings to the next round of a fragment. Called on the training thread.

    Args:
        fragment: what is exchanged.
        step: the step after which the round begins.
        weight: this replica's weight.
        done: whether this rank has no data left.
        now: whether all replicas wait for the round and must be equal after it.
        may_be_last: whether it is the last round if no replica has data left.
        steps: how many steps this rank has made.
        waits: whether training waits for the round, which then needs no copies.
    """
    params, buffers = fragment.params(), fragment.buffers()
    codes = None if fragment.codec is None or fragment.outer is None else _codes(fragment, params)
    dense = buffers if codes is not None else [*params, *buffers]
    values = None if waits else fragment.copy(dense)
    state = fragment.contents.state_items() if waits and not fragment.level.delay else []
    names, contents, outer = [item.name for item in params], fragment.contents, fragment.outer
    views = {
        **({} if codes is None else codes.views),
        **({} if values is None else {i.name: values[i.name] for i in dense}),
    }
    bad = not_finite(
        [(item.name, views.get(item.name, local_part(item.tensor))) for item in [*params, *buffers, *state]],
        contents.masks,
    )
    hello = Hello(
        rank=fragment.membership.rank,
        round=(step, -1 if now else fragment.place, fragment.number),
        version=fragment.version,
        lineage=fragment.lineage,
        items=contents.digest([*params, *buffers]),
        state=contents.digest_of_state(state),
        keys=contents.keys_of_state(),
        weight=weight,
        finite=not bad,
        bad=tuple(bad[:4]),
        moved=fragment.moved,
        done=done,
        steps=steps,
        unchecked=outer is not None and not outer.unchecked.isdisjoint(names),
        outer=[] if outer is None else outer.options(names),
        inner=contents.inner_options(),
    )
    return Offer(
        fragment=fragment,
        hello=hello,
        rules=Rules(nonfinite=fragment.level.nonfinite, has_outer=outer is not None, now=now, may_be_last=may_be_last),
        step=step,
        done=done,
        final=done or now,
        items=[*params, *buffers],
        names=names,
        values=values,
        codes=codes,
        streams={}
        if waits
        else _streams([item.tensor for item in [*params, *buffers]], wait=fragment.copies is not None),
    )


@torch.no_grad()
def _codes(fragment: Fragment, params: Sequence[Item]) -> Codes:
    """The differences from the anchors, in float32, where the parameters are or where copies are kept."""
    assert fragment.outer is not None
    anchors, sizes = fragment.outer.anchors, sizes_of(params)
    device = fragment.copies or (local_part(params[0].tensor).device if params else torch.device("cpu"))
    flat = torch.empty(sum(size for _, size in sizes), dtype=torch.float32, device=device)
    views: dict[str, Tensor] = {}
    for item, piece in zip(params, torch.split(flat, [size for _, size in sizes]), strict=True):
        part, anchor = local_part(item.tensor), anchors[item.name]
        view = views[item.name] = piece.view(part.shape)
        if part.device == anchor.device == device and part.dtype == anchor.dtype == torch.float32:
            torch.sub(anchor, part, out=view)
        else:
            wide = torch.promote_types(torch.promote_types(anchor.dtype, part.dtype), torch.float32)
            view.copy_(anchor.to(wide) - part.to(device=anchor.device, dtype=wide))
    return Codes(flat, sizes, views)


def _streams(tensors: Sequence[Tensor], *, wait: bool) -> dict[torch.device, Any]:
    """A stream for each GPU, for work in the background that follows what has been asked of the GPU so far.

    Args:
        tensors: what the work is about.
        wait: whether to wait for the GPU now, because copies go to memory that the CPU reads.
    """
    streams: dict[torch.device, Any] = {}
    for device in {local_part(tensor).device for tensor in tensors}:
        if device.type == "cuda":
            taken = torch.cuda.current_stream(device).record_event()
            streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            streams[device].wait_event(taken)
            if wait:
                taken.synchronize()
    return streams


def not_finite(tensors: Sequence[tuple[str, Tensor]], masks: Collection[str] = ()) -> list[str]:
    """The names of the tensors that have NaN or infinity among their elements.

    Args:
        tensors: names and tensors.
        masks: names of tensors that may have infinite elements.
    """
    tensors = [(name, t) for name, t in tensors if t.is_floating_point() and t.numel()]
    bad_masks = [name for name, t in tensors if name in masks and bool(t.isnan().any())]
    tensors = [(name, t) for name, t in tensors if name not in masks]
    # A sum is finite only if its terms are. It can overflow too, so that single tensors are looked at again.
    sums: dict[Any, list[Tensor]] = {}
    for _, t in tensors:
        sums.setdefault(t.device, []).append(t.sum(dtype=torch.float32 if t.itemsize < 4 else None))
    if all(bool(torch.stack([s.double() for s in on_device]).isfinite().all()) for on_device in sums.values()):
        return bad_masks
    return [name for name, t in tensors if not bool(t.isfinite().all())] + bad_masks
