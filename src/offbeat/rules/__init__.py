"""Update rules: one file per rule, with its hyperparameters, its state and its maths, written once."""

from offbeat.rules.rule import Hyper, Matrix, Rule, Slot, Surface, Total

__all__ = ["Hyper", "Matrix", "Rule", "Slot", "Surface", "Total"]
