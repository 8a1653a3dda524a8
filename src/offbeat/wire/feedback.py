r"""Error feedback: what a codec lost is added to what is encoded next.

$$y_t = x_t + \beta e_{t-1}, \qquad c_t = \mathrm{encode}(y_t), \qquad e_t = y_t - \mathrm{decode}(c_t)$$

With $\beta = 1$ everything arrives in the end: $\sum_t \mathrm{decode}(c_t) = \sum_t x_t - e_T$. SparseLoCo decays the
residual $e$ with $\beta = 0.95$.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offbeat.wire.base import Codec

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """Error feedback over any codec. Holds no residual: the caller does, and decides when a new one is kept.

    An exchange can fail after encoding. The new residual therefore goes to a second buffer, ``pending``, and the caller
    makes it the residual once all ranks have taken part::

        y = feedback.correct(x, residual, out=pending)
        total = mean.reduce(y, peers, residual=y)    # y now holds the new residual
        residual, pending = pending, residual        # after the vote

    Args:
        decay: the part of a residual that is added to the next values, from above 0 to 1.
    """

    def __init__(self, decay: float = 1.0) -> None:
        if not 0 < decay <= 1:
            raise ValueError(f"the decay {decay} of error feedback must be above 0 and at most 1")
        self.decay = float(decay)

    def correct(self, x: Tensor, residual: Tensor | None, out: Tensor | None = None) -> Tensor:
        """``x + decay * residual``.

        Args:
            residual: None is the same as zeros.
            out: where to put it; may be ``x``. A new tensor by default.
        """
        out = torch.empty_like(x) if out is None else out
        return out.copy_(x) if residual is None else torch.add(x, residual, alpha=self.decay, out=out)

    def encode(self, codec: Codec, x: Tensor, residual: Tensor | None, data: Tensor, pending: Tensor) -> None:
        """Encode ``x`` with what was lost before into ``data``, and what is lost now into ``pending``.

        ``residual`` is only read, unless it is ``pending`` too. If this raises :class:`~offbeat.wire.NotFinite`,
        ``pending`` has no meaning.
        """
        codec.encode(self.correct(x, residual, out=pending), data, pending)

    def __repr__(self) -> str:
        return f"ErrorFeedback(decay={self.decay:g})"
