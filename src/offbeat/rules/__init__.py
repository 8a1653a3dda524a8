"""WHAT is an update? One file a rule: hyperparameters, state, and its maths, written once."""

from offbeat.rules.rule import Hyper, Matrix, Rule, Slot, Surface, Total

__all__ = ["Hyper", "Matrix", "Rule", "Slot", "Surface", "Total"]
