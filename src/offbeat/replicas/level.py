"""``Level``: how, when and with whom replicas agree, at one level of a hierarchy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

import torch

from offbeat._names import ChecksNames
from offbeat.replicas.options import (
    Anchor,
    Every,
    Fragments,
    MakeOuter,
    NonFinite,
    Where,
    check_bool,
    check_float_dtype,
    in_words,
)
from offbeat.replicas.schedule import check_period
from offbeat.wire.codecs import CodecSpec, make_codec

__all__ = ["Level", "options_in_words"]


@dataclass(frozen=True, kw_only=True)
class Level(ChecksNames):
    r"""How replicas agree at one level: when, with whom and what they exchange. For :class:`offbeat.Replica`.

    A round of a level exchanges parameters :math:`x_i` (or a fragment of them). Without an outer optimizer every rank
    gets the mean :math:`\bar x`. With one, the level keeps an *anchor* :math:`a`, which is the same on every rank, and
    gives the outer optimizer the pseudo-gradient :math:`a - \bar x`; then :math:`x_i \leftarrow a`.

    Args:
        every: the number of steps between rounds, or a function of the step that returns it.
        phase: the number of steps after warm-up until the first round, by default ``every``; with fragments until the
            last one's. Fragment ``f`` of ``n`` is exchanged after ``phase - every + every * (f + 1) // n`` steps, and
            whole periods before and after that.
        group: the ranks that agree: None for all, a number of ranks (blocks of consecutive ranks), a process group, or
            the names of dimensions of the mesh that is passed to ``Replica``.
        outer: makes the outer optimizer: called with parameter groups, one for each group of the inner optimizer. For
            example ``functools.partial(offbeat.SGD, lr=0.7, momentum=0.9, nesterov=True)``. None takes the mean.
        fragments: cut the parameters into parts that are exchanged at different steps, which divides the peak of bytes
            on the link: a number (of consecutive parts of about equal size), ``("strided", n)`` (layer ``i`` is in part
            ``i % n``), or lists of parameter names.
        delay: 0 waits for a round. :math:`k > 0` exchanges in the background and applies the result :math:`k` steps
            later.
        mixing: how much of the local parameters stays. With an outer optimizer
            :math:`x_i \leftarrow \alpha x_i + (1 - \alpha) a`, by default 0. Without
            an outer optimizer only a part of the difference is added, after a delay of :math:`k` steps
            :math:`x_i(t+k) \leftarrow x_i(t+k) + (1 - \alpha) (\bar x(t) - x_i(t))`, by default all of it.
        codec: how differences from the anchor are encoded: None, ``"bf16"``, ``"fp16"``, ``"int8"``, ``"int4"``,
            ``"int2"`` or an :class:`offbeat.TopK`. Needs an outer optimizer.
        error_feedback: add what encoding has lost, multiplied by this number, to the next round's differences. True is
            the number 1; None and False lose it.
        deadline: how many seconds a collective may take; by default the process group's timeout.
        nonfinite: what to do if a replica has parameters that are not finite: ``"raise"`` on every rank,
            ``"leave_out"`` that replica of this round (it gets the result of the others), or ``"skip"`` the round.
        anchor: where anchors and the state of the outer optimizer are kept: ``"device"`` or ``"cpu"``.
        anchor_dtype: their dtype; by default that of the parameters.
        ordered: add up in rank order, so that the result does not depend on the backend's algorithm.

    Example:
        >>> import functools, offbeat
        >>> outer = functools.partial(offbeat.SGD, lr=0.7, momentum=0.9, nesterov=True)
        >>> inside_a_site = offbeat.Level(every=4, group=8, phase=1)
        >>> between_sites = offbeat.Level(every=64, outer=outer, fragments=4, delay=2, codec="int8")
        >>> between_sites.parts, between_sites.kept
        (4, 0.0)
    """

    every: Every = 8
    phase: int | None = None
    group: Where = None
    outer: MakeOuter | None = None
    fragments: Fragments = 1
    delay: int = 0
    mixing: float | None = None
    codec: CodecSpec = None
    error_feedback: float | bool | None = None
    deadline: float | None = None
    nonfinite: NonFinite = "raise"
    anchor: Anchor = "device"
    anchor_dtype: torch.dtype | None = None
    ordered: bool = False

    def __post_init__(self) -> None:
        check_period(self.every, "every")
        check_bool(ordered=self.ordered)
        if self.phase is not None:
            _whole("phase", self.phase, 1, "step")
        _whole("delay", self.delay, 0, "steps")
        for name, allowed in (("nonfinite", get_args(NonFinite)), ("anchor", get_args(Anchor))):
            if getattr(self, name) not in allowed:
                words = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} must be one of {words}, but got {getattr(self, name)!r}")
        if not callable(self.every) and self.delay > self.every:
            raise ValueError(
                f"delay={self.delay} is longer than the {self.every} steps between averages, but only one round of a "
                f"fragment can be in flight; use a delay of at most {self.every}"
            )
        if self.outer is not None and not callable(self.outer):
            raise TypeError(
                f"outer must be a function that makes an optimizer, but got {self.outer!r}; pass for example "
                "functools.partial(offbeat.SGD, lr=0.7, momentum=0.9, nesterov=True)"
            )
        if self.mixing is not None and not (_is_number(self.mixing) and 0 <= self.mixing < 1):
            raise ValueError(f"mixing must be at least 0 and less than 1, but got {self.mixing!r}")
        if self.deadline is not None and not (_is_number(self.deadline) and self.deadline > 0):
            raise ValueError(f"deadline must be a positive number of seconds, but got {self.deadline!r}")
        check_float_dtype("anchor_dtype", self.anchor_dtype)
        self._check_fragments()
        self._check_wire()
        if self.nonfinite == "leave_out" and self.parts > 1:
            raise ValueError(
                "nonfinite='leave_out' cannot be used with fragments: a replica that takes over one fragment is still "
                "not finite in the others; use 'raise' or 'skip'"
            )
        if self.outer is None and self.anchor_dtype is not None:
            raise ValueError(
                "anchor_dtype needs an outer optimizer, because only that has an anchor; pass outer=, or leave "
                "anchor_dtype out"
            )

    def _check_fragments(self) -> None:
        if isinstance(self.fragments, int):
            _whole("fragments", self.fragments, 1, "part")
        elif isinstance(self.fragments, tuple) and len(self.fragments) == 2 and self.fragments[0] == "strided":
            _whole("fragments[1]", self.fragments[1], 1, "part")
        elif not isinstance(self.fragments, Sequence) or not all(map(_is_list_of_names, self.fragments)):
            raise TypeError(
                'fragments must be a number, ("strided", number), or lists of parameter names that are not empty, but '
                f"got {self.fragments!r}"
            )
        if self.parts > 1 and callable(self.every):
            raise ValueError("fragments need a number of steps as every, because they take turns within that period")
        if not callable(self.every) and self.parts > self.every:
            raise ValueError(
                f"{self.parts} fragments cannot take turns in a period of {self.every} steps; use at most {self.every}"
            )

    def _check_wire(self) -> None:
        if make_codec(self.codec) is not None and self.outer is None:
            raise ValueError(
                f"codec={self.codec!r} needs an outer optimizer: differences from its anchor are encoded, never "
                "parameters; pass outer=functools.partial(offbeat.SGD, lr=1.0) to take the mean of what was decoded"
            )
        if self.error_feedback is None or self.error_feedback is False:
            return
        if self.codec is None:
            raise ValueError("error_feedback needs a codec: without one nothing is lost; pass codec=, or leave it out")
        if not (self.error_feedback is True or (_is_number(self.error_feedback) and 0 < self.error_feedback <= 1)):
            raise ValueError(f"error_feedback must be more than 0 and at most 1, but got {self.error_feedback!r}")

    @property
    def parts(self) -> int:
        """The number of fragments."""
        if isinstance(self.fragments, int):
            return self.fragments
        if isinstance(self.fragments, tuple) and self.fragments[:1] == ("strided",):
            return int(self.fragments[1])
        return len(self.fragments)

    @property
    def decay(self) -> float | None:
        """The number that what encoding has lost is multiplied by; None without error feedback."""
        return float(self.error_feedback) if self.error_feedback else None

    @property
    def kept(self) -> float:
        """How much of the local parameters a landing keeps."""
        return 0.0 if self.mixing is None else float(self.mixing)

    def cut(self, sizes: Mapping[str, int], frozen: Collection[str] = ()) -> list[list[str]]:
        """The names of the parameters in each fragment.

        Args:
            sizes: the number of elements of each parameter, by name and in order.
            frozen: names of parameters that are not trained at present, which lists may contain.
        """
        names = list(sizes)
        if isinstance(self.fragments, (int, tuple)) and self.parts > len(names):
            raise ValueError(f"{self.parts} fragments cannot be cut from {len(names)} parameters; use at most as many")
        if isinstance(self.fragments, int):
            return _consecutive(sizes, self.fragments)
        if isinstance(self.fragments, tuple) and self.fragments[:1] == ("strided",):
            return _strided(names, self.parts)
        parts = [
            [name for name in part if name not in frozen] for part in self.fragments if not isinstance(part, (int, str))
        ]
        given = [name for part in parts for name in part]
        for name in given:
            if name not in sizes:
                raise ValueError(f"fragments name {name!r}, but there is no such parameter; there are {names[:8]}...")
        if len(given) != len(set(given)) or set(given) != set(names):
            lost = sorted(set(names) - set(given)) or sorted({name for name in given if given.count(name) > 1})
            raise ValueError(f"every parameter must be in exactly one fragment, but {lost[:8]} are not")
        return parts


def options_in_words(levels: Sequence[Level]) -> dict[str, str]:
    """The options of levels, for ranks to compare. Groups differ from rank to rank, and outer optimizers come later."""
    found = {}
    for i, level in enumerate(levels):
        for one in fields(level):
            if one.name not in ("group", "outer"):
                name = one.name if len(levels) == 1 else f"{one.name} of level {i}"
                found[name] = in_words(getattr(level, one.name))
    return found


def _consecutive(sizes: Mapping[str, int], parts: int) -> list[list[str]]:
    """Runs of consecutive parameters of about the same size, none of them empty."""
    names, total = list(sizes), sum(sizes.values())
    found: list[list[str]] = [[] for _ in range(parts)]
    done, part = 0, 0
    for i, name in enumerate(names):
        left, open_parts = len(names) - i, parts - part - 1
        middle = done + sizes[name] / 2
        if found[part] and open_parts and (middle > total * (part + 1) / parts or left <= open_parts):
            part += 1
        found[part].append(name)
        done += sizes[name]
    return found


def _strided(names: Sequence[str], parts: int) -> list[list[str]]:
    """Layer ``i`` in part ``i % parts``; a layer is what has the same name before the last dot."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    if parts > len(layers):
        raise ValueError(f"{parts} strided fragments cannot be cut from {len(layers)} layers; use at most as many")
    place = {layer: i % parts for i, layer in enumerate(layers)}
    return [[name for name in names if place[name.rpartition(".")[0]] == part] for part in range(parts)]


def _is_list_of_names(part: Any) -> bool:
    if isinstance(part, str) or not isinstance(part, Sequence) or not part:
        return False
    return all(isinstance(name, str) for name in part)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(name: str, value: Any, least: int, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a number of {unit.rstrip('s')}s, but got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least} {unit}, but got {value}")
