"""HOW is an update executed? Any rule, over many tensors, in the tier that fits them. Knows no rule by name.

``step.py`` is the way in: it builds batches (``batch.py``) from parameters, gradients and state, and runs them.
"""

from offbeat.engine.choice import Choice

__all__ = ["Choice"]
