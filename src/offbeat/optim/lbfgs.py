r"""L-BFGS: a quasi-Newton method that keeps the last steps and the changes of the gradient over them.

With :math:`s_i` the last steps, :math:`y_i` the changes of the gradient over them and
:math:`\rho_i = 1 / y_i^\top s_i`, two loops over the history apply an approximation :math:`H` of the inverse Hessian
to the gradient:

.. math::
    q &\leftarrow -g; \qquad
        \text{newest to oldest: } \alpha_i = \rho_i \, s_i^\top q, \quad q \leftarrow q - \alpha_i y_i \\
    d &\leftarrow \frac{y^\top s}{y^\top y} \, q; \qquad
        \text{oldest to newest: } d \leftarrow d + (\alpha_i - \rho_i \, y_i^\top d) \, s_i \\
    \theta &\leftarrow \theta + t \, d

The step :math:`t` is the learning rate or, with ``line_search_fn="strong_wolfe"``, the result of a line search.

Reference: Nocedal and Wright, Numerical Optimization, 2006, chapter 7.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from offbeat._types import Params
from offbeat.engine.tensors import is_dtensor
from offbeat.optim.checkpoint import check_state_dict, numbered
from offbeat.optim.line_search import Point, strong_wolfe
from offbeat.optim.vectors import Layout, Vector
from offbeat.rules.checks import in_range, require_number

__all__ = ["LBFGS"]

Loss = TypeVar("Loss")

_FLAT = ("d", "prev_flat_grad")
_HISTORY = ("old_dirs", "old_stps")


class LBFGS(Optimizer):
    """L-BFGS, a drop-in for :class:`torch.optim.LBFGS`: same arguments, trial points, state keys and checkpoints.

    ``step(closure)`` makes up to ``max_iter`` iterations, and evaluates the closure at least once in each. The history
    takes ``2 * history_size`` times the memory of the parameters; gradients are copied only with ``maximize``.

    Parameters may be DTensors (FSDP2 or tensor parallel). Inner products are then summed over the shards and the
    closure's loss is averaged over the ranks of the mesh, so all ranks try the same points.

    Args:
        params: parameters; one group only.
        lr: the step length, or the first trial of the line search (default: 1).
        max_iter: the largest number of iterations in one ``step`` (default: 20).
        max_eval: the largest number of evaluations in one ``step`` (default: ``max_iter * 1.25``).
        tolerance_grad: the step ends if no element of the gradient is larger (default: 1e-7).
        tolerance_change: the step ends if the loss or all parameters change less (default: 1e-9).
        history_size: the number of steps to keep (default: 100).
        line_search_fn: ``"strong_wolfe"``, or None for steps of fixed length (default: None).
        maximize: maximize the closure's result instead of minimizing it (default: False). As in torch 2.15; older
            releases of torch load such a checkpoint and minimize.

    Example:
        >>> import torch, offbeat
        >>> x = torch.zeros(2, requires_grad=True)
        >>> optimizer = offbeat.LBFGS([x], line_search_fn="strong_wolfe")
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = ((x - torch.tensor([1.0, 2.0])) ** 2).sum()
        ...     loss.backward()
        ...     return loss
        >>> loss = optimizer.step(closure)
        >>> x.detach().round(decimals=4)
        tensor([1., 2.])

    Limits: all parameters must be on one device. If several processes each hold all parameters (DDP), the closure must
    return the same loss on each. If the closure raises, the parameters are those at the start of the iteration. The
    state of DTensors belongs to this rank's shards: load it with the same sharding.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1,
        max_iter: int = 20,
        max_eval: int | None = None,
        tolerance_grad: float = 1e-7,
        tolerance_change: float = 1e-9,
        history_size: int = 100,
        line_search_fn: Literal["strong_wolfe"] | None = None,
        *,
        maximize: bool = False,
    ) -> None:
        in_range("learning rate")(lr)
        for name, value in (("max_iter", max_iter), ("history_size", history_size)):
            require_number(name, value)
        if line_search_fn not in (None, "strong_wolfe"):
            raise RuntimeError(f"only 'strong_wolfe' is supported as line_search_fn, but got {line_search_fn!r}")
        defaults = {
            "lr": lr,
            "max_iter": max_iter,
            "max_eval": max_iter * 5 // 4 if max_eval is None else max_eval,
            "tolerance_grad": tolerance_grad,
            "tolerance_change": tolerance_change,
            "history_size": history_size,
            "line_search_fn": line_search_fn,
            "maximize": maximize,
        }
        super().__init__(params, defaults)  # type: ignore[arg-type]  # Params is a little wider than torch's ParamsT

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise if there already is a group: L-BFGS updates all parameters together, with one set of options."""
        super().add_param_group(param_group)
        if len(self.param_groups) > 1:
            self.param_groups.pop()
            raise ValueError(
                "LBFGS doesn't support per-parameter options (parameter groups); pass all parameters in one group"
            )

    def init_state(self) -> None:
        """Does nothing: the history begins with the first step."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Loss]) -> Loss:  # type: ignore[override]
        """Make up to ``max_iter`` iterations.

        Args:
            closure: clears the gradients, evaluates the model, calls ``backward()`` and returns the loss. It is called
                several times, with gradients enabled.

        Returns:
            The loss of the first evaluation.
        """
        if not callable(closure):
            raise TypeError(
                f"LBFGS evaluates the model several times in a step, so step() needs a closure, but got {closure!r}; "
                "pass a function that clears the gradients, calls backward() and returns the loss"
            )
        if not self.param_groups[0]["params"]:
            with torch.enable_grad():
                return closure()
        loss: Loss = _Run(self, closure).step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of :class:`torch.optim.LBFGS`."""
        check_state_dict(state_dict, type(self).__name__)
        numel, state_dict = Layout(self.param_groups[0]["params"]).numel, numbered(state_dict)
        for entry in state_dict["state"].values():
            vectors = [entry[key] for key in _FLAT if key in entry]
            vectors += [v for key in _HISTORY for v in entry.get(key) or ()]
            odd = next((v for v in vectors if isinstance(v, Tensor) and v.numel() != numel), None)
            if odd is not None:
                raise ValueError(
                    f"the loaded state dict has a direction of {odd.numel()} numbers, but the parameters have {numel} "
                    "here; was it saved from another model, or sharded otherwise?"
                )
        super().load_state_dict(state_dict)


class _Run:
    """One call of :meth:`LBFGS.step`."""

    def __init__(self, optimizer: LBFGS, closure: Callable[[], Any]) -> None:
        self.group = optimizer.param_groups[0]
        self.closure = torch.enable_grad()(closure)
        self.maximize = bool(self.group.get("maximize", False))  # checkpoints of older releases do not have it
        self.layout = Layout(self.group["params"])
        self.state = optimizer.state[self.group["params"][0]]
        self.evaluations = 0
        wrap = self.layout.vector
        self.d, self.previous = (wrap(found) if (found := self.state.get(key)) is not None else None for key in _FLAT)
        self.y, self.s = ([wrap(v) for v in self.state.get(key) or ()] for key in _HISTORY)
        self.rho = [float(r) for r in self.state.get("ro") or ()]
        self.scale = float(self.state.get("H_diag", 1.0))
        self.t = float(self.state.get("t", 0.0))

    def step(self) -> Any:
        group, state = self.group, self.state
        result, loss = self._evaluate()
        state["func_evals"] = state.get("func_evals", 0) + 1
        state.setdefault("n_iter", 0)
        g = self._gradients()
        if self.layout.largest(g) <= group["tolerance_grad"]:
            return result
        before = loss
        for n in range(1, group["max_iter"] + 1):
            before = loss
            state["n_iter"] += 1
            first = state["n_iter"] == 1
            d = self._direction(g, first)
            self.previous = self.layout.copy(g, self.previous)
            lr = float(group["lr"])
            self.t = min(1.0, 1.0 / self.layout.norm1(g)) * lr if first else lr
            slope = self.layout.dot(self.previous.parts, d.parts)
            if slope > -group["tolerance_change"]:
                break
            made = self.evaluations
            loss, g = self._move(d, loss, slope, last=n == group["max_iter"])
            state["func_evals"] += self.evaluations - made
            if n == group["max_iter"] or self.evaluations >= group["max_eval"]:
                break
            if self.layout.largest(g) <= group["tolerance_grad"]:
                break
            small = self.layout.largest(d.parts) * abs(self.t) <= group["tolerance_change"]
            if small or abs(loss - before) < group["tolerance_change"]:
                break
        self._store(before)
        return result

    def _evaluate(self) -> tuple[Any, float]:
        result = self.closure()
        self.evaluations += 1
        return result, self.layout.mean(-float(result) if self.maximize else float(result))

    def _gradients(self) -> list[Tensor]:
        """The gradients of what is minimized."""
        found = self.layout.gradients()
        return [-g for g in found] if self.maximize else found

    def _direction(self, g: list[Tensor], first: bool) -> Vector:
        """The direction from the gradient ``g`` and the history, which grows by the last step."""
        layout = self.layout
        if first:
            self.y, self.s, self.rho, self.scale = [], [], [], 1.0
        elif self.previous is not None and self.d is not None:
            self._remember(g)
        q = self.d if self.d is not None and not first else layout.vector()
        for mine, one in zip(q.parts, g, strict=True):
            torch.neg(one, out=mine) if one.dtype == mine.dtype else mine.copy_(one).neg_()
        alphas = []
        for y, s, rho in zip(reversed(self.y), reversed(self.s), reversed(self.rho), strict=True):
            alphas.append(layout.dot(s.parts, q.parts) * rho)
            q.flat.add_(y.flat, alpha=-alphas[-1])
        if not first:
            q.flat.mul_(self.scale)
        for y, s, rho, alpha in zip(self.y, self.s, self.rho, reversed(alphas), strict=True):
            q.flat.add_(s.flat, alpha=alpha - layout.dot(y.parts, q.parts) * rho)
        self.d = q
        return q

    def _remember(self, g: list[Tensor]) -> None:
        assert self.previous is not None
        assert self.d is not None
        layout, most = self.layout, self.group["history_size"]
        y, s = layout.vector(), layout.vector()
        for mine, one, old in zip(y.parts, g, self.previous.parts, strict=True):
            mine.copy_(one).sub_(old)
        torch.mul(self.d.flat, self.t, out=s.flat)
        ys = layout.dot(y.parts, s.parts)
        if ys > 1e-10:
            if len(self.y) == most:
                self.y, self.s, self.rho = self.y[1:], self.s[1:], self.rho[1:]
            self.y, self.s, self.rho = [*self.y, y], [*self.s, s], [*self.rho, 1.0 / ys]
            self.scale = ys / layout.dot(y.parts, y.parts)

    def _move(self, d: Vector, loss: float, slope: float, *, last: bool) -> tuple[float, list[Tensor]]:
        """Move the parameters along ``d``; returns the loss and the gradient there."""
        if self.group["line_search_fn"] is None:
            self._add(d, self.t)
            if last:  # as torch.optim: with random batches, another evaluation would not help
                return loss, []
            _, loss = self._evaluate()
            return loss, self._gradients()
        assert self.previous is not None
        start = [t.clone() for t in self.layout.locals]

        def at(t: float) -> Point:
            try:
                self._add(d, t)
                _, value = self._evaluate()
                g = self.layout.copy(self._gradients())
            finally:
                for mine, old in zip(self.layout.locals, start, strict=True):
                    mine.copy_(old)
            return Point(t, value, self.layout.dot(g.parts, d.parts), g)

        point, _ = strong_wolfe(
            Point(0.0, loss, slope, self.previous), self.t, at,
            length=self.layout.largest(d.parts), tolerance=1e-9, most=self.group["max_eval"] - self.evaluations,
        )  # fmt: skip
        self.t = point.t
        self._add(d, point.t)
        found: list[Tensor] = point.kept.parts
        # The gradient of the start is a buffer, which the next iteration overwrites.
        return point.value, [t.clone() for t in found] if point.kept is self.previous else found

    def _add(self, d: Vector, t: float) -> None:
        for mine, one in zip(self.layout.locals, d.parts, strict=True):
            mine.add_(one, alpha=t)
        increment_version([p for p in self.layout.params if is_dtensor(p)])

    def _store(self, loss: float) -> None:
        assert self.d is not None
        assert self.previous is not None
        self.state.update(
            d=self.d.flat,
            t=self.t,
            old_dirs=[v.flat for v in self.y],
            old_stps=[v.flat for v in self.s],
            ro=self.rho,
            H_diag=self.scale,
            prev_flat_grad=self.previous.flat,
            prev_loss=loss,
        )
