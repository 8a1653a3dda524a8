"""The options of a param group, and everything derived from them; computed again only when they change."""

from __future__ import annotations

import functools
from numbers import Number
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat._torch import is_traced
from offbeat.engine.precision import check_precision, formats, kept_slots
from offbeat.engine.trace import Program, TypedProgram, trace
from offbeat.rules.rule import FLAGS, PRECISION, Rule, Values, no_scalars


class Sharing(NamedTuple):
    """The ranks that share the work on whole matrices. Each of them has all parameters.

    Attributes:
        group: the process group.
        exact: whether results are sent in the dtype in which they were computed, even if it is wider than bfloat16.
    """

    group: Any
    exact: bool


class Options:
    """The options of a group under a rule.

    Attributes:
        h: the hyperparameters.
        slots: the state that is stored for a parameter.
        tensor_keys: the state entries that are tensors like the parameter.
        scalar_keys: the state entries that are single numbers, such as step counters.
        scale_keys: the state entries that are scales of 8-bit entries.
        names: the arguments of the rule's update that are tensors.
        form: the forms in which p, g and state are stored; empty if all are plain.
        structure: the booleans that choose between variants of the maths.
        has_tensors: whether a hyperparameter is a tensor.
        sharing: the ranks that share the work on whole matrices; None if each rank does all of it.
        symbolic: whether coefficients are tensors, kept on their device or recorded by autograd.
        marks: whether state that has not seen a step is marked.
        reasons: for each program, dtypes and device, the reason that there is no kernel, or None.
    """

    def __init__(self, rule: Rule, options: dict[str, Any], sharing: Sharing | None = None) -> None:
        self.rule, self.sharing = rule, sharing
        self.h = hyperparameters({**FLAGS, **options})
        self.has_tensors = has_tensors(self.h)
        self._work_out()

    def with_floats(self, changed: dict[str, float]) -> Options:
        """The same options but for some numbers, which were floats before too; as a scheduler changes them."""
        names, same_form = self.coefficient_names, self._decisive.isdisjoint(changed)
        options = object.__new__(Options)
        vars(options).update(vars(self))  # with what has been derived from them
        options.h = object.__new__(Values)
        vars(options.h).update(vars(self.h), **changed)
        for name in ("words", "coefficient_names"):
            vars(options).pop(name, None)
        if vars(options).get("constant") is not None:
            del vars(options)["constant"]
        if not same_form or options.coefficient_names != names:
            for name in ("program", "device_program", "_decisive", "_scalars", "_slots_have_functions"):
                vars(options).pop(name, None)
            options._work_out()
        elif self._slots_have_functions:
            options.slots = kept_slots(options.rule, options.h)
        return options

    @functools.cached_property
    def _slots_have_functions(self) -> bool:
        """Return whether a slot has a function, which may look at the numbers that it was made with."""
        return any(callable(slot.init) or slot.shape is not None for slot in self.slots)

    @functools.cached_property
    def _decisive(self) -> frozenset[str]:
        """The hyperparameters that the form of the state and of the maths depends on. Usually no learning rate."""
        watched = _Watched(**vars(self.h))
        for depends in (self.rule.slots, self.rule.structure, self.rule.first_step_differs):
            depends(watched)
        read = watched.noted_by_offbeat
        return frozenset(vars(self.h) if "__dict__" in read else read)

    def _work_out(self) -> None:
        rule, h = self.rule, self.h
        self.slots = kept_slots(rule, h)
        self.tensor_keys = tuple(slot.key for slot in self.slots if not slot.scalar and slot.form != "scales")
        self.scalar_keys = tuple(slot.key for slot in self.slots if slot.scalar)
        self.scale_keys = tuple(slot.key for slot in self.slots if slot.form == "scales")
        self.names = ("p", "g", *(slot.key for slot in rule.slots(h) if not slot.scalar))
        self.form = formats(h, self.slots)
        self.structure = rule.structure(h)
        self.symbolic = bool(h.capturable or h.differentiable)
        self.marks = rule.first_step_differs(h) and "step" not in self.scalar_keys
        self.reasons: dict[Any, str | None] = {}
        flags = (h.foreach, h.fused, h.differentiable, h.capturable, *(vars(h).get(name) for name in PRECISION))
        self._form = (flags, self.structure, self.tensor_keys, self.scalar_keys, self.has_tensors)
        vars(self).pop("kind", None)

    @functools.cached_property
    def kind(self) -> tuple[Any, ...]:
        """Everything that decides which kernel runs. A batch fits all options of the same kind."""
        return (*self._form, self.coefficient_names)

    @functools.cached_property
    def coefficient_names(self) -> tuple[str, ...]:
        """The names of the rule's coefficients."""
        return tuple(self.sample_coefficients(_without_tensors(self.h, 0.5) if self.has_tensors else self.h))

    def on_host(self) -> Values:
        """The hyperparameters, with tensors read as numbers. Reading waits for their device."""
        return _without_tensors(self.h, None) if self.has_tensors else self.h

    def sample_coefficients(self, h: Values | None = None) -> dict[str, Any]:
        """Coefficients for arbitrary stored scalars, to learn their names and to check that they can be computed."""
        return self.rule.coefficients(self.h if h is None else h, self._scalars)

    @functools.cached_property
    def _scalars(self) -> Values:
        return Values(step=1, **{key: 0.5 for key in self.scalar_keys if key != "step"})

    @functools.cached_property
    def constant(self) -> dict[str, float] | None:
        """The coefficients, if they are the same at every step: a rule without bias corrections and the like."""
        changes = self.form or self.rule.advance is not no_scalars or any(slot.late for slot in self.slots)
        if changes:
            return None
        try:
            coefficients = self.rule.coefficients(self.on_host(), _Unread())
        except _Unread.Read:
            return None
        return {name: float(value) for name, value in coefficients.items()} | {"rounding_step": 0.0}

    @functools.cached_property
    def words(self) -> dict[str, str]:
        """The hyperparameters in words that are the same on every rank for the same values."""
        h = self.on_host()
        return {name: _in_words(getattr(h, name)) for name in option_names(self.rule)}

    @functools.cached_property
    def program(self) -> Program:
        """The rule's maths."""
        return self._trace(())

    @functools.cached_property
    def device_program(self) -> Program:
        """The same, for steps that the device counts: the program itself initialises late state at the first step."""
        return self._trace(tuple(slot.key for slot in self.rule.slots(self.h) if slot.late and not slot.scalar))

    def _trace(self, late: tuple[str, ...]) -> Program:
        more = ("rounding_step",) if self.form else ()
        return trace(
            self.rule, self.names[2:], self.coefficient_names, tuple(sorted(self.structure.items())), late, more
        )

    def typed(self, dtypes: tuple[torch.dtype, ...], *, on_device: bool = False) -> TypedProgram:
        """The program for tensors of these dtypes."""
        return TypedProgram(self.device_program if on_device else self.program, dtypes, self.form)


class _Watched(Values):
    """Hyperparameters that record which of them are read."""

    __slots__ = ("noted_by_offbeat",)  # a name that no hyperparameter has

    def __init__(self, **items: Any) -> None:
        self.noted_by_offbeat: set[str] = set()
        super().__init__(**items)
        self.noted_by_offbeat.clear()

    def __getattribute__(self, name: str) -> Any:
        if name != "noted_by_offbeat":
            self.noted_by_offbeat.add(name)
        return object.__getattribute__(self, name)


class _Unread(Values):
    """Stored scalars of a rule that does not look at them."""

    class Read(Exception):
        """A stored scalar was read."""

    def __getattribute__(self, name: str) -> Any:
        raise _Unread.Read(name)


def option_names(rule: Rule) -> list[str]:
    """The options that decide what an update is."""
    return [*(hyper.name for hyper in rule.hyper), "maximize"]


def _in_words(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_in_words, value))})"
    return repr(float(value)) if isinstance(value, (int, float)) and not isinstance(value, bool) else repr(value)


def hyperparameters(group: dict[str, Any]) -> Values:
    """A group's options as attributes. A CPU tensor becomes a number, unless the step is differentiable or traced."""
    items = {name: _plain(value) for name, value in group.items() if name not in ("params", "param_names")}
    watched = bool(items["differentiable"])
    for name, value in list(items.items()):
        if isinstance(value, Tensor) and value.numel() == 1:
            items[name] = _scalar(value, watched)
        elif name == "betas" and any(isinstance(b, Tensor) for b in value):
            items[name] = tuple(_scalar(b, watched) if isinstance(b, Tensor) else b for b in value)
    return Values(**items)


def _plain(value: Any) -> Any:
    """A list as a tuple, and a number of another library (NumPy) as a Python float."""
    if isinstance(value, list):
        return tuple(map(_plain, value))
    if isinstance(value, Number) and not isinstance(value, (int, float, complex)):
        return float(value)  # type: ignore[arg-type]
    return value


def _scalar(value: Tensor, watched: bool) -> Any:
    return value.squeeze() if watched or value.device.type != "cpu" or is_traced() else value.item()


def has_tensors(h: Values) -> bool:
    """Return whether a hyperparameter is a tensor."""
    return any(
        isinstance(number, Tensor)
        for value in vars(h).values()
        for number in (value if isinstance(value, tuple) else (value,))
    )


def _without_tensors(h: Values, stand_in: float | None) -> Values:
    """Hyperparameters with tensors read as numbers, or replaced by ``stand_in``."""

    def number(value: Any) -> Any:
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.item() if stand_in is None else stand_in
        return tuple(map(number, value)) if isinstance(value, tuple) else value

    return Values(**{name: number(value) for name, value in vars(h).items()})


class OptionsCache:
    """Caches the options of groups. They are compared with the live groups at every step, so they are never stale."""

    def __init__(self, rule: Rule, sharing: Sharing | None) -> None:
        self.rule, self._sharing = rule, sharing
        self._known: dict[int, tuple[dict[str, Any], Options]] = {}

    def of(self, group: dict[str, Any]) -> Options:
        """The options of this group as they are now."""
        if (known := self._known.get(id(group))) is not None:
            before, cached = known
            # All values are immutable, so identical objects are equal; comparing identities is faster.
            same_names = len(group) == len(before) + 1 + ("param_names" in group) and before.keys() <= group.keys()
            if same_names and all(map(is_, map(group.get, before), before.values())):
                return cached
            if same_names and (changed := _changed_floats(before, group)):
                cached = cached.with_floats(changed)
                before.update(changed)
                self._known[id(group)] = (before, cached)
                return cached
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        check_precision(self.rule, options)
        cached = Options(self.rule, options, self._sharing)
        self._known.pop(id(group), None)
        if all(map(_is_constant, options.values())):  # a tensor may change in place
            if len(self._known) > 64:  # groups come and go
                self._known.clear()
            self._known[id(group)] = (options, cached)
        return cached


def _changed_floats(before: dict[str, Any], group: dict[str, Any]) -> dict[str, float] | None:
    """The options that have changed, if all of them were and are floats."""
    changed = {}
    for name, value in before.items():
        if (new := group[name]) is not value:
            if type(new) is not float or type(value) is not float:
                return None
            changed[name] = new
    return changed


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, (bool, int, float, str, type(None), torch.dtype))
