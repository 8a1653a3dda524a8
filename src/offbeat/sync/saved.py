"""Whether the tracks of a checkpoint can be loaded; asked before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offbeat.sync.coded import sizes_of
from offbeat.sync.contents import Contents
from offbeat.sync.items import Item, local_part
from offbeat.sync.track import Track

__all__ = ["check_complete", "check_saved_tracks", "own_part"]

#: What every track has saved since there were tracks.
_OF_A_TRACK = ("seen", "moved", "rounds", "residual", "residual_of", "flight")
_OF_AN_OUTER = ("anchors", "groups", "optimizer")


def own_part(saved: Any) -> dict[str, Any]:
    """What a state dict has under ``"replica"``, as it is saved now or was before."""
    return (saved[0] if isinstance(saved, (tuple, list)) and saved else saved) or {}


def check_complete(state_dict: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise if something is missing that has been saved.

    Args:
        state_dict: the inner optimizer's.
        mine: the replica's own part.
    """
    missing = [key for key in mine.get("stateful", []) if key not in state_dict["state"]]
    if missing:
        raise ValueError(
            f"the checkpoint was saved with optimizer state for {len(mine['stateful'])} parameters, and that of "
            f"{len(missing)} is not there (numbers {missing[:8]}); nothing was changed. torch.distributed.checkpoint "
            "loads only what it is given a place for: save and load (optimizer.state_dict(),), in a tuple, or call "
            "init_state() before state_dict()"
        )
    lost = []
    if "wrapper" in mine:
        lost += [f"{key!r}" for key in ("tracks", "outer") if key not in mine]
    for i, tracks in enumerate(mine.get("tracks") or []):
        lost += [f"{key!r} of level {i}" for track in tracks for key in _OF_A_TRACK if key not in track]
    for i, outer in enumerate(mine.get("outer") or []):
        if outer is not None:
            lost += [f"{key!r} of level {i}" for key in _OF_AN_OUTER if key not in outer]
            names = [name for group in outer.get("groups", []) for name in group]
            lost += [f"the anchor of {name!r}" for name in names if name not in outer.get("anchors", {})]
    if lost:
        raise ValueError(
            f"the checkpoint is not complete: {', '.join(lost[:4])} missing; nothing was changed. Load what "
            "state_dict() returned, as it was"
        )


def check_saved_tracks(state: dict[str, Any], here: Sequence[Sequence[Track]], contents: Contents) -> None:
    """Raise if a checkpoint has a round in flight that the tracks here could not land.

    Args:
        here: the tracks of each level.
    """
    saved = state.get("tracks") or []
    same = [len(tracks) for tracks in saved] == [len(tracks) for tracks in here]
    for i, tracks in enumerate(saved):
        for part, track in enumerate(tracks):
            flight = track["flight"]
            if flight is None or (flight.get("failed") and not flight.get("eager")):  # which changes no parameters
                continue
            if not same:
                raise ValueError(
                    f"the checkpoint has a round in flight, and {[len(one) for one in saved]} fragments at its levels, "
                    f"but there are {[len(one) for one in here]} here; nothing was changed. Load it with the levels it "
                    "was saved with, or save after finish()"
                )
            outers = state.get("outer") or []
            _check_kind(flight, here[i][part], has_outer=i < len(outers) and outers[i] is not None)
            _check_contents(flight, here[i][part], contents)


def _check_kind(flight: dict[str, Any], track: Track, *, has_outer: bool) -> None:
    if flight.get("eager", False) != track.level.eager:
        raise ValueError(
            "the checkpoint has a round in flight whose eager step has been taken, and here it would not have been, or "
            "the other way round; nothing was changed. Load it with the eager= it was saved with, or save after "
            "finish()"
        )
    if has_outer != (track.outer is not None):
        raise ValueError(
            "the checkpoint has a round in flight for an outer optimizer, and here its level has none, or the other "
            "way round; nothing was changed. Load it with the outer optimizer it was saved with, or save after finish()"
        )
    if not flight.get("failed") and ("flat" in flight) != (track.codec is not None):
        raise ValueError(
            "the checkpoint has a round in flight that was encoded, and here it would not be, or the other way round; "
            "nothing was changed. Load it with the codec it was saved with, or save after finish()"
        )
    if not track.works_on_copy:
        raise ValueError(
            "the checkpoint has a round in flight, and here rounds of its level are not late, so that none could land; "
            "nothing was changed. Load it with a delay, or save after finish()"
        )


def _check_contents(flight: dict[str, Any], track: Track, contents: Contents) -> None:
    params = contents.params()
    if "flat" in flight:
        # Parameters that were unfrozen or added since are not in it.
        here = dict(sizes_of([Item(name, params[name]) for name in track.names()]))
        for name, size in flight["lost_of"]:
            if here.get(name) != size:
                raise ValueError(
                    f"the checkpoint has a round in flight that was encoded with {size} elements of {name!r}, where "
                    f"this model has {here.get(name, 'none')} in the same fragment; nothing was changed. Load the "
                    "checkpoint into the model it was saved from, with the same parameters frozen, or save after "
                    "finish()"
                )
    shapes = {item.name: local_part(item.tensor).shape for item in contents.buffers()}
    shapes |= {name: local_part(p).shape for name, p in params.items()}
    here_too = {item.name for item in track.items()}
    for name, value in flight.get("values", {}).items():
        if shapes.get(name) != value.shape:
            found_shape = tuple(shapes[name]) if name in shapes else "no such tensor"
            raise ValueError(
                f"the checkpoint has an average in flight for {name!r} of shape {tuple(value.shape)}, but this model "
                f"has {found_shape}; nothing was changed. Load the checkpoint into the model it was saved from"
            )
        if name not in here_too:
            raise ValueError(
                f"the checkpoint has an average in flight for {name!r}, which is in another fragment here; nothing was "
                "changed. Load it with the fragments it was saved with, or save after finish()"
            )
