"""HOW is an update executed? Any rule over many tensors: loop, foreach, fused. Knows no rule by name."""

from offbeat.tiers.choice import Choice, choose

__all__ = ["Choice", "choose"]
