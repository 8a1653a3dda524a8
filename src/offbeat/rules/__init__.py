"""WHAT is an update? One file a rule: hyperparameters, state, and its maths, written once."""

from offbeat.rules.adadelta import ADADELTA
from offbeat.rules.adagrad import ADAGRAD
from offbeat.rules.adam import ADAM, ADAMW
from offbeat.rules.adamax import ADAMAX
from offbeat.rules.asgd import ASGD
from offbeat.rules.lion import LION
from offbeat.rules.nadam import NADAM
from offbeat.rules.radam import RADAM
from offbeat.rules.rmsprop import RMSPROP
from offbeat.rules.rprop import RPROP
from offbeat.rules.rule import Hyper, Rule, Slot
from offbeat.rules.sgd import SGD

__all__ = [
    "ADADELTA",
    "ADAGRAD",
    "ADAM",
    "ADAMAX",
    "ADAMW",
    "ASGD",
    "LION",
    "NADAM",
    "RADAM",
    "RMSPROP",
    "RPROP",
    "RULES",
    "SGD",
    "Hyper",
    "Rule",
    "Slot",
]

#: Every rule of the library.
RULES: tuple[Rule, ...] = (SGD, ADAM, ADAMW, ADAMAX, NADAM, RADAM, ADAGRAD, ADADELTA, RMSPROP, RPROP, ASGD, LION)
