"""Errors that mean two of torch.optim's kinds at once, so that code written for either catches them."""

from __future__ import annotations

__all__ = ["CaptureError", "GradientError"]


class GradientError(RuntimeError, ValueError):
    """A gradient that does not fit its parameter."""


class CaptureError(RuntimeError, AssertionError):
    """``capturable=True`` where no graph can be captured."""
