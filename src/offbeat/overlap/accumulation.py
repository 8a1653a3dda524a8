"""Gradient accumulation: which backward pass is the last of a step."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Accumulation"]


class Accumulation:
    """Counts the backward passes of a step.

    Args:
        accumulate: the number of backward passes that make one step; or a function that returns whether more passes
            follow the one that is running.

    Attributes:
        passes: the number of backward passes that make one step, not counting those that only add up gradients.
        blocks: the number of ``with handle.accumulate():`` blocks that the program is in.
    """

    def __init__(self, accumulate: int | Callable[[], bool]) -> None:
        self.passes = 1 if callable(accumulate) else accumulate
        self._more = accumulate if callable(accumulate) else None
        self.blocks = 0
        self._begun = 0

    @property
    def _adds_up(self) -> bool:
        """Whether the pass that is running only adds up gradients."""
        return self.blocks > 0 or (self._more is not None and bool(self._more()))

    @property
    def has_begun(self) -> bool:
        """Whether a pass has been counted in this step."""
        return self._begun > 0

    @property
    def is_over(self) -> bool:
        """Whether all passes that were announced have been counted."""
        return self._begun >= self.passes

    @property
    def is_last_pass(self) -> bool:
        """Whether the gradients of the pass that is running are final."""
        return self._begun == self.passes and not self._adds_up

    def begin_pass(self) -> None:
        """Count a pass. Raises if the gradients of the last pass have been used."""
        if self.is_over:
            raise RuntimeError(
                f"backward() ran again before optimizer.step(), but {self.passes} "
                f"pass{'es were' if self.passes > 1 else ' was'} announced and the gradients of the last one have been "
                "used. Call optimizer.step() in between, or announce more passes with overlap(..., accumulate=N), "
                "`with handle.accumulate():`, DDP's no_sync() or FSDP2's set_requires_gradient_sync(False). Put a pass "
                "whose gradients are thrown away, as those of a discriminator under the generator's loss, into "
                "`with handle.accumulate():` too"
            )
        if not self._adds_up:
            self._begun += 1

    def begin_step(self) -> None:
        """Count from 0 again."""
        self._begun = 0
