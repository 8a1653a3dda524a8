"""The drop-in optimizers: torch.optim's arguments, keys and behaviour, and Lion.

This file is the list of rules: exports, tests and docs pages follow from it.
"""

from __future__ import annotations

from offbeat.optim.base import RuleOptimizer
from offbeat.rules.adadelta import ADADELTA
from offbeat.rules.adafactor import ADAFACTOR
from offbeat.rules.adagrad import ADAGRAD
from offbeat.rules.adam import ADAM, ADAMW
from offbeat.rules.adamax import ADAMAX
from offbeat.rules.asgd import ASGD as ASGD_RULE
from offbeat.rules.lion import LION
from offbeat.rules.muon import MUON
from offbeat.rules.nadam import NADAM
from offbeat.rules.radam import RADAM
from offbeat.rules.rmsprop import RMSPROP
from offbeat.rules.rprop import RPROP
from offbeat.rules.sgd import SGD as SGD_RULE
from offbeat.rules.sparseadam import SPARSEADAM

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lion",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SparseAdam",
]


class SGD(RuleOptimizer, rule=SGD_RULE): ...


class Adam(RuleOptimizer, rule=ADAM): ...


class AdamW(Adam, rule=ADAMW): ...


class Adamax(RuleOptimizer, rule=ADAMAX): ...


class NAdam(RuleOptimizer, rule=NADAM): ...


class RAdam(RuleOptimizer, rule=RADAM): ...


class Adagrad(RuleOptimizer, rule=ADAGRAD):
    def share_memory(self) -> None:
        """Move the sums of squares into shared memory, for several processes that train one model."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"].share_memory_()


class Adadelta(RuleOptimizer, rule=ADADELTA): ...


class RMSprop(RuleOptimizer, rule=RMSPROP): ...


class Rprop(RuleOptimizer, rule=RPROP): ...


class ASGD(RuleOptimizer, rule=ASGD_RULE): ...


class Lion(RuleOptimizer, rule=LION): ...


class SparseAdam(RuleOptimizer, rule=SPARSEADAM): ...


class Muon(RuleOptimizer, rule=MUON): ...


class Adafactor(RuleOptimizer, rule=ADAFACTOR): ...
