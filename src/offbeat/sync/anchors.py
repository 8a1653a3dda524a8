"""The anchors of all levels of a replica, with their outer optimizers and eager steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from offbeat.sync.contents import Contents
from offbeat.sync.eager import Eager
from offbeat.sync.items import Item, local_part
from offbeat.sync.level import Level
from offbeat.sync.outer import Outer

__all__ = ["Anchors"]


class Anchors:
    """What levels with an outer optimizer keep.

    Args:
        levels: lowest first.
        share: the share of one replica in a mean of all.

    Attributes:
        outers: for each level, its anchors and outer optimizer, or None.
        eagers: for each level, its eager steps, or None.
    """

    def __init__(self, contents: Contents, levels: Sequence[Level], share: float) -> None:
        self._contents = contents
        self.outers = [None if level.outer is None else Outer(level, contents.groups) for level in levels]
        self.eagers = [
            Eager(outer, Outer(level, contents.groups), share) if outer is not None and level.eager else None
            for level, outer in zip(levels, self.outers, strict=True)
        ]

    def _there(self) -> list[Outer]:
        return [outer for outer in self.outers if outer is not None]

    def __bool__(self) -> bool:
        """Whether any level has an outer optimizer."""
        return bool(self._there())

    def follow(self) -> None:
        """Take anchors of parameters that have none yet, or that are averaged again."""
        for outer in self._there():
            outer.follow(self._contents.params())

    def refresh(self) -> None:
        """Take the parameters as they are as anchors."""
        for outer in self._there():
            outer.refresh(self._contents.params())

    def items(self) -> list[Item]:
        """All anchors of all levels, of parameters that are averaged."""
        return [item for outer in self._there() for item in outer.items(list(outer.present))]

    def note_rates(self) -> None:
        """Remember the inner optimizer's learning rates, for outer optimizers that ask for them."""
        for outer in self._there():
            outer.note_rates()

    @torch.no_grad()
    def set_params(self) -> None:
        """Replace the parameters by the anchors of the highest level that has some."""
        params = self._contents.params()
        for name, anchor in self._there()[-1].anchors.items():
            if name in params:
                local_part(params[name]).copy_(anchor)

    def state_dict(self, *, anchored: bool) -> dict[str, Any]:
        """Anchors, outer state and eager steps of each level.

        Args:
            anchored: whether anchors are in use; before that there is nothing to save of them.
        """
        parts: dict[str, Sequence[Outer | Eager | None]] = {"outer": self.outers, "eager": self.eagers}
        return {
            key: [one.state_dict() if one is not None and anchored else None for one in some]
            for key, some in parts.items()
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise if this cannot be loaded."""
        saved = state["outer"]
        for outer, one in zip(self.outers, saved, strict=True) if len(saved) == len(self.outers) else ():
            if outer is not None and one is not None:
                outer.check_state_dict(one, self._contents.params())

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Continue from :meth:`state_dict`. Returns whether all anchors were loaded.

        Anchors belong to a level, whatever its fragments are.
        """
        params, complete = self._contents.params(), True
        saved, eagers = state.get("outer") or [], state.get("eager") or []
        for i, outer in enumerate(self.outers):
            one = saved[i] if len(saved) == len(self.outers) else None
            if outer is not None and one is not None:
                outer.load_state_dict(one, params)
            elif outer is not None:
                outer.reset()
                complete = False
            elif one is not None:
                warnings.warn(
                    f"the checkpoint has anchors and an outer optimizer for level {i}, which has none here: they are "
                    "dropped",
                    stacklevel=5,
                )
        for i, eager in enumerate(self.eagers):
            if eager is not None:
                eager.reset()
                if complete and i < len(eagers) and eagers[i] is not None:
                    eager.load_state_dict(eagers[i], params)
        return complete
