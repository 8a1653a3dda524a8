"""One step of an optimizer, done in parts: buckets during backward, and the rest in ``optimizer.step()``.

Where buckets come from (a plain module, DDP, FSDP2) is the matter of a :class:`~offbeat.overlap.source.Source`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offbeat.overlap.accumulation import Accumulation
from offbeat.overlap.clipping import Clipping
from offbeat.overlap.consumed import Placeholders, is_stale, settle
from offbeat.overlap.numbers import Changes
from offbeat.overlap.options import check_options_unchanged, options_of
from offbeat.overlap.parameters import Parameters
from offbeat.overlap.registry import overlapped
from offbeat.overlap.scaling import Scaling
from offbeat.overlap.step_hooks import StepHooks
from offbeat.overlap.unowned import Unowned

__all__ = ["Step"]


class Step:
    """What happens between one ``optimizer.step()`` and the next.

    Attributes:
        lock: held while anything here changes, because buckets may come from several threads.
        scaling: unscales gradients, if ``overlap()`` was given a scaler.
        hooks: the hooks on ``optimizer.step()``, once they are registered.
        stepped: by id, the parameters that have been updated in this step.
        stepped_elsewhere: whether other ranks may have updated parameters in this step, which this one has not used.
        in_bucket: whether a bucket is being stepped. A call of ``optimizer.step`` meanwhile is a part of that.
        in_step: whether ``optimizer.step()`` is running.
        count: the number of steps made since overlap began.
        is_finished: whether :meth:`finish` has been called since the last gradient arrived.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named: Sequence[tuple[str, Tensor]],
        accumulate: int | Callable[[], bool],
        clip: Clipping | None,
    ) -> None:
        self.optimizer = optimizer
        self.parameters = Parameters(optimizer, named)
        self.accumulation = Accumulation(accumulate)
        self.clip = clip
        self.scaling: Scaling | None = None
        self.hooks: StepHooks | None = None
        self.lock = threading.RLock()
        self.stepped: dict[int, Tensor] = {}
        self.count = 0
        self.in_bucket = self.in_step = self.is_finished = self.stepped_elsewhere = False
        self._overlapped = overlapped(optimizer)
        self._placeholders = Placeholders(self.parameters.name_of)
        self._agreeing: list[Any] = []
        self._has_gradients = False
        self._failure: str | None = None
        self._options: list[dict[str, Any]] | None = None
        self._used: list[Tensor] = []
        self._given: list[Tensor] = []
        self._changes: list[Changes] = []
        self._unowned = Unowned(named)

    @property
    def is_open(self) -> bool:
        """Whether backward has begun a step that ``optimizer.step()`` has not finished."""
        return self._has_gradients or self.accumulation.has_begun

    @property
    def was_skipped(self) -> bool:
        """Whether the scaler has skipped this step, so that the next gradient begins a new one."""
        return self.scaling is not None and self.scaling.is_over

    def refresh(self) -> bool:
        """Read the optimizer's groups again; returns whether parameters were added, removed, frozen or unfrozen."""
        if not self.parameters.refresh():
            return False
        self._placeholders.keep({*map(id, self.parameters.all), *self.stepped})
        return True

    def agree_over(self, group: Any) -> None:
        """Have all ranks of this process group skip a step if one of them does: their gradients may differ."""
        self._agreeing.append(group)

    # During backward

    @property
    def drops_gradients(self) -> bool:
        """Whether the gradients of the last step have not been cleared, so that nobody can use what is added to them.

        That is right for a loss that goes through a module whose gradients are then cleared, as a generator's does
        through the discriminator. If they are not, ``optimizer.step()`` raises.
        """
        return not self.is_open and any(is_stale(p.grad) for p in self.parameters.all)

    def gradients_arrive(self) -> None:
        """Called when a backward pass brings its first gradient."""
        if self.is_finished and self.is_open:
            self._failure = "a backward pass in a step pre-hook has added to gradients that were clipped already"
        self._has_gradients, self.is_finished = True, False
        self._unowned.before_backward()
        self.in_step = False  # if the last optimizer.step() failed
        if self.scaling is not None:
            self.scaling.take_over()
        if self.hooks is not None:
            self.hooks.keep_order()

    def begin_pass(self) -> None:
        """Count a backward pass. Raises if its gradients would be added to used ones."""
        waits = self.clip is not None and self.clip.waits
        has_stepped = bool(self.stepped) or (self.stepped_elsewhere and not waits)
        if self.accumulation.is_over and not has_stepped and self.scaling is None:
            return  # all updates wait for optimizer.step(), and so they can wait for one more pass
        try:
            self.accumulation.begin_pass()
        except RuntimeError:
            self._failure = "a backward pass that was not announced has added to gradients"
            raise
        if self.scaling is not None:
            self.scaling.take_over()

    @torch.no_grad()
    def bucket(self, params: Sequence[Tensor], grads: Sequence[Tensor], now: Sequence[int] | None = None) -> bool:
        """Take final gradients, and update their parameters unless the update must wait.

        Args:
            params: the bucket; the same on every rank.
            grads: their gradients.
            now: positions of the parameters that may be updated now (None: all); the others are left to
                ``optimizer.step()``.

        Returns:
            Whether parameters have been updated.
        """
        if self.scaling is not None:
            self.scaling.unscale(params, grads)
        if self.clip is not None:
            self.clip.measure(params, grads)
            self.clip.weigh_bucket(params, self.parameters.shards)
        if self.scaling is not None or (self.clip is not None and self.clip.waits):
            return False
        if now is not None:
            params, grads = [params[i] for i in now], [grads[i] for i in now]
        if not params:
            return False
        if self._options is None:
            self._options = options_of(self.optimizer)
            self._overlapped.begin_step()
        self.in_bucket = True
        try:
            if self.clip is None:
                self._overlapped.step_bucket(params, grads)
            else:
                self._overlapped.step_clipped(params, grads, self.clip.coefficient_of(params))
                self.clip.forget_gradients(params)
        except BaseException as error:
            self._failure = f"a bucket could not be stepped ({type(error).__name__}: {error})"
            raise
        finally:
            self.in_bucket = False
        self.stepped.update((id(p), p) for p in params)
        return True

    def bucket_failed(self, error: BaseException) -> None:
        """Called when a bucket was not reduced or not stepped: ``optimizer.step()`` must not go on."""
        self._failure = f"a bucket was not reduced or not stepped ({type(error).__name__}: {error})"

    def free(self, params: Sequence[Tensor]) -> None:
        """Replace gradients that have been used by placeholders."""
        self._placeholders.place(params)

    def gradients_moved(self) -> None:
        """Called when DDP has copied reduced gradients, as they are, from its buckets into ``.grad``."""
        for p in self.parameters.all:
            if self.clip is not None:
                self.clip.moved(p)
            if self.scaling is not None:
                self.scaling.moved(p)

    # In scaler.step() and optimizer.step()

    @torch.no_grad()
    def finish_scaling(self) -> None:
        """Unscale gradients that were in no bucket, and agree with other ranks whether to skip the step."""
        assert self.scaling is not None
        self._settle()
        left = self._left()
        self.scaling.check(left, self.parameters.name_of)
        rest = [p for p in left if not self.scaling.is_unscaled(p)]
        self.scaling.unscale(rest, [g for p in rest if (g := p.grad) is not None])
        shard_groups = (group for groups in self.parameters.shards.values() for group in groups)
        groups = list(dict.fromkeys([*self._agreeing, *shard_groups]))
        self.scaling.agree(groups, self.parameters.all[0].device)

    def check(self) -> None:
        """Raise if ``optimizer.step()`` cannot finish what backward has begun. Changes nothing."""
        if self._failure is not None:
            raise RuntimeError(
                f"optimizer.step() cannot continue: {self._failure}; call handle.reset() to drop this step"
            )
        self._placeholders.check(self.stepped)
        if self.scaling is not None and self.is_open and not self.scaling.is_finished:
            raise RuntimeError(
                "optimizer.step() was called, but overlap() was given a scaler; call scaler.step(optimizer) and "
                "scaler.update(), as without overlap"
            )
        if self.scaling is None and getattr(self.optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "a GradScaler is to unscale gradients that overlap() has already used; pass it as overlap(..., scaler=)"
            )
        if self._options is not None:
            check_options_unchanged(self._options, self.optimizer)

    @torch.no_grad()
    def finish(self) -> None:
        """Clip the gradients that are left. All gradients have arrived."""
        self._settle()
        if self.clip is not None:
            self.clip.finish(self.parameters.all, self._left(), self.parameters.shards, counts=self.is_open)
        self.is_finished = True

    @torch.no_grad()
    def norm(self) -> Tensor | None:
        """The norm of all gradients of this step so far; None if there are none."""
        assert self.clip is not None
        self._settle()
        left = self._left()
        if self.scaling is not None and not self.scaling.is_finished and left:
            raise RuntimeError(
                "the norm is known after the scaler has unscaled all gradients; call scaler.unscale_(optimizer) first"
            )
        return self.clip.norm(self.parameters.all, left, self.parameters.shards)

    def hand_over(self) -> None:
        """Let the optimizer's own step see only the gradients that are left."""
        if self.is_open:
            self._unowned.after_step(self.optimizer)
        self.count += self.is_open
        self.in_step = True
        self._used = list(self.stepped.values())
        self._given = self._left() if self.is_open and not self._always_waits else []
        self._changes = self._overlapped._take_changes()
        self.reset()

    def take_back(self) -> None:
        """After the optimizer's own step: put placeholders back until the gradients are cleared.

        Gradients that were left to that step get one too. Which ones were differs from rank to rank and from step to
        step, but all ranks must drop what is added to them before they are cleared.
        """
        self._placeholders.place(p for p in self._used if p.grad is None)
        self._placeholders.place(p for p in self._given if p.grad is not None)
        self._placeholders.begin_step()
        for change in self._changes:
            change.write()
        self._used, self._given, self._changes, self.in_step = [], [], [], False

    def reset(self, *, drop_gradients: bool = False) -> None:
        """Begin a new step. Gradients that have been used are set to None; with ``drop_gradients``, all are."""
        for p in self.parameters.all if drop_gradients else self.stepped.values():
            p.grad = None
        self.stepped = {}
        self._placeholders.begin_step()
        self._overlapped._take_changes()
        self.accumulation.begin_step()
        self._has_gradients = self.is_finished = self.stepped_elsewhere = False
        self._options, self._failure = None, None
        if self.clip is not None:
            self.clip.drop()
        if self.scaling is not None:
            self.scaling.reset()

    @property
    def _always_waits(self) -> bool:
        """Whether no gradient is ever used before ``optimizer.step()``."""
        return self.scaling is not None or (self.clip is not None and self.clip.mode == "exact")

    def _settle(self) -> None:
        settle(p for p in self.parameters.all if id(p) not in self.stepped)

    def _left(self) -> list[Tensor]:
        """Parameters with a gradient that has not been used."""
        return [p for p in self.parameters.all if id(p) not in self.stepped and p.grad is not None]
