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


def test_every_class_of_the_table_but_the_excluded_ones_is_ours():
    missing = {info.name for info in optim_db} - {info.name for info in OURS}
    assert missing == {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


@pytest.mark.parametrize("implementation", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize(("info", "given"), INPUTS)
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
