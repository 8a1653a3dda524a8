"""One optimizer's step, taken apart: buckets as they become ready, and the end that ``optimizer.step()`` is.

Where buckets come from (hooks on parameters, DDP, FSDP2) is not known here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.overlap.clipping import Clipping, Shards, shard_groups
from offbeat.overlap.consumed import ConsumedGradient
from offbeat.overlap.registry import overlapped
from offbeat.overlap.scaling import Scaling

__all__ = ["Core"]


class Core:
    """What happens between one ``optimizer.step()`` and the next.

    Attributes:
        lock: held by whoever changes anything here; buckets may come from several threads.
        stepped: the parameters updated since the last step, by id.
        announced: how many ``accumulate()`` blocks the program is in.
        agreeing: process groups over which ranks must agree to skip a step.
        in_bucket, in_step: whether a bucket, or the rest, is being stepped; a ``step`` that begins meanwhile (of a
            parent class, say) is a part of that.
        steps: how many steps are over.
        spoiled: why gradients are of no use any more.
        hooks: our step hooks, the one that goes first and the one that goes last.
    """

    def __init__(self, optimizer: Optimizer, order: Sequence[Tensor], accumulate: int, clip: Clipping | None) -> None:
        self.optimizer = optimizer
        self.accumulate = accumulate
        self.clip = clip
        self.scaling: Scaling | None = None
        self.lock = threading.RLock()
        self.stepped: dict[int, Tensor] = {}
        self.announced = 0
        self.agreeing: list[Any] = []
        self.shards: Shards = {}
        self.everyone: list[Tensor] = []
        self._ids: list[int] | None = None
        self.in_bucket = self.in_step = False
        self.steps = 0
        self.spoiled: str | None = None
        self.hooks: tuple[Any, Any] | None = None
        self._touched = False
        self._freed: set[int] = set()
        self._used: list[Tensor] = []
        self._rank = {id(p): i for i, p in enumerate(order)}
        self._overlapped = overlapped(optimizer)
        self._passes = 0
        self._options: list[dict[str, Any]] | None = None
        self._placeholders: dict[int, ConsumedGradient] = {}
        self.look_at_groups()

    def look_at_groups(self) -> bool:
        """Take note of the optimizer's parameters; returns whether they have changed."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        ids = list(map(id, params))
        if ids == self._ids:
            return False
        self._ids = ids
        # Norms are added up in the module's order, as clip_grad_norm_(module.parameters()) does.
        params.sort(key=lambda p: self._rank.get(id(p), len(self._rank)))
        self.everyone = params
        self.shards = {id(p): shard_groups(p) for p in params}
        here = {*map(id, params), *self.stepped}
        self._placeholders = {key: one for key, one in self._placeholders.items() if key in here}
        return True

    @property
    def waits(self) -> bool:
        """Whether no parameter may be updated before all gradients are there."""
        return self.scaling is not None or (self.clip is not None and self.clip.waits)

    @property
    def is_last_pass(self) -> bool:
        """Whether the gradients of the backward pass that runs are final."""
        return self._passes == self.accumulate and not self.announced

    @property
    def is_open(self) -> bool:
        """Whether a backward pass has begun what ``optimizer.step()`` has not finished."""
        return self._passes > 0 or self._touched

    def note_arrival(self) -> None:
        """A backward pass brings gradients."""
        self._touched = True
        self.end_step()
        if self.hooks is not None:  # others may have been registered since
            order: Any = self.optimizer._optimizer_step_pre_hooks
            order.move_to_end(self.hooks[0].id, last=False)
            order.move_to_end(self.hooks[1].id)

    def is_new(self, step: int) -> bool:
        """Whether the step a source knows of is over: finished, dropped, or skipped by the scaler."""
        if self.scaling is not None and self.scaling.is_over:
            self.reset()
        return step != self.steps

    def begin_pass(self) -> None:
        """A backward pass has begun. Raises if gradients would be added to what has been used already."""
        if self._passes >= self.accumulate:
            self.spoiled = "a backward pass was refused after it had begun to add to gradients"
            raise RuntimeError(
                f"backward() ran again before optimizer.step(): {self.accumulate} pass"
                f"{'es were' if self.accumulate > 1 else ' was'} announced and the gradients of the last have been "
                "used. Call optimizer.step() in between, or announce more passes with overlap(..., accumulate=N), "
                "`with handle.accumulate():`, DDP's no_sync() or FSDP2's set_requires_gradient_sync(False)"
            )
        if not self.announced:
            self._passes += 1

    @torch.no_grad()
    def bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor], now: Sequence[int] | None = None) -> bool:
        """Gradients that are final: look at them, and update their parameters unless that must wait.

        Args:
            params: the bucket, the same on every rank.
            grads: their gradients.
            now: positions of those that may be updated now (None: all); the others are left to ``optimizer.step()``.

        Returns:
            Whether parameters have been updated.
        """
        if self.scaling is not None:
            self.scaling.unscale(params, grads)
        if self.clip is not None:
            self.clip.measure(params, grads)
            self.clip.weigh_bucket(params, self.shards)
        if self.waits:
            return False
        if now is not None:
            params, grads = [params[i] for i in now], [grads[i] for i in now]
        if not params:
            return False
        if self._options is None:
            self._options = _options(self.optimizer)
            begin = getattr(self._overlapped, "begin_step", None)
            if begin is not None:
                begin()
        in_the_same_pass: dict[str, Tensor] = {}
        if self.clip is not None:
            takes_clip = getattr(self._overlapped, "takes_clip", None)
            if takes_clip is not None and takes_clip(params, grads):
                in_the_same_pass["clip"] = self.clip.coefficient_of(params)
            else:
                self.clip.clip_bucket(params, grads)
            self.clip.forget_gradients(params)
        self.in_bucket = True
        try:
            self._overlapped.step_bucket(params, grads, **in_the_same_pass)
        except BaseException as error:
            self.spoiled = f"a bucket could not be stepped ({type(error).__name__}: {error})"
            raise
        finally:
            self.in_bucket = False
        self.stepped.update((id(p), p) for p in params)
        return True

    def free(self, params: Sequence[Tensor]) -> None:
        """Take away gradients that have been used."""
        for p in params:
            placeholder = self._placeholders.get(id(p))
            if placeholder is None:
                placeholder = self._placeholders[id(p)] = ConsumedGradient(p)
            placeholder.renew()
            try:
                p.grad = placeholder
            except RuntimeError:  # the parameter has another shape or dtype by now
                p.grad = self._placeholders[id(p)] = ConsumedGradient(p)
        self._freed.update(map(id, params))

    def receive(self, p: Tensor) -> None:
        """A gradient was added to what stands for zeros: have it in ``.grad``."""
        if isinstance(p.grad, ConsumedGradient) and p.grad.added is not None:
            p.grad = p.grad.added

    def settle(self) -> None:
        """Give parameters that stand at zero and were not used their zeros. Raises if a used gradient would count."""
        for p in self.everyone:
            if id(p) not in self.stepped and isinstance(p.grad, ConsumedGradient):
                if not p.grad.is_zero:
                    raise RuntimeError(
                        f"the gradient of a parameter of shape {tuple(p.shape)} is from an earlier step, was used "
                        "there and freed, and would be used again; call optimizer.zero_grad() after every step"
                    )
                p.grad = torch.zeros_like(p)

    def left(self) -> list[Tensor]:
        """Parameters with a gradient that nothing has been done with."""
        return [p for p in self.everyone if id(p) not in self.stepped and p.grad is not None]

    @torch.no_grad()
    def finish_scaling(self) -> None:
        """Unscale what no bucket brought, and agree with the other ranks."""
        assert self.scaling is not None
        self.settle()
        self.scaling.check(self.left())
        rest = [p for p in self.left() if not self.scaling.is_unscaled(p)]
        self.scaling.unscale(rest, [p.grad for p in rest if p.grad is not None])
        groups = dict.fromkeys([*self.agreeing, *(g for some in self.shards.values() for g in some)])
        self.scaling.agree(list(groups), self.everyone[0].device)

    def check_step(self) -> None:
        """Raise if ``optimizer.step()`` cannot finish what backward has begun. Changes nothing."""
        if self.spoiled is not None:
            raise RuntimeError(f"optimizer.step() cannot go on: {self.spoiled}; call handle.reset() to begin anew")
        for key in self._freed:
            p = self.stepped.get(key)
            if p is not None and (p.grad is not self._placeholders[key] or self._placeholders[key].is_zero):
                raise RuntimeError(
                    f"the gradient of a parameter of shape {tuple(p.shape)} was replaced or cleared between backward() "
                    "and step(), when the parameter had been updated with it; that cannot be undone. Call "
                    "handle.reset() to go on as it is, and give gradients their final form during backward, by hooks "
                    "on tensors"
                )
        if self.scaling is not None and self.is_open and not self.scaling.is_finished:
            raise RuntimeError(
                "optimizer.step() was called, but overlap() has a scaler: call scaler.step(optimizer) and "
                "scaler.update(), as without overlap"
            )
        if self.scaling is None and getattr(self.optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "a GradScaler wants to unscale gradients that overlap() has used; give it as overlap(..., scaler=)"
            )
        if self._options is not None and _differ(self._options, now := _options(self.optimizer)):
            changed = sorted({k for a, b in zip(self._options, now, strict=False) for k in b if a.get(k) != b[k]})
            raise RuntimeError(
                f"options of the optimizer ({', '.join(changed) or 'its groups'}) changed between backward() and "
                "step(), when parameters had been updated with the old ones; change them before backward() or after "
                "step()"
            )

    @torch.no_grad()
    def finish(self) -> None:
        """Clip what is left; all gradients are there."""
        self.settle()
        if self.clip is not None:
            self.clip.finish(self.everyone, self.left(), self.shards, counts=self.is_open)

    def hand_over(self) -> None:
        """Let the optimizer's own step find only what is left."""
        self.in_step = True
        if hasattr(self._overlapped, "skip_step") and self.stepped and not self.left():
            # It need not look at every parameter to find that there is nothing to do.
            self._overlapped.skip_step(on=True)
            self.stepped = {}
        self._used = list(self.stepped.values())
        self.reset()

    def take_back(self) -> None:
        """After the optimizer's own step: used gradients must not be taken for gradients until they are cleared."""
        self.free([p for p in self._used if p.grad is None])
        self._used, self._freed = [], set()
        self.end_step()

    def end_step(self) -> None:
        """The optimizer's own step is over, finished or failed."""
        self.in_step = False
        if hasattr(self._overlapped, "skip_step"):
            self._overlapped.skip_step(on=False)

    def reset(self, *, everything: bool = False) -> None:
        """Begin anew; gradients that were used are gone for good."""
        for p in self.everyone if everything else self.stepped.values():
            p.grad = None
        self.steps += 1
        self.stepped, self._freed = {}, set()
        self._passes, self._touched = 0, False
        self._options, self.spoiled = None, None
        if self.clip is not None:
            self.clip.drop()
        if self.scaling is not None:
            self.scaling.reset()


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What the groups say now; tensors by their version, since they change in place."""
    return [
        {
            key: (id(value), value._version) if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def _differ(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    return before != now[: len(before)]
