"""Gradient accumulation: which backward pass is the last of a step."""

from __future__ import annotations

__all__ = ["Accumulation"]


class Accumulation:
    """Counts the backward passes of a step.

    Attributes:
        passes: the number of backward passes that make one step.
        blocks: the number of ``with handle.accumulate():`` blocks that the program is in.
    """

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.blocks = 0
        self._begun = 0

    @property
    def has_begun(self) -> bool:
        """Whether a pass has been counted in this step."""
        return self._begun > 0

    @property
    def is_last_pass(self) -> bool:
        """Whether the gradients of the pass that is running are final."""
        return self._begun == self.passes and not self.blocks

    def begin_pass(self) -> None:
        """Count a pass. Raises if the gradients of the last pass have been used."""
        if self._begun >= self.passes:
            raise RuntimeError(
                f"backward() ran again before optimizer.step(), but {self.passes} "
                f"pass{'es were' if self.passes > 1 else ' was'} announced and the gradients of the last one have been "
                "used. Call optimizer.step() in between, or announce more passes with overlap(..., accumulate=N), "
                "`with handle.accumulate():`, DDP's no_sync() or FSDP2's set_requires_gradient_sync(False)"
            )
        if not self.blocks:
            self._begun += 1

    def begin_step(self) -> None:
        """Count from 0 again."""
        self._begun = 0
