"""Correct uses of every public name. Never executed: mypy (strict) and pyright (strict) find nothing to report."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import offbeat


def optimizers(model: nn.Module) -> None:
    assert_type(offbeat.__version__, str)
    adamw = offbeat.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    assert_type(adamw.step(), None)
    assert_type(adamw.step(lambda: torch.zeros(())), Tensor)
    assert_type(adamw.step(closure=lambda: 0.5, clip=0.1, zero_grad=True), float)
    assert_type(adamw.param_groups, list[dict[str, Any]])
    assert_type(adamw.tiers(), list[offbeat.Choice])
    assert_type(adamw.tiers()[0].tier, str)
    as_torch: torch.optim.Optimizer = adamw
    torch.optim.lr_scheduler.ExponentialLR(as_torch, 0.9)
    offbeat.Adam(model.named_parameters(), torch.tensor(0.1), decoupled_weight_decay=True)
    offbeat.SGD([{"params": list(model.parameters()), "lr": 0.1}, {"params": [torch.ones(1)]}], 0.1, 0.9)
    offbeat.SGD(model.parameters(), state_dtype=torch.bfloat16, rounding="kahan")
    offbeat.Lion([torch.ones(1)], state_dtype="8bit", rounding="stochastic")
    offbeat.Adadelta([p for p in model.parameters() if p.requires_grad], rho=0.9)
    offbeat.Adafactor(model.parameters(), eps=(None, 1e-3), d=1.0, beta2_decay=-0.8)
    offbeat.Adagrad(model.parameters(), initial_accumulator_value=0.1).share_memory()
    offbeat.Adamax(model.parameters(), capturable=True)
    offbeat.ASGD(model.parameters(), t0=1e6)
    offbeat.NAdam(model.parameters(), momentum_decay=4e-3)
    offbeat.RAdam(model.parameters(), foreach=False)
    offbeat.RMSprop(model.parameters(), centered=True)
    offbeat.Rprop(model.parameters(), etas=(0.5, 1.2))
    offbeat.SparseAdam(model.parameters(), maximize=True)
    split = offbeat.split_parameters(model, heads=["lm_head.*"], rest=())
    muon = offbeat.Muon(split.matrices, ns_steps=5, adjust_lr_fn="match_rms_adamw", ns_dtype=torch.float32)
    matrices, rest = split
    assert_type(matrices, list[Tensor])
    assert_type(split, offbeat.Split)
    chain = offbeat.Chain([muon, offbeat.AdamW(rest), torch.optim.SGD(model.parameters())])
    assert_type(chain.step(), None)
    assert_type(chain.step(lambda: 1.0), float)
    assert_type(chain.optimizers, tuple[torch.optim.Optimizer, ...])
    lbfgs = offbeat.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    assert_type(lbfgs.step(lambda: torch.zeros(())), Tensor)


def functional(model: nn.Module) -> None:
    made = offbeat.as_functional(offbeat.SGD, list(model.parameters()), lr=0.5)
    assert_type(made, offbeat.FunctionalOptimizer)
    made.step([torch.ones(1), None])
    made.step_param(torch.ones(1), None)
    offbeat.as_functional(offbeat.Adam, [{"params": [torch.ones(1)]}, {"params": [torch.ones(2)], "lr": 0.1}])
    offbeat.as_functional(torch.optim.SGD, [], 0.1, momentum=0.9)
    offbeat.as_functional(offbeat.AdamW, params=model.named_parameters(), betas=(0.9, 0.95))
    offbeat.as_functional(offbeat.Chain([offbeat.SGD(model.parameters())]))
    pure = offbeat.as_pure(offbeat.AdamW, lr=torch.tensor(0.1), weight_decay=0.0)
    assert_type(pure, offbeat.PureOptimizer)
    params = {"w": torch.ones(2)}
    state = pure.init(params)
    params, state = pure.update(params, {"w": torch.ones(2)}, state, lr=0.1)
    assert_type(params, dict[str, Tensor])
    offbeat.as_pure(torch.optim.SGD, lr=0.1)


def own_rule(rule: offbeat.Rule) -> None:
    class Mine(offbeat.RuleOptimizer, rule=rule): ...

    Mine([torch.ones(1)], lr=0.1).step()
    offbeat.Slot("momentum_buffer", init=0.0)


def errors() -> None:
    try:
        pass
    except offbeat.GradientError as error:
        as_value_error: ValueError = error
        raise as_value_error from None
    except offbeat.CaptureError as error:
        as_runtime_error: RuntimeError = error
        raise as_runtime_error from None
