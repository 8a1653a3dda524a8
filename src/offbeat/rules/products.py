"""Products of stacks of matrices, as rules ask for them. The engine has quicker ones for some devices."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Products"]


class Products:
    """Products by torch's operators. Tensors are stacks: they have three dimensions."""

    def are_quick(self, x: Tensor) -> bool:
        """Whether there is something quicker than torch's operators for stacks of this shape."""
        return False

    def symmetric(
        self,
        x: Tensor,
        out: Tensor,
        plus: Tensor | None = None,
        beta: float = 0.0,
        alpha: float = 1.0,
    ) -> None:
        r"""Write :math:`\beta P + \alpha X X^\top` to ``out``.

        Args:
            x: the stack :math:`X`; it or its transpose is contiguous.
            out: another tensor, contiguous.
            plus: the symmetric matrices :math:`P`, contiguous; by default zeros.
        """
        if plus is None:
            torch.bmm(x, x.mT, out=out).mul_(alpha)
        else:
            torch.baddbmm(plus, x, x.mT, beta=beta, alpha=alpha, out=out)

    def add_product(self, y: Tensor, left: Tensor, right: Tensor, beta: float, out: Tensor) -> None:
        r"""Write :math:`\beta Y + L R` to ``out``, another tensor. All are contiguous."""
        torch.baddbmm(y, left, right, beta=beta, out=out)

    def divide(self, x: Tensor, by: Tensor) -> None:
        """Divide each matrix of a contiguous stack by its number."""
        x.div_(by.view(-1, 1, 1))
