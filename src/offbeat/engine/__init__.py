"""Executes the update of any rule over many tensors, in the tier that fits them. No code here depends on one rule.

``step.py`` is the entry point: it builds batches (``batch.py``) from parameters, gradients and state, and runs them.
"""

from offbeat.engine.choice import Choice

__all__ = ["Choice"]
