"""The optimizer classes: torch.optim.Optimizer on the outside, one rule on the inside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from offbeat.optim.checkpoint import loaded, packed
from offbeat.optim.extras import NOTHING, Extras, by_hand, fitting
from offbeat.optim.gradients import local
from offbeat.optim.native import NativePlan, NativeUpdate
from offbeat.optim.plan import Plan, PlannedUpdate, make_plan
from offbeat.optim.precision import check_precision, formats, kept_slots
from offbeat.optim.settings import SettingsCache, hyperparameters
from offbeat.optim.signature import describe, signature
from offbeat.optim.state import State, mark_unbegun, new_state
from offbeat.optim.update import Update, prepare, program_for
from offbeat.rules.rule import FLAGS, PRECISION, Rule, Slot
from offbeat.tiers.choice import Choice, choose, is_capturing

__all__ = ["RuleOptimizer"]

#: A group, parameters of it, and their gradients; None reads them from ``.grad``.
Work = tuple[dict[str, Any], Sequence[Tensor], Sequence[Tensor | None] | None]

#: Tables for parts of groups, by the parameters' ids.
PartPlans = dict[tuple[int, ...], Plan | NativePlan]


class RuleOptimizer(Optimizer):
    """A drop-in for the torch.optim class of the same name, made from an update rule.

    Subclass it with ``class MyRule(RuleOptimizer, rule=MY_RULE)``; signature, checks, state and all tiers come
    from the rule.
    """

    rule: ClassVar[Rule]
    #: Whether the next step has nothing to do, because every gradient has been used already.
    _nothing_left = False

    def __init_subclass__(cls, rule: Rule | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if rule is not None:
            cls.rule = rule
            cls.__signature__ = signature(rule)  # type: ignore[attr-defined]
            cls.__doc__ = describe(rule, cls)

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = self.__signature__.bind(params, *args, **kwargs)  # type: ignore[attr-defined]
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}(): {error}; it takes {self.__signature__}") from None  # type: ignore[attr-defined]
        bound.apply_defaults()
        options = {name: value for name, value in bound.arguments.items() if name != "params"}
        defaults = {**{name: FLAGS[name] for name in FLAGS}, **options, **self.rule.fixed}
        self.rule.validate(defaults)
        _check_flags(self.rule, defaults)
        # "capturable" stays out of the groups where torch.optim has no such option.
        used = {name for name in PRECISION if defaults.get(name) is not None} | self._options()
        super().__init__(params, {name: defaults[name] for name in defaults if name in used})
        self._plans: dict[int, Plan | NativePlan] = {}
        self._settings = SettingsCache(self.rule)
        self._own_state()
        if defaults["fused"]:
            self._step_supports_amp_scaling = True
        if self.rule.eager_state:
            self.init_state()

    @classmethod
    def _options(cls) -> set[str]:
        return {hyper.name for hyper in cls.rule.hyper} | set(cls.rule.flags) | set(cls.rule.fixed)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, checked like the constructor's arguments; see :class:`torch.optim.Optimizer`."""
        if isinstance(param_group, dict):
            options = {**FLAGS, **self.defaults, **{k: v for k, v in param_group.items() if k != "params"}}
            self.rule.validate(options)
            _check_flags(self.rule, options)
        super().add_param_group(param_group)
        if hasattr(self, "_plans") and self.rule.eager_state:
            self.init_state()

    def step(
        self, closure: Callable[[], Any] | None = None, *, clip: Tensor | float | None = None, zero_grad: bool = False
    ) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: re-evaluates the model and returns the loss, with gradients enabled.
            clip: a number gradients are multiplied by for this update, such as the coefficient of
                :func:`torch.nn.utils.clip_grad_norm_`; the product is rounded as a gradient is. The gradients
                themselves stay as they are. The fused tier on a GPU does it in the same pass over memory and does not
                wait for a tensor there; others make a copy of the gradients.
            zero_grad: whether gradients are zero afterwards, also of a step that a GradScaler has skipped; in the same
                pass on a GPU.

        Returns:
            What the closure returned, or None.
        """
        if torch.compiler.is_compiling():
            return self._step_untraced(closure, clip, zero_grad)
        return self._step(closure, clip, zero_grad)

    # A step is a few calls into kernels that are compiled already: tracing it would bring nothing.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _step_untraced(self, closure: Callable[[], Any] | None, clip: Tensor | float | None, zero_grad: bool) -> Any:
        return self._step(closure, clip, zero_grad)

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """As torch's, which calls hooks and marks the step for a profiler; it is left out where there is neither."""
        watched = Optimizer.profile_hook_step(func)
        is_compiling, is_profiled = torch.compiler.is_compiling, torch._C._autograd._profiler_enabled

        @functools.wraps(func)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if (
                self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or _global_optimizer_pre_hooks
                or _global_optimizer_post_hooks
                or is_profiled()
                or is_compiling()
            ):
                return watched(self, *args, **kwargs)
            return func(self, *args, **kwargs)

        return step

    def _step(self, closure: Callable[[], Any] | None, clip: Tensor | float | None, zero_grad: bool) -> Any:
        self._accelerator_graph_capture_health_check()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._nothing_left:
            self._nothing_left = False
        else:
            work = [(group, group["params"], None) for group in self.param_groups]
            self._apply(work, extras=self._extras(clip, zero_grad))
        return loss

    def _extras(self, clip: Tensor | float | None, zero_grad: bool) -> Extras:
        """What to do with gradients, with what a GradScaler says where ``fused=True`` lets it."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if clip is None and scale is None and found_inf is None and not zero_grad:
            return NOTHING
        if found_inf is not None and not isinstance(found_inf, Tensor):  # a GradScaler's sum over no gradients
            found_inf = torch.tensor(float(found_inf))
        if clip is not None and not isinstance(clip, Tensor):
            clip = torch.tensor(clip, dtype=torch.float64)
        if clip is not None and clip.numel() != 1:
            raise ValueError(f"clip must be one number, but it is of shape {tuple(clip.shape)}")
        return Extras(scale, found_inf, clip, zero_grad)

    def _accelerator_graph_capture_health_check(self) -> None:
        if "capturable" not in self.defaults:
            return
        # torch's check takes its time to find out that there is nothing to find.
        if any(group["capturable"] for group in self.param_groups) or is_capturing() or _uses_xpu():
            super()._accelerator_graph_capture_health_check()

    def _apply(self, work: Sequence[Work], part_plans: PartPlans | None = None, extras: Extras | None = None) -> None:
        """Update these parameters of these groups: all of ``work`` is checked before any of it is done.

        Whoever updates the same parts of groups again and again owns a dictionary ``part_plans`` for their tables.
        """
        extras = self._extras(None, False) if extras is None else extras
        if extras is NOTHING and self._apply_by_plans(work, part_plans):
            return
        with torch.set_grad_enabled(bool(self.defaults["differentiable"])):
            self._own_state()
            again: list[Work] = []
            updates = [self._prepare(*item, again, part_plans) for item in work]
            at_hand = fitting(extras, work) if extras else NOTHING
            if extras and (again or at_hand is None or not all(update.takes(at_hand) for update in updates)):
                with by_hand(extras, work) as changed:
                    if changed is not None:
                        self._apply(changed, part_plans, NOTHING)
                return
            for update in updates:
                update.commit()
            for update in updates:
                update.run(at_hand or NOTHING)
            if at_hand and at_hand.changes_gradients:
                given = [[p.grad for p in params] if grads is None else grads for _, params, grads in work]
                increment_version([g for some in given for g in some if g is not None])
            for (group, params, _), update in zip(work, updates, strict=True):
                if isinstance(update, Update):
                    self._remember(group, params, update, part_plans)
            for item in again:
                update = self._prepare(*item, [])
                update.commit()
                update.run()

    def _apply_by_plans(self, work: Sequence[Work], part_plans: PartPlans | None) -> bool:
        """The short way, where nothing has changed since the step before; False if something has."""
        state = self._own_state()
        updates = []
        for group, params, grads in work:
            plan = self._plan_of(group, params, part_plans)
            update = plan.prepare(self._settings.of(group), params, grads, state) if plan is not None else None
            if update is None:
                return False
            updates.append(update)
        for update in updates:
            update.run(NOTHING)
        return True

    def _plan_of(
        self, group: dict[str, Any], params: Sequence[Tensor], part_plans: PartPlans | None
    ) -> Plan | NativePlan | None:
        if params is group["params"]:
            return self._plans.get(id(group))
        return part_plans.get(tuple(map(id, params))) if part_plans else None

    def _prepare(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None] | None,
        again: list[Work],
        part_plans: PartPlans | None = None,
    ) -> Update | PlannedUpdate | NativeUpdate:
        """Check the work and get it ready; what must wait until it is done goes to ``again``."""
        settings = self._settings.of(group)
        plan = self._plan_of(group, params, part_plans)
        planned = plan.prepare(settings, params, grads, self._own_state()) if plan is not None else None
        if planned is not None:
            return planned
        grads = [p.grad for p in params] if grads is None else grads
        if len(set(map(id, params))) < len(params):
            layers = _layers(params, grads)
            params, grads = layers[0]
            again.extend((group, *layer) for layer in layers[1:])
        return prepare(self.rule, settings.h, params, grads, self._own_state())

    def _own_state(self) -> State:
        """``self.state``, which the user may have replaced by any dictionary, as one that counts its changes."""
        if type(self.state) is not State:
            self.state = State(self.state.items())
        return self.state

    def _remember(
        self,
        group: dict[str, Any],
        params: Sequence[Tensor],
        update: Update,
        part_plans: PartPlans | None,
    ) -> None:
        """Keep tables for the next step of this group or part, and none for groups that are gone."""
        if params is not group["params"]:
            if part_plans is not None:
                key = tuple(map(id, params))
                plan = self._make_plan(params, update, part_plans.pop(key, None))
                if plan is not None:
                    part_plans[key] = plan
            return
        here = {id(one) for one in self.param_groups}
        self._plans = {key: plan for key, plan in self._plans.items() if key in here}
        plan = self._make_plan(params, update, self._plans.pop(id(group), None))
        if plan is not None:
            self._plans[id(group)] = plan

    def _make_plan(
        self, params: Sequence[Tensor], update: Update, before: Plan | NativePlan | None
    ) -> Plan | NativePlan | None:
        try:
            return make_plan(self.rule, params, self._own_state(), update, before)
        except RuntimeError:  # no memory for tables, say: the step is done, and the next goes without
            return None

    def init_state(self) -> None:
        """Allocate all state now, for parameters with and without a gradient, changing nothing else.

        A step after ``init_state`` gives the same bits as without it. Call it before saving or loading with
        :mod:`torch.distributed.checkpoint`, or to see at once whether the state fits into memory.
        """
        state = self._own_state()
        with torch.no_grad():
            for group in self.param_groups:
                h = hyperparameters({**FLAGS, **group})
                slots = kept_slots(self.rule, h)
                counts = any(slot.key == "step" for slot in slots)
                _, created = new_state(slots, h, group["params"], state)
                for p, key, value in created:
                    if self.rule.first_step_differs(h) and not counts:
                        mark_unbegun(value)
                    state[p][key] = value

    def tiers(self) -> list[Choice]:
        """For each group, the tier its next step runs in and why.

        The choice is made per parameter; a group whose parameters differ reports them joined by ``+``.
        """
        found = []
        for group in self.param_groups:
            h = hyperparameters({**FLAGS, **group})
            kept = kept_slots(self.rule, h)
            slots = {slot.key: slot for slot in kept if not slot.scalar and slot.form != "scales"}
            form = formats(h, kept)
            program = None if h.differentiable else program_for(self.rule, h)
            choices: dict[Choice, None] = {}
            for p in group["params"]:
                like = [local(p).detach()]
                like = [torch.view_as_real(t) if t.is_complex() else t for t in like]
                state = self.state.get(p) or {}
                for key, slot in slots.items():
                    if isinstance(state.get(key), Tensor):
                        like.append(local(state[key]))
                    else:
                        like.append(like[0] if slot.dtype is None else torch.empty_like(like[0], dtype=slot.dtype))
                like.insert(1, like[0])
                like = [torch.view_as_real(t) if t.is_complex() else t for t in like]
                try:
                    choices[choose(self.rule, h, program, like, form)] = None
                except RuntimeError as error:
                    choices[Choice("none", str(error))] = None
            merged = list(choices) or [Choice("none", "the group has no parameters")]
            if len(merged) > 1:
                tiers = list(dict.fromkeys(choice.tier for choice in merged))
                found.append(Choice("+".join(tiers), "; ".join(map(str, merged))))
            else:
                found.append(merged[0])
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly, in torch.optim's format; torch.optim loads it."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        result = packed(self)
        for post in self._optimizer_state_dict_post_hooks.values():
            changed = post(self, result)
            result = result if changed is None else changed
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state dict of this class or of torch.optim's class of the same name.

        State keeps the dtype it was saved in. Nothing is shared with ``state_dict``. Where both sides name their
        parameters and each group has the same names, state is matched by name, else by position. Options a checkpoint
        does not know are taken from this optimizer.
        """
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        state, groups = loaded(self, state_dict, self._slots)
        self.__setstate__({"state": state, "param_groups": groups})
        for post in self._optimizer_load_state_dict_post_hooks.values():
            post(self)

    def _slots(self, group: dict[str, Any]) -> tuple[Slot, ...]:
        return kept_slots(self.rule, hyperparameters({**FLAGS, **self.defaults, **group}))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans = {}
        self._settings = SettingsCache(self.rule)
        self._own_state()
        for group in self.param_groups:
            for name in self._options():
                if name not in group:
                    group[name] = self.rule.fixed.get(name, self.defaults.get(name, FLAGS.get(name)))
            group.update(self.rule.fixed)
        if self.defaults.get("fused"):
            self._step_supports_amp_scaling = True

    def __repr__(self) -> str:
        text = super().__repr__()
        lines = [f"    tier of group {i}: {choice}" for i, choice in enumerate(self.tiers())]
        return text.removesuffix(")") + "\n".join(lines) + "\n)"


def _uses_xpu() -> bool:
    return bool(torch.xpu.is_initialized())  # type: ignore[no-untyped-call]


def _layers(params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[tuple[list[Tensor], list[Tensor | None]]]:
    """Lists without repeats: torch.optim updates a parameter that stands in a group twice, two times in a row."""
    layers: list[tuple[list[Tensor], list[Tensor | None]]] = []
    seen: dict[int, int] = {}
    for p, g in zip(params, grads, strict=True):
        depth = seen[id(p)] = seen.get(id(p), -1) + 1
        if depth == len(layers):
            layers.append(([], []))
        layers[depth][0].append(p)
        layers[depth][1].append(g)
    return layers


def _check_flags(rule: Rule, options: dict[str, Any]) -> None:
    check_precision(rule, options)
    if options["fused"] and options["differentiable"]:
        raise RuntimeError("`fused` does not support `differentiable`; leave one of them out")
    if options["fused"] and options["foreach"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together; leave one of them out")
    if options["foreach"] and options["differentiable"]:
        raise RuntimeError("`foreach` does not support `differentiable`; leave one of them out")
