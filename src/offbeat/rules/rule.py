"""What an update rule is: hyperparameters, state, the numbers that change each step, and the maths.

A rule file fills in one :class:`Rule`. Nothing else in the library knows a rule by name: the tiers
execute its ``update``, the optimizer classes and the functional form are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FLAGS", "PRECISION", "Hyper", "Rule", "Slot", "Values"]

#: Options every optimizer understands, with the value a group has when a checkpoint does not name them.
FLAGS: dict[str, Any] = {
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}

#: Options for how numbers are stored, known to groups that use them.
PRECISION: dict[str, Any] = {"state_dtype": None, "rounding": None}


class Values:
    """Named values as attributes; ordinary enough for torch.compile to follow."""

    def __init__(self, **items: Any) -> None:
        self.set(**items)

    def set(self, **items: Any) -> None:
        """Add or replace attributes."""
        for name, value in items.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no {name!r} here: only {sorted(self.__dict__)}")


@dataclass(frozen=True)
class Hyper:
    """One hyperparameter: its name, its default, and a check that raises ValueError or TypeError."""

    name: str
    default: Any
    check: Callable[[Any], None]
    doc: str


@dataclass(frozen=True)
class Slot:
    """One entry of a parameter's state.

    Args:
        key: the name in ``optimizer.state[p]``, torch.optim's own.
        init: the value it starts from; a function of the hyperparameters where it depends on them.
        scalar: a 0-d tensor (a counter, a running product) instead of a tensor like the parameter.
        late: what it starts from depends on hyperparameters as they are at the first step, not when it was allocated.
        positive: it is never negative, so that no bit need say so.
        form: how it is stored: ``plain`` (as the parameter, or as a dtype of its own), or in one of the forms of
            :mod:`offbeat.tiers.codec`; ``scales`` are what an 8-bit entry needs besides.
        dtype: the dtype it is stored in; None for the parameter's.
    """

    key: str
    init: float | Callable[[Values], Any] = 0.0
    scalar: bool = False
    late: bool = False
    positive: bool = False
    form: str = "plain"
    dtype: Any = None

    def initial(self, h: Values) -> Any:
        """The starting value under the hyperparameters ``h``."""
        return self.init(h) if callable(self.init) else self.init


def _nothing(h: Values) -> None:
    """No rule across hyperparameters."""


def _same(h: Values, s: Values) -> dict[str, Any]:
    """No stored scalar but the step."""
    return {}


@dataclass(frozen=True)
class Rule:
    r"""An update rule :math:`(\theta, g, \text{state}) \mapsto (\theta', \text{state}')`.

    The functions receive the hyperparameters of a group as attributes of ``h``. Those that work on scalars
    see numbers or, where a step must not touch the host (``capturable``), 0-d tensors: write them in plain
    arithmetic and with :mod:`offbeat.rules.ops`.

    Args:
        name: the optimizer class's name.
        hyper: the hyperparameters in torch.optim's order.
        slots: the state a parameter has under ``h``. A rule that counts steps has the scalar slot ``step``.
        structure: the booleans that choose a shape of the maths (``amsgrad``, ``nesterov``, ...). They are
            known before anything runs, so the update may branch on them.
        coefficients: every number the update multiplies by, worked out in double precision from ``h`` and
            from the stored scalars ``s`` (after :attr:`advance`). ``s.step`` counts from 1; a rule without a
            ``step`` slot sees 1 at a parameter's first step and some larger number after it.
        update: the maths. Takes ``p``, ``g`` and the tensor slots by name, then coefficients and structure
            as keywords; returns the new ``p`` and the new tensor slots in order. Elementwise, no data-dependent
            branch; ``None`` stands for a slot that is absent.
        advance: the new values of stored scalars other than ``step``, from ``h`` and the old ``s``. Here
            ``s.step`` is a number and the others are 0-d tensors of their stored dtype, so that they round
            as stored values do.
        advance_first: whether ``coefficients`` sees the advanced scalars (the default) or the old ones.
        check: a rule across hyperparameters; raises ValueError.
        sparse: what a sparse gradient means: ``"rows"`` updates the touched rows only, ``"dense"`` treats
            it as the dense gradient it stands for, or a sentence saying why it cannot be.
        first_step_differs: whether, under ``h``, a first step treats state otherwise than a later step treats the
            same state in its initial values. Only for rules without a ``step`` slot to tell the two apart; state
            that is allocated early is then marked as not begun.
        fixed: group options that are not the user's to choose.
        eager_state: create state when the optimizer is built, as torch.optim's does.
        flags: the options of :data:`FLAGS` the class takes.
        positional: those of ``flags`` that torch.optim also takes by position, in order.
        native: the same update by one of torch's own fused operators, or None.
        compact: whether state can be kept in bfloat16 or 8 bits: it starts at zero and is an average of gradients or
            of their squares.
    """

    name: str
    hyper: tuple[Hyper, ...]
    slots: Callable[[Values], tuple[Slot, ...]]
    structure: Callable[[Values], dict[str, bool]]
    coefficients: Callable[[Values, Values], dict[str, Any]]
    update: Callable[..., tuple[Any, ...]]
    advance: Callable[[Values, Values], dict[str, Any]] = _same
    advance_first: bool = True
    check: Callable[[Values], None] = _nothing
    sparse: Callable[[Values], str] = lambda h: "does not support sparse gradients"
    first_step_differs: Callable[[Values], bool] = lambda h: False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    eager_state: bool = False
    flags: tuple[str, ...] = ("maximize", "foreach", "capturable", "differentiable", "fused")
    positional: tuple[str, ...] = ()
    native: Callable[..., None] | None = None
    compact: bool = False

    def validate(self, options: Mapping[str, Any]) -> None:
        """Check the hyperparameters in ``options``, one by one and against each other."""
        for hyper in self.hyper:
            hyper.check(options[hyper.name])
        self.check(Values(**options))
