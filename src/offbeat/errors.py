"""Errors that mean two of torch.optim's kinds at once, so that code written for either catches them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CaptureError", "GradientError", "raise_together"]


class GradientError(RuntimeError, ValueError):
    """A gradient that does not fit its parameter."""


class CaptureError(RuntimeError, AssertionError):
    """``capturable=True`` where no graph can be captured."""


def raise_together(errors: Sequence[BaseException]) -> None:
    """Raise these errors as one, so that none is lost; return if there are none.

    Several become one error of the first one's kind. Its message holds all messages, and ``errors`` all errors.
    """
    if not errors:
        return
    if len(errors) == 1:
        raise errors[0]
    several = [error for single in errors for error in getattr(single, "errors", (single,))]
    text = "; ".join(f"({i}) {type(error).__name__}: {error}" for i, error in enumerate(several, 1))
    message = f"{len(several)} things failed: {text}"
    try:
        together = type(errors[0])(message)
    except TypeError:  # an error of somebody else's that takes other arguments
        together = RuntimeError(message)
    together.errors = tuple(several)  # type: ignore[attr-defined]
    raise together from errors[0]
