"""torch's own table of optimizer inputs, error inputs included, run through our classes."""

from __future__ import annotations

import warnings
from copy import deepcopy

import pytest
import torch

import offbeat

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

OURS = [info for info in optim_db if hasattr(offbeat, info.optim_cls.__name__)]
INPUTS = [
    pytest.param(info, given, id=f"{info.name}-{given.desc}")
    for info in OURS
    for given in info.optim_inputs_func(device="cpu")
]
ERRORS = [
    pytest.param(info, given, id=f"{info.name}-{given.optimizer_error_input.desc}")
    for info in OURS
    for given in info.optim_error_inputs_func(device="cpu", dtype=torch.float32)
]


#: Those with one implementation, which take none of the options that choose between several.
ALONE = ("LBFGS", "Muon", "SparseAdam")


def test_every_class_of_the_table_is_ours():
    assert {info.name for info in optim_db} == {info.name for info in OURS}


@pytest.mark.parametrize(("info", "given"), [p for p in INPUTS if p.values[0].name in (*ALONE, "Adafactor")])
def test_inputs_of_those_with_one_implementation(info, given):
    """Muon's iteration is in bfloat16: its updates agree within 2 % of the learning rate."""
    ours = [torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    a = getattr(offbeat, info.name)(ours, **deepcopy(given.kwargs))
    b = info.optim_cls(theirs, **deepcopy(given.kwargs))
    for _ in range(12):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            if info.name == "SparseAdam":
                p.grad = p.grad.to_sparse(1)
            q.grad = p.grad.clone()
        closures = [_quadratic(o, ps) if info.name == "LBFGS" else None for o, ps in ((a, ours), (b, theirs))]
        for optimizer, closure in zip((a, b), closures, strict=True):
            optimizer.step(*([] if closure is None else [closure]))
    tolerance = {"Muon": 12 * 0.02 * 2 * float(given.kwargs.get("lr", 1e-3)), "LBFGS": 1e-6}.get(info.name, 1e-12)
    if isinstance(given.kwargs.get("lr"), torch.Tensor):  # in float32
        tolerance = max(tolerance, 1e-7)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


def _quadratic(optimizer, params):
    def closure():
        optimizer.zero_grad()
        loss = sum(((p - 1) ** 2).sum() * (i + 1) for i, p in enumerate(params))
        loss = -loss if optimizer.defaults.get("maximize") else loss  # what has a best point
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("implementation", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize(("info", "given"), [p for p in INPUTS if p.values[0].name not in (*ALONE, "Adafactor")])
def test_inputs(info, given, implementation):
    tensor_hyper = isinstance(given.kwargs.get("lr"), torch.Tensor) or "betas" in given.desc
    if implementation.get("foreach") and tensor_hyper and info.name in ("Adam", "AdamW"):
        with pytest.raises(ValueError, match="as a Tensor is not supported for capturable=False and foreach=True"):
            getattr(offbeat, info.name)([torch.zeros(1)], **given.kwargs, **implementation)
        return
    ours = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    a = getattr(offbeat, info.name)(ours, **deepcopy(given.kwargs), **implementation)
    b = info.optim_cls(theirs, **deepcopy(given.kwargs), foreach=False)
    for _ in range(12):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        # A learning rate given as a float32 tensor is only good to float32 in torch's arithmetic with it.
        tolerance = 1e-7 if tensor_hyper else 1e-12
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("info", "given"), ERRORS)
def test_error_inputs(info, given):
    given_input = given.optimizer_error_input
    if given_input.desc == "only support 2D parameters":
        given_input.params = [torch.zeros(2, 2, 2, 2)]  # stacks of matrices are ours to take
    params = given_input.params if given_input.params is not None else [torch.zeros(1, 1, requires_grad=True)]
    make = getattr(offbeat, info.name)
    if issubclass(given.error_type, Warning):
        with pytest.warns(given.error_type, match=given.error_regex):
            make(params, **given_input.kwargs)
        return
    if given.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR:
        with pytest.raises(given.error_type, match=given.error_regex):
            make(params, **given_input.kwargs)
        return
    optimizer = make(params, **given_input.kwargs)
    with pytest.raises(given.error_type, match=given.error_regex):
        optimizer.step()
