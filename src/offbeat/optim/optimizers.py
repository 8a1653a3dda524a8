"""The drop-in optimizers: torch.optim's arguments, keys and behaviour, and Lion."""

from __future__ import annotations

from offbeat import rules
from offbeat.optim.base import RuleOptimizer

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Lion",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
]


class SGD(RuleOptimizer, rule=rules.SGD): ...


class Adam(RuleOptimizer, rule=rules.ADAM): ...


class AdamW(Adam, rule=rules.ADAMW): ...


class Adamax(RuleOptimizer, rule=rules.ADAMAX): ...


class NAdam(RuleOptimizer, rule=rules.NADAM): ...


class RAdam(RuleOptimizer, rule=rules.RADAM): ...


class Adagrad(RuleOptimizer, rule=rules.ADAGRAD):
    def share_memory(self) -> None:
        """Move the sums of squares into shared memory, for several processes that train one model."""
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"].share_memory_()


class Adadelta(RuleOptimizer, rule=rules.ADADELTA): ...


class RMSprop(RuleOptimizer, rule=rules.RMSPROP): ...


class Rprop(RuleOptimizer, rule=rules.RPROP): ...


class ASGD(RuleOptimizer, rule=rules.ASGD): ...


class Lion(RuleOptimizer, rule=rules.LION): ...
