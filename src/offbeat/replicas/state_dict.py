"""What a checkpoint holds of a replica beside the optimizer's own state, and whether one can be loaded.

It holds outcomes: of a round in flight, what its exchange has brought. Loading makes the same outcome again.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.replicas.background import Pending
from offbeat.replicas.board import Board, Flight
from offbeat.replicas.contents import Contents, local_part
from offbeat.replicas.fragment import Fragment, sizes_of
from offbeat.replicas.outer import Outer
from offbeat.replicas.round import Outcome
from offbeat.replicas.values import Values

__all__ = ["check_complete", "check_rounds", "load_rounds", "own_part", "save_rounds"]

#: What every fragment has saved since there were fragments.
_OF_A_FRAGMENT = ("seen", "moved", "rounds", "residual", "residual_of", "flight")
_OF_AN_OUTER = ("anchors", "groups", "optimizer")


def outers_of(board: Board) -> list[Outer | None]:
    """The anchors and outer optimizer of each level, or None."""
    return [level[0].outer for level in board.fragments]


def save_rounds(board: Board, *, anchored: bool) -> dict[str, Any]:
    """Counters, anchors, outer state, residuals and rounds in flight, which are waited for but not applied.

    Args:
        board: the fragments and the rounds in flight.
        anchored: whether anchors are in use; before that there is nothing to save of them.
    """
    return {
        "syncs": board.count,
        "tracks": [[_save_fragment(board, fragment) for fragment in level] for level in board.fragments],
        "outer": [outer.state_dict() if outer is not None and anchored else None for outer in outers_of(board)],
    }


def _save_fragment(board: Board, fragment: Fragment) -> dict[str, Any]:
    flight = board.flight_of(fragment)
    return {
        "seen": fragment.seen,
        "moved": fragment.moved,
        "skipped": fragment.skipped,
        "rounds": fragment.version,
        "lineage": fragment.lineage,
        "residual": None if fragment.residual is None else fragment.residual.clone(),
        "residual_of": list(fragment.residual_of),
        "flight": None if flight is None else _save_flight(flight),
    }


def _save_flight(flight: Flight) -> dict[str, Any]:
    outcome = flight.pending.wait()
    saved: dict[str, Any] = {
        "step": outcome.step,
        "final": outcome.final,
        "exchanged": not outcome.alone,
        "numbers": [(count, dict(options)) for count, options in outcome.outer],
        "left_out": outcome.left_out,
        "notes": list(outcome.notes),
        "forgotten": [(fragment.place, fragment.number, amount) for fragment, amount in flight.taken],
    }
    if outcome.status != "averaged":
        saved["failed"] = True  # what it had taken is given back when it would have landed
        if outcome.error is not None:
            saved["notes"].append(
                f"a round that was begun after step {outcome.step} had failed when this checkpoint was saved: "
                f"{outcome.error}"
            )
        return saved
    for device, stream in outcome.streams.items():
        torch.cuda.current_stream(device).wait_stream(stream)
    saved["values"] = {} if outcome.values is None else outcome.values.clone()
    if outcome.gradients is not None:
        sizes, lost = outcome.residual or ([(name, g.numel()) for name, g in outcome.gradients.items()], None)
        saved["gradients"] = {name: g.clone() for name, g in outcome.gradients.items()}
        saved["lost"], saved["lost_of"] = None if lost is None else lost.clone(), list(sizes)
    return saved


def own_part(saved: Any) -> dict[str, Any]:
    """What a state dict has under ``"replica"``, as it is saved now or was before."""
    return (saved[0] if isinstance(saved, (tuple, list)) and saved else saved) or {}


def check_complete(state_dict: dict[str, Any], own: dict[str, Any]) -> None:
    """Raise if something is missing that has been saved.

    Args:
        state_dict: the inner optimizer's.
        own: the replica's own part.
    """
    missing = [key for key in own.get("stateful", []) if key not in state_dict["state"]]
    if missing:
        raise ValueError(
            f"the checkpoint was saved with optimizer state for {len(own['stateful'])} parameters, and that of "
            f"{len(missing)} is not there (numbers {missing[:8]}); nothing was changed. torch.distributed.checkpoint "
            "loads only what it is given a place for: save and load (optimizer.state_dict(),), in a tuple, or call "
            "init_state() before state_dict()"
        )
    lost = []
    if "wrapper" in own:
        lost += [f"{key!r}" for key in ("tracks", "outer") if key not in own]
    for i, level in enumerate(own.get("tracks") or []):
        lost += [f"{key!r} of level {i}" for saved in level for key in _OF_A_FRAGMENT if key not in saved]
    for i, outer in enumerate(own.get("outer") or []):
        if outer is not None:
            lost += [f"{key!r} of level {i}" for key in _OF_AN_OUTER if key not in outer]
            names = [name for group in outer.get("groups", []) for name in group]
            lost += [f"the anchor of {name!r}" for name in names if name not in outer.get("anchors", {})]
    if lost:
        raise ValueError(
            f"the checkpoint is not complete: {', '.join(lost[:4])} missing; nothing was changed. Load what "
            "state_dict() returned, as it was"
        )


def check_rounds(own: dict[str, Any], board: Board, contents: Contents) -> None:
    """Raise if anchors or a round in flight of a checkpoint cannot be loaded."""
    saved = own.get("tracks") or []
    fits = [len(level) for level in saved] == [len(level) for level in board.fragments]
    outers = own.get("outer") or []
    for i, level in enumerate(saved):
        for number, values in enumerate(level):
            flight = values["flight"]
            if flight is None or flight.get("failed"):  # which changes no parameters
                continue
            if flight.get("eager"):
                raise ValueError(
                    "the checkpoint has a round in flight of eager=True, which offbeat no longer has; nothing was "
                    "changed. Save after finish() with the version that wrote it"
                )
            if not fits:
                raise ValueError(
                    f"the checkpoint has a round in flight, and {[len(one) for one in saved]} fragments at its levels, "
                    f"but there are {[len(one) for one in board.fragments]} here; nothing was changed. Load it with "
                    "the levels it was saved with, or save after finish()"
                )
            fragment = board.fragments[i][number]
            _check_kind(flight, fragment, has_outer=i < len(outers) and outers[i] is not None)
            _check_contents(flight, fragment, contents)
    for outer, state in zip(outers_of(board), outers, strict=True) if len(outers) == len(board.fragments) else ():
        if outer is not None and state is not None:
            outer.check_state_dict(state, contents.params())


def _check_kind(flight: dict[str, Any], fragment: Fragment, *, has_outer: bool) -> None:
    is_coded = "flat" in flight or "gradients" in flight
    if has_outer != (fragment.outer is not None):
        raise ValueError(
            "the checkpoint has a round in flight for an outer optimizer, and here its level has none, or the other "
            "way round; nothing was changed. Load it with the outer optimizer it was saved with, or save after finish()"
        )
    if is_coded != (fragment.codec is not None):
        raise ValueError(
            "the checkpoint has a round in flight that was encoded, and here it would not be, or the other way round; "
            "nothing was changed. Load it with the codec it was saved with, or save after finish()"
        )
    if not fragment.level.delay:
        raise ValueError(
            "the checkpoint has a round in flight, and here rounds of its level are not late, so that none could land; "
            "nothing was changed. Load it with a delay, or save after finish()"
        )


def _check_contents(flight: dict[str, Any], fragment: Fragment, contents: Contents) -> None:
    params = contents.params()
    if "lost_of" in flight:
        sizes = dict(sizes_of(fragment.params()))
        for name, size in flight["lost_of"]:
            if sizes.get(name) != size:
                raise ValueError(
                    f"the checkpoint has a round in flight that was encoded with {size} elements of {name!r}, where "
                    f"this model has {sizes.get(name, 'none')} in the same fragment; nothing was changed. Load the "
                    "checkpoint into the model it was saved from, with the same parameters frozen, or save after "
                    "finish()"
                )
    shapes = {item.name: local_part(item.tensor).shape for item in contents.buffers()}
    shapes |= {name: local_part(p).shape for name, p in params.items()}
    names = {item.name for item in [*fragment.params(), *fragment.buffers()]}
    for name, value in flight.get("values", {}).items():
        if shapes.get(name) != value.shape:
            shape = tuple(shapes[name]) if name in shapes else "no such tensor"
            raise ValueError(
                f"the checkpoint has an average in flight for {name!r} of shape {tuple(value.shape)}, but this model "
                f"has {shape}; nothing was changed. Load the checkpoint into the model it was saved from"
            )
        if name not in names:
            raise ValueError(
                f"the checkpoint has an average in flight for {name!r}, which is in another fragment here; nothing was "
                "changed. Load it with the fragments it was saved with, or save after finish()"
            )


def load_rounds(own: dict[str, Any], board: Board, params: Mapping[str, Tensor]) -> bool:
    """Continue from :func:`save_rounds`. Returns whether anchors were loaded, if there are any."""
    board.abandon()
    board.count = int(own.get("syncs", 0))
    for fragment in board:
        fragment.seen, fragment.moved, fragment.skipped = 0.0, True, False
        fragment.version, fragment.lineage = -1 if fragment.outer is not None else 0, ""
        fragment.residual, fragment.residual_of = None, []
    complete = _load_outers(own, board, params)
    saved = own.get("tracks") or []
    if [len(level) for level in saved] != [len(level) for level in board.fragments]:
        if saved:
            warnings.warn(
                f"the checkpoint has {[len(level) for level in saved]} fragments at its levels, but there are "
                f"{[len(level) for level in board.fragments]} here: what ranks had seen, and what encoding had lost, "
                "is dropped",
                stacklevel=4,
            )
        for fragment in board:
            fragment.version = 0 if complete else fragment.version
        return complete
    for level, some in zip(board.fragments, saved, strict=True):
        for fragment, values in zip(level, some, strict=True):
            _load_fragment(fragment, values, board, complete=complete)
    return complete


def _load_outers(own: dict[str, Any], board: Board, params: Mapping[str, Tensor]) -> bool:
    complete = True
    outers = outers_of(board)
    saved = own.get("outer") or []
    for i, outer in enumerate(outers):
        state = saved[i] if len(saved) == len(outers) else None
        if outer is not None and state is not None:
            outer.load_state_dict(state, params)
        elif outer is not None:
            outer.reset()
            complete = False
        elif state is not None:
            warnings.warn(
                f"the checkpoint has anchors and an outer optimizer for level {i}, which has none here: they are "
                "dropped",
                stacklevel=5,
            )
    return complete


def _load_fragment(fragment: Fragment, saved: Mapping[str, Any], board: Board, *, complete: bool) -> None:
    fragment.seen, fragment.moved = float(saved["seen"]), bool(saved["moved"])
    fragment.skipped = bool(saved.get("skipped", False))
    if fragment.outer is None or complete:
        fragment.version, fragment.lineage = int(saved["rounds"]), str(saved.get("lineage", ""))
    fragment.residual = None if saved["residual"] is None else saved["residual"].clone()
    fragment.residual_of = [(str(name), int(size)) for name, size in saved["residual_of"]]
    flight = saved["flight"]
    if flight is not None:
        outcome = _outcome(flight, fragment)
        taken = [(board.fragments[place][i], float(amount)) for place, i, amount in flight.get("forgotten", [])]
        taken = taken or [(fragment, float(flight.get("on_board", 0.0)))]  # as it was saved once
        board.flights[fragment.place, fragment.number] = Flight(Pending(outcome.step, outcome), taken)


def _outcome(flight: Mapping[str, Any], fragment: Fragment) -> Outcome:
    common: dict[str, Any] = {
        "step": int(flight["step"]),
        "notes": tuple(flight.get("notes", ())),
        "final": bool(flight["final"]),
        "left_out": bool(flight.get("left_out", False)),
        "alone": not flight.get("exchanged", True),
    }
    options = flight.get("numbers")
    common["outer"] = options if options is not None else _present_options(fragment)
    if flight.get("failed"):
        return Outcome(status="skipped", names=fragment.names(), **common)
    items = [*fragment.params(), *fragment.buffers()]
    gradients, residual = _gradients(flight, fragment)
    names = fragment.names() if gradients is None else list(gradients)
    if gradients is None:
        names = [name for name in names if name in flight["values"]]  # without those unfrozen since
    values = Values.restored(items, flight.get("values", {}), fragment.copies)
    return Outcome(status="averaged", names=names, values=values, gradients=gradients, residual=residual, **common)


def _present_options(fragment: Fragment) -> Any:
    return [] if fragment.outer is None else fragment.outer.options(fragment.names())


def _gradients(
    flight: Mapping[str, Any], fragment: Fragment
) -> tuple[dict[str, Tensor] | None, tuple[list[tuple[str, int]], Tensor] | None]:
    if "lost_of" not in flight:
        return None, None
    sizes = [(str(name), int(size)) for name, size in flight["lost_of"]]
    if "gradients" in flight:
        gradients = {name: g.clone() for name, g in flight["gradients"].items()}
    else:  # as it was saved once: one flat tensor
        shapes = {item.name: local_part(item.tensor).shape for item in fragment.params()}
        pieces: Sequence[Tensor] = flight["flat"].clone().split([size for _, size in sizes])
        gradients = {name: piece.view(shapes[name]) for (name, _), piece in zip(sizes, pieces, strict=True)}
    lost = flight["lost"]
    return gradients, None if lost is None else (sizes, lost.clone())
