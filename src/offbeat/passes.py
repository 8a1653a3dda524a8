"""Backward passes: which one is running, and whether it runs inside another.

Reentrant checkpointing runs a backward pass inside a backward pass. A parameter may then receive its gradient in
several parts, and the recomputation reads parameters again, so nothing may be updated before the outermost pass ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from offbeat._torch import RUN_BACKWARD, current_pass, pytree, queue_callback

__all__ = ["current_pass", "has_reentrant_checkpoint", "is_nested", "queue_callback"]


def is_nested() -> bool:
    """Whether the pass that runs in this thread was started by a node or a hook of another pass."""
    runs, frame = 0, sys._getframe(1)
    while frame is not None:
        runs += frame.f_code is RUN_BACKWARD
        frame = frame.f_back  # type: ignore[assignment]
    # A thread of autograd's own does not have the call that began the outermost pass on its stack.
    return runs > (0 if isinstance(threading.current_thread(), threading._DummyThread) else 1)


def has_reentrant_checkpoint(output: Any) -> bool:
    """Whether the graph of a module's output contains a ``checkpoint(use_reentrant=True)``."""
    found: Iterable[Any] = (t.grad_fn for t in pytree.tree_leaves(output) if isinstance(t, Tensor))
    waiting = [node for node in found if node is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name() == "CheckpointFunctionBackward":
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return False
