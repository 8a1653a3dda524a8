"""The definition of an update rule: hyperparameters, state, numbers that change at each step, and the maths.

A rule file defines one :class:`Rule`. The engine executes its ``update``, and the optimizer class and the functional
forms are made from it. No other code depends on the name of a rule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

__all__ = ["FLAGS", "PRECISION", "Hyper", "Matrix", "Rule", "Slot", "Surface", "Total", "Values"]

#: Options of every optimizer, with the values for groups from checkpoints that do not have them.
FLAGS: dict[str, Any] = {
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}

#: Options for how numbers are stored. Only groups that use them contain them.
PRECISION: dict[str, Any] = {"state_dtype": None, "rounding": None}


def no_scalars(h: Values, s: Values) -> dict[str, Any]:
    """:attr:`Rule.advance` of rules that store no scalar other than ``step``."""
    return {}


class Values:
    """Named values as attributes. The class is simple, so that torch.compile can trace it, in torch 2.11 too."""

    def __init__(self, **items: Any) -> None:
        for name, value in items.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no {name!r} here; there are: {', '.join(sorted(self.__dict__))}")


@dataclass(frozen=True)
class Hyper:
    """One hyperparameter of a rule.

    Args:
        name: the name of the argument and of the option in ``param_groups``.
        default: its default value.
        check: raises ValueError or TypeError for a value that is not allowed.
        doc: what it does, for the docstring of the optimizer class.
        type: its annotation for type checkers. It may use ``Any``, ``Literal``, ``Tensor`` and ``torch``.
    """

    name: str
    default: Any
    check: Callable[[Any], None]
    doc: str
    type: str = "float | Tensor"


@dataclass(frozen=True)
class Slot:
    """One entry of a parameter's state.

    Args:
        key: the name in ``optimizer.state[p]``, the one torch.optim uses.
        init: the initial value; a function of the hyperparameters if it depends on them.
        scalar: whether the entry is one number (a step counter, a running product), not a tensor like the parameter.
        late: whether the initial value uses the hyperparameters of the first step, not those at allocation.
        positive: whether the entry is never negative, so that 8-bit storage needs no sign bit.
        form: how the entry is stored: ``plain``, or one of the forms of :mod:`offbeat.engine.eight_bit`. ``scales`` are
            the scales that belong to an 8-bit entry.
        dtype: the dtype in which the entry is stored; None for the parameter's dtype.
        shape: a function from the parameter's shape to the entry's shape, if they differ; it returns None for
            parameters that do not have the entry. Only for rules that work on whole matrices.
        saved: the Python type (such as ``int``) of a number that torch.optim does not keep as a tensor. State dicts
            contain a number of this type.

    Example:
        >>> import offbeat
        >>> momentum = offbeat.Slot("momentum_buffer")
        >>> momentum.shape_for((3, 4))
        (3, 4)
    """

    key: str
    init: float | Callable[[Values], Any] = 0.0
    scalar: bool = False
    late: bool = False
    positive: bool = False
    form: str = "plain"
    dtype: Any = None
    shape: Callable[[tuple[int, ...]], tuple[int, ...] | None] | None = None
    saved: type | None = None

    def initial(self, h: Values) -> Any:
        """The initial value under the hyperparameters ``h``."""
        return self.init(h) if callable(self.init) else self.init

    def shape_for(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of the entry for a parameter of this shape; None if the parameter does not have the entry."""
        return shape if self.shape is None else self.shape(tuple(shape))

    def follows(self, shape: tuple[int, ...], dim: int) -> bool:
        """Whether the dimension ``dim`` of the entry is that of a parameter of this shape, so that both are cut alike.

        Example:
            >>> import offbeat
            >>> rows = offbeat.Slot("rows", shape=lambda shape: (shape[0], 1))
            >>> rows.follows((1, 4), 0), rows.follows((1, 4), 1)
            (True, False)
        """
        longer = [size + (i == dim) for i, size in enumerate(shape)]
        before, after = self.shape_for(tuple(shape)), self.shape_for(tuple(longer))
        return before is not None and after is not None and dim < len(before) and before[dim] != after[dim]


@dataclass(frozen=True)
class Surface:
    """The parts of an optimizer class that follow torch.optim's class of the same name.

    Args:
        flags: the options of :data:`FLAGS` that the class takes.
        positional: the ``flags`` that can also be passed by position, in order.
        keyword_only: hyperparameters that cannot be passed by position.
        fixed: group options that the user cannot choose, with their values.
        precision: whether the class takes the options of :data:`PRECISION` that its rule allows.
        eager_state: whether state is created with the optimizer, not at the first step.
        example: a module and its input, for the example in the docstring.
        native: ``native(h, step, params, grads, state)`` runs the same update with torch's own fused operator.
        native_takes: a function of a dtype: whether that operator gives right results for it on the CPU.
        native_maths: the functions of the rule that ``native`` belongs to. The first rule with this surface sets it; a
            rule with others does not use ``native``.
    """

    flags: tuple[str, ...] = ("maximize", "foreach", "capturable", "differentiable", "fused")
    positional: tuple[str, ...] = ()
    keyword_only: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    precision: bool = True
    eager_state: bool = False
    example: tuple[str, str] = ("torch.nn.Linear(4, 2)", "torch.ones(3, 4)")
    native: Callable[..., None] | None = None
    native_takes: Callable[[Any], bool] = lambda dtype: True
    native_maths: Any = field(default=None, repr=False)


class Total(NamedTuple):
    """A sum or a norm over a dimension of a parameter, as a transform that works on pieces yields it.

    Attributes:
        part: what this rank's piece gives.
        dim: the dimension, counted from the last (-1); None for all of them.
        norm: whether it is a norm and not a sum.
    """

    part: Any
    dim: int | None
    norm: bool = False


@dataclass(frozen=True, eq=False)
class Matrix:
    r"""The part of a rule that is not elementwise: it needs whole matrices.

    A step of such a rule has three parts. :attr:`before` and :attr:`Rule.update` are elementwise and traced like any
    rule. Between them, :attr:`transform` works on a stack of parameters of equal shape.

    Args:
        transform: called as ``transform(x, about, **state)`` with a stack ``x`` of shape ``(n, *shape)`` of ``n``
            parameters of equal shape, and stacks of the slots that have a :attr:`Slot.shape`. Returns what
            :attr:`Rule.update` gets as its gradient ``g``, and the new values of these slots in order. ``about`` has
            the attributes ``h`` (hyperparameters), ``c`` (coefficients and structure), ``params`` (the ``n``
            parameters; do not write to them), ``dtype`` (their dtype), ``shape`` (the shape of a whole one) and
            ``products`` (the quickest symmetric products on the device of ``x``:
            :class:`offbeat.rules.products.Products`). The result for one parameter must not depend on the others in
            the stack.
        before: the elementwise part that computes ``x``, called as ``before(g, <slots>, c)``. It returns ``x`` and the
            new values of the slots that it names. The transform may then write to ``x``. If it is None, ``x`` is the
            gradient itself, and the transform must not write to it.
        dtype: a function of ``h``: the dtype of ``x`` if there is a :attr:`before`; None for the widest dtype of the
            gradient and the state, and at least float32.
        scales: further coefficients, which depend on ``h`` and on the shape of the parameter.
        cut: whether a parameter may be split along the dimensions before the last two, because its matrices are
            independent of each other.
        pieces: whether the transform works on pieces of parameters that are split over ranks. It is then a generator
            function: it yields lists of :class:`Total`, is sent the list of the totals over all pieces, and returns
            what other transforms return. Slots with a shape are split as the parameter is, if they have that dimension.
        copies: how many tensors of the size of ``x`` the transform needs at once, including ``x``.
    """

    transform: Callable[..., Any]
    before: Callable[..., tuple[Any, ...]] | None = None
    dtype: Callable[[Values], Any] = lambda h: None
    scales: Callable[[Values, tuple[int, ...]], dict[str, Any]] = lambda h, shape: {}
    cut: bool = False
    pieces: bool = False
    copies: int = 3


@dataclass(frozen=True, eq=False)
class Rule:
    r"""An update rule :math:`(\theta, g, \text{state}) \mapsto (\theta', \text{state}')`.

    The functions get the hyperparameters of a group as attributes of ``h``. Functions that compute numbers may get
    Python numbers, 0-d tensors or symbols: write them with plain arithmetic and :mod:`offbeat.rules.ops`.

    Args:
        name: the name of the optimizer class.
        hyper: the hyperparameters, in torch.optim's order.
        slots: the state of a parameter under ``h``. A rule that counts steps has the scalar slot ``step``.
        structure: booleans that choose between variants of the maths (``amsgrad``, ``nesterov``, ...). They are
            known before anything runs, so the update may branch on them.
        coefficients: every number that the update uses, computed in double precision from ``h`` and from the stored
            scalars ``s`` (after :attr:`advance`, and rounded to the precision in which they are stored). ``s.step``
            counts from 1. For a rule without a ``step`` slot it is 1 at a parameter's first step and larger later.
        update: the maths, elementwise and without branches on values. Its arguments are ``p``, ``g``, the tensor
            slots by name (only those that exist under ``h``), and ``c``, which has the coefficients and the structure
            as attributes. A short rule may instead name single coefficients as keyword-only arguments. It returns the
            new ``p`` and the new tensor slots, in the order of the slots.
        advance: the new values of the stored scalars other than ``step``, from ``h`` and the old ``s``. Here
            ``s.step`` is the new step, and the other scalars have the precision in which they are stored. The results
            are rounded to that precision before ``coefficients`` gets them.
        advance_first: whether ``coefficients`` gets the scalars after ``advance`` (the default) or before it.
        check: checks hyperparameters against each other; raises ValueError.
        sparse: how to handle a sparse gradient: ``"rows"`` updates only the rows that it contains, ``"dense"`` converts
            it to a dense gradient, and any other text raises the error "<name> <text>".
        dense: if not empty, a dense gradient raises the error "<name> <text>" with this text.
        check_param: raises if the rule cannot update a parameter of this kind.
        first_step_differs: whether the first step differs from a later step with the same initial state. Only for
            rules without a ``step`` slot. State that is allocated early is then marked, so that its first step is
            recognised.
        compact: whether the state can be stored in bfloat16 or in 8 bits: it starts at zero and averages gradients or
            their squares.
        matrix: for rules that need whole matrices. ``update`` then gets the result of the transform as ``g``, and takes
            the tensor slots that it names.
        surface: the parts of the optimizer class that follow torch.optim.

    Example:
        >>> import torch, offbeat
        >>> from offbeat.rules.checks import learning_rate
        >>> from offbeat.rules.ops import sign
        >>> def sign_sgd(p, g, c):
        ...     return (p - c.lr * sign(g),)
        >>> rule = offbeat.Rule(
        ...     name="SignSGD",
        ...     hyper=(learning_rate(0.1),),
        ...     slots=lambda h: (),
        ...     structure=lambda h: {},
        ...     coefficients=lambda h, s: {"lr": h.lr},
        ...     update=sign_sgd,
        ... )
        >>> class SignSGD(offbeat.RuleOptimizer, rule=rule): ...
        >>> w = torch.ones(2)
        >>> SignSGD([w], lr=0.5).step_params([w], [torch.tensor([2.0, -3.0])])
        >>> w
        tensor([0.5000, 1.5000])
    """

    name: str
    hyper: tuple[Hyper, ...]
    slots: Callable[[Values], tuple[Slot, ...]]
    structure: Callable[[Values], dict[str, bool]]
    coefficients: Callable[[Values, Values], dict[str, Any]]
    update: Callable[..., tuple[Any, ...]]
    advance: Callable[[Values, Values], dict[str, Any]] = no_scalars
    advance_first: bool = True
    check: Callable[[Values], None] = lambda h: None
    sparse: Callable[[Values], str] = lambda h: "does not support sparse gradients"
    dense: str = ""
    check_param: Callable[[Any], None] = lambda p: None
    first_step_differs: Callable[[Values], bool] = lambda h: False
    compact: bool = False
    matrix: Matrix | None = None
    surface: Surface = field(default_factory=Surface)

    def validate(self, options: Mapping[str, Any]) -> None:
        """Check the hyperparameters in ``options``, one by one and against each other."""
        for hyper in self.hyper:
            hyper.check(options[hyper.name])
        self.check(Values(**options))

    def __post_init__(self) -> None:
        self._keep_native_for_its_maths()
        # Computed once, because torch.compile cannot trace it.
        object.__setattr__(self, "_wanted", frozenset(inspect.signature(self.update).parameters))

    def _keep_native_for_its_maths(self) -> None:
        """A rule made by ``replace(rule, update=...)`` is not what torch's operator computes."""
        if self.surface.native is None:
            return
        maths = (self.update, self.coefficients, self.advance, self.advance_first, self.slots, self.structure)
        if self.surface.native_maths is None:
            object.__setattr__(self.surface, "native_maths", maths)
        elif self.surface.native_maths != maths:
            object.__setattr__(self, "surface", replace(self.surface, native=None, native_maths=None))

    def apply(self, tensors: Mapping[str, Any], scalars: Mapping[str, Any]) -> tuple[Any, ...]:
        """Call :attr:`update` with ``tensors`` by name and with ``scalars``: the coefficients and the structure."""
        wanted: frozenset[str] = self._wanted  # type: ignore[attr-defined]
        if "c" in wanted:
            return self.update(**tensors, c=Values(**scalars))
        return self.update(**tensors, **{name: value for name, value in scalars.items() if name in wanted})
