"""The base of the optimizer classes: a torch.optim.Optimizer that runs one update rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, ClassVar, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat import _torch
from offbeat._names import check_names, nearest
from offbeat._types import Params
from offbeat._warn import warn
from offbeat.engine.choice import Choice
from offbeat.engine.cuda.capture import is_capturing
from offbeat.engine.engine import Engine
from offbeat.engine.first_step import mark_before_first_step
from offbeat.engine.grad_transforms import NO_TRANSFORMS, GradTransforms, Work
from offbeat.engine.options import Options, hyperparameters
from offbeat.engine.precision import check_precision, kept_slots
from offbeat.engine.state import State, new_state
from offbeat.optim.checkpoint import check_state_dict, loaded, numbered, packed
from offbeat.optim.sharing import SharesMatrices
from offbeat.optim.signature import describe, make_init, signature
from offbeat.rules.rule import FLAGS, PRECISION, Rule, Slot

__all__ = ["RuleOptimizer"]

Loss = TypeVar("Loss")


class RuleOptimizer(SharesMatrices, Optimizer):
    """A drop-in replacement for the torch.optim class of the same name, made from an update rule.

    Subclass it with ``class MyRule(RuleOptimizer, rule=MY_RULE)``. Signature, checks, state and all tiers come from
    the rule. See :class:`offbeat.Rule` for an example with a rule of your own.

    Args:
        params: parameters, named parameters, or dictionaries that define groups.
        args: the rule's hyperparameters, by position.
        kwargs: the rule's hyperparameters and options, by name.

    Example:
        >>> import torch, offbeat
        >>> class Mine(offbeat.RuleOptimizer, rule=offbeat.Lion.rule): ...
        >>> optimizer = Mine([torch.ones(3)], lr=1e-4)
        >>> optimizer.defaults["betas"]
        (0.9, 0.99)

    Limits: type checkers know the arguments of offbeat's own classes from a stub file. The arguments of your own class
    are ``Any``; define ``__init__`` under ``if typing.TYPE_CHECKING:`` if you want them checked.
    """

    rule: ClassVar[Rule]
    _signature: ClassVar[inspect.Signature]
    #: For each parameter (by id), the index of its group and its index in that group.
    _places: dict[int, tuple[int, int]]

    def __init_subclass__(cls, rule: Rule | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if rule is not None:
            cls.rule, cls._signature = rule, signature(rule)
            cls.__signature__ = cls._signature  # type: ignore[attr-defined]
            cls.__doc__ = describe(rule, cls)
        if "__init__" not in vars(cls):
            if rule is not None:
                cls.__init__ = make_init(cls, rule)  # type: ignore[method-assign]
        else:  # a user's, with other arguments than the rule's
            own = inspect.signature(vars(cls)["__init__"])
            cls.__signature__ = own.replace(parameters=list(own.parameters.values())[1:])  # type: ignore[attr-defined]

    def __init__(self, params: Params, *args: Any, **kwargs: Any) -> None:
        check_names(type(self).__name__, kwargs, self._signature.parameters)
        try:
            bound = self._signature.bind(params, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}(): {error}; it takes {self._signature}") from None
        bound.apply_defaults()
        options = {name: value for name, value in bound.arguments.items() if name != "params"}
        defaults = {**{name: FLAGS[name] for name in FLAGS}, **options, **self.rule.surface.fixed}
        self.rule.validate(defaults)
        _check_flags(self.rule, defaults)
        # "capturable" stays out of the groups where torch.optim has no such option.
        used = {name for name in PRECISION if defaults.get(name) is not None} | self._options()
        kept = {name: defaults[name] for name in defaults if name in used}
        super().__init__(params, kept)  # type: ignore[arg-type]  # Params is a little wider than torch's ParamsT
        self._engine, self._places = Engine(self.rule), {}
        self._own_state()
        if defaults["fused"]:
            _torch.mark_scaled(self, True)
        if self.rule.surface.eager_state:
            self.init_state()

    @classmethod
    def _options(cls) -> set[str]:
        return {hyper.name for hyper in cls.rule.hyper} | set(cls.rule.surface.flags) | set(cls.rule.surface.fixed)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, checked like the constructor's arguments; see :class:`torch.optim.Optimizer`."""
        if isinstance(param_group, dict):
            options = {**FLAGS, **self.defaults, **{k: v for k, v in param_group.items() if k != "params"}}
            self.rule.validate(options)
            _check_flags(self.rule, options)
            self._warn_of_misspelt(param_group)
        super().add_param_group(param_group)
        try:
            for p in self.param_groups[-1]["params"]:
                self.rule.check_param(p)
        except BaseException:
            self.param_groups.pop()
            raise
        if hasattr(self, "_engine") and self.rule.surface.eager_state:
            self.init_state()

    def _warn_of_misspelt(self, param_group: dict[str, Any]) -> None:
        """Warn about a key that is almost the name of an option. Other keys of the user's own are allowed."""
        known = {*self._signature.parameters, *self.defaults}
        for key in param_group:
            meant = nearest(key, known, least=0.8) if isinstance(key, str) and key not in known else None
            if meant is not None and abs(len(key) - len(meant)) <= 2:
                warn(
                    f"{type(self).__name__} has no option {key!r}, so this key of a parameter group has no effect; "
                    f"did you mean {meant!r}?"
                )

    @overload
    def step(self, closure: None = None, *, clip: Tensor | float | None = None, zero_grad: bool = False) -> None: ...

    @overload
    def step(
        self, closure: Callable[[], Loss], *, clip: Tensor | float | None = None, zero_grad: bool = False
    ) -> Loss: ...

    def step(
        self, closure: Callable[[], Any] | None = None, *, clip: Tensor | float | None = None, zero_grad: bool = False
    ) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss, with gradients enabled.
            clip: a factor for the gradients of this update, such as the clip coefficient that
                :func:`torch.nn.utils.clip_grad_norm_` computes. The product is rounded to the gradient's dtype; the
                gradients themselves do not change. The fused tier on a GPU multiplies in the same pass over memory and
                does not wait for a ``clip`` that is on the GPU; other tiers copy the gradients.
            zero_grad: whether to set the gradients to zero afterwards, even if a GradScaler skips the step. On a GPU
                this takes no extra pass over memory.

        Returns:
            The closure's result, or None.
        """
        if torch.compiler.is_compiling():
            return self._step_untraced(closure, clip, zero_grad)
        return self._step(closure, clip, zero_grad)

    # A step only calls a few compiled kernels, so torch.compile has nothing to gain from tracing it.
    @_torch.untraced
    def _step_untraced(self, closure: Callable[[], Any] | None, clip: Tensor | float | None, zero_grad: bool) -> Any:
        return self._step(closure, clip, zero_grad)

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Like torch's wrapper, which runs hooks and records the step for a profiler, but skipped if there are none."""
        return _torch.lean_step(func, Optimizer.profile_hook_step(func))

    def _step(self, closure: Callable[[], Any] | None, clip: Tensor | float | None, zero_grad: bool) -> Any:
        self._check_capture()
        if not self.state and _torch.is_creating_state():
            self._allocate([p for group in self.param_groups for p in group["params"] if p.grad is not None])
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._run(self._work, self._grad_transforms(clip, zero_grad))
        return loss

    def _work(self) -> list[Work]:
        """All groups, with gradients from ``.grad``."""
        return [Work(group, group["params"], None) for group in self.param_groups]

    def step_params(
        self, params: Sequence[Tensor], grads: Sequence[Tensor | None], *, clip: Tensor | float | None = None
    ) -> None:
        """Update some parameters, of any groups, with gradients that are passed in.

        Use it if gradients are not in ``.grad``, or if only some of them are available: for a bucket during backward,
        for a functional step or for an outer optimizer. ``.grad`` is neither read nor changed, and step hooks do not
        run. All gradients are checked before any parameter is updated. The optimizer caches its work for each list of
        parameters, so pass the same parameters together every time.

        Args:
            params: parameters of this optimizer.
            grads: one gradient for each; None leaves a parameter and its state alone.
            clip: a factor for the gradients of this update.

        Example:
            >>> import torch, offbeat
            >>> w, b = torch.ones(3), torch.ones(2)
            >>> optimizer = offbeat.SGD([w, b], lr=0.5)
            >>> optimizer.step_params([b], [torch.ones(2)])
            >>> w, b
            (tensor([1., 1., 1.]), tensor([0.5000, 0.5000]))
        """
        params, grads = list(params), list(grads)
        if len(params) != len(grads):
            raise ValueError(f"got {len(grads)} gradients for {len(params)} parameters; pass one for each, or None")
        self._run(lambda: self._by_group(params, grads), self._grad_transforms(clip, False))

    def check_gradients(self) -> None:
        """Raise the error that ``step()`` would raise because of a gradient, if any. Changes nothing."""
        self._engine.check(self._work(), self._own_state())

    def clips_exactly(self, params: Sequence[Tensor]) -> bool:
        """Return whether ``step_params(params, grads, clip=...)`` multiplies gradients in the same pass over memory.

        If so, the result has the same bits as after a separate multiplication. False until these parameters have made
        a step.
        """
        params = list(params)
        return all(self._engine.clips_exactly(item.params) for item in self._by_group(params, params))

    def _by_group(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Work]:
        work: dict[int, tuple[list[Tensor], list[Tensor | None]]] = {}
        for p, g in zip(params, grads, strict=True):
            lists = work.setdefault(self._group_of(p), ([], []))
            lists[0].append(p)
            lists[1].append(g)
        return [Work(self.param_groups[i], *lists) for i, lists in work.items()]

    def _group_of(self, p: Tensor) -> int:
        """The index of a parameter's group. Groups may change at any time, so a cached index is checked before use."""
        groups = self.param_groups
        for _ in range(2):
            group, at = self._places.get(id(p), (len(groups), 0))
            if group < len(groups) and at < len(groups[group]["params"]) and groups[group]["params"][at] is p:
                return group
            self._places = {id(q): (i, j) for i, members in enumerate(groups) for j, q in enumerate(members["params"])}
        if not isinstance(p, Tensor):
            raise TypeError(f"a parameter must be a Tensor, but got {type(p).__name__}")
        raise ValueError(
            f"a parameter of shape {tuple(p.shape)} is in no group of this optimizer; add it with add_param_group"
        )

    def _run(self, work: Callable[[], list[Work]], transforms: GradTransforms) -> None:
        watched, state = bool(self.defaults.get("differentiable")), self._own_state()
        self._engine.run(work(), state, transforms, self.param_groups, differentiable=watched)

    def _grad_transforms(self, clip: Tensor | float | None, zero_grad: bool) -> GradTransforms:
        """Return the changes of gradients, including those that a GradScaler leaves to the step with ``fused=True``."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if clip is None and scale is None and found_inf is None and not zero_grad:
            return NO_TRANSFORMS
        if found_inf is not None and not isinstance(found_inf, Tensor):  # a GradScaler's sum over no gradients
            found_inf = torch.tensor(float(found_inf), device="cpu")
        if clip is not None and not isinstance(clip, Tensor):
            if not isinstance(clip, Real):
                raise TypeError(f"clip must be a number or a tensor of one element, but got {clip!r}")
            clip = torch.tensor(clip, dtype=torch.float64, device="cpu")
        if clip is not None and clip.numel() != 1:
            raise ValueError(f"clip must be one number, but it has shape {tuple(clip.shape)}")
        return GradTransforms(scale, found_inf, clip, zero_grad)

    def _check_capture(self) -> None:
        if "capturable" not in self.defaults:
            return
        # torch's check is slow even if there is nothing to find.
        xpu = torch.xpu.is_initialized()  # type: ignore[no-untyped-call]
        if any(group["capturable"] for group in self.param_groups) or is_capturing() or xpu:
            _torch.check_capture(self)

    def _own_state(self) -> State:
        """``self.state``, wrapped so that changes are counted; the user may have replaced it by any dictionary."""
        if type(self.state) is not State:
            self.state = State(self.state.items())
        return self.state

    def init_state(self) -> None:
        """Allocate the state of all parameters now, with or without a gradient. Changes nothing else.

        A step gives the same bits with and without ``init_state``. Call it to find out early whether the state fits
        into memory, or to have tensors to load into.
        """
        self._allocate([p for group in self.param_groups for p in group["params"]])

    def _allocate(self, params: Sequence[Tensor]) -> None:
        """Allocate what is missing of the state of these parameters."""
        state, wanted = self._own_state(), set(map(id, params))
        with torch.no_grad():
            for group in self.param_groups:
                options = Options(self.rule, group)
                params = [p for p in group["params"] if id(p) in wanted]
                _, created = new_state(options.slots, options.h, params, state)
                for p, key, value in created:
                    if options.marks:
                        mark_before_first_step(value)
                    state[p][key] = value

    def tiers(self) -> list[Choice]:
        """For each group, the tier that runs it and the reason.

        After a step, this is what that step used; before the first step, it is what a step would use now. The tier is
        chosen for each parameter. If the parameters of a group have different tiers, their names are joined by ``+``.
        """
        choices = []
        for group in self.param_groups:
            merged = self._engine.choices(group, self._own_state()) or [Choice("none", "the group has no parameters")]
            if len(merged) > 1:
                tiers = list(dict.fromkeys(choice.tier for choice in merged))
                merged = [Choice("+".join(tiers), "; ".join(map(str, merged)))]
            choices.append(merged[0])
        return choices

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly, in torch.optim's format; torch.optim loads it."""
        for hook in _torch.state_dict_hooks(self, "state_dict_pre"):
            hook(self)
        result = packed(self, self._slots)
        for post in _torch.state_dict_hooks(self, "state_dict_post"):
            changed = post(self, result)
            result = result if changed is None else changed
        return result

    @_torch.untraced
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state dict of this class or of torch.optim's class of the same name.

        State keeps the dtype in which it was saved. The tensors of a parameter's state are
        copied. As in torch, other objects in it, and entries under keys that are not parameters, stay the same objects.
        If both sides name their parameters and each group has the same names, state is matched by name, otherwise by
        position. Options that a checkpoint does not have are taken from this optimizer.
        """
        state_dict = dict(state_dict)
        for hook in _torch.state_dict_hooks(self, "load_state_dict_pre"):
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        check_state_dict(state_dict, type(self).__name__)
        state, groups = loaded(self, numbered(state_dict), self._slots)
        self.__setstate__({"state": state, "param_groups": groups})
        for post in _torch.state_dict_hooks(self, "load_state_dict_post"):
            post(self)

    def _slots(self, group: dict[str, Any]) -> tuple[Slot, ...]:
        return kept_slots(self.rule, hyperparameters({**FLAGS, **self.defaults, **group}))

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._engine, self._places = Engine(self.rule, self._sharing), {}
        self._own_state()
        for group in self.param_groups:
            for name in self._options():
                if name not in group:
                    group[name] = self.rule.surface.fixed.get(name, self.defaults.get(name, FLAGS.get(name)))
            group.update(self.rule.surface.fixed)
        if self.defaults.get("fused"):
            _torch.mark_scaled(self, True)

    def __repr__(self) -> str:
        text = super().__repr__()
        lines = [f"    tier of group {i}: {choice}" for i, choice in enumerate(self.tiers())]
        return text.removesuffix(")") + "\n".join(lines) + "\n)"


def _check_flags(rule: Rule, options: dict[str, Any]) -> None:
    check_precision(rule, options)
    if options["fused"] and options["differentiable"]:
        raise RuntimeError("`fused` does not support `differentiable`; leave one of them out")
    if options["fused"] and options["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together; leave one of them out")
    if options["foreach"] and options["differentiable"]:
        raise RuntimeError("`foreach` does not support `differentiable`; leave one of them out")
