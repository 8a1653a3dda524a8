"""Backward passes: which one is running, and whether it runs inside another.

Reentrant checkpointing runs a backward inside a backward. A parameter may then receive its gradient in several
portions, and parameters are read again by the recomputation, so nothing may be updated before the outermost
pass is over.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["current_pass", "has_reentrant_checkpoint", "is_nested", "queue_callback"]

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__

#: The number of the backward pass that runs in this thread, -1 outside of one.
current_pass = torch._C._current_graph_task_id


def queue_callback(function: Any) -> None:
    """Have a function called when the pass that runs in this thread is over."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_nested() -> bool:
    """Whether the pass that runs in this thread was started by a node or a hook of another pass."""
    runs, frame = 0, sys._getframe(1)
    while frame is not None:
        runs += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back  # type: ignore[assignment]
    # A thread of autograd's own does not have the call that began the outermost pass on its stack.
    return runs > (0 if isinstance(threading.current_thread(), threading._DummyThread) else 1)


def has_reentrant_checkpoint(output: Any) -> bool:
    """Whether the graph behind a module's output will run a backward inside backward."""
    found: Iterable[Any] = (t.grad_fn for t in tree_leaves(output) if isinstance(t, Tensor))
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
