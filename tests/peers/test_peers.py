"""Optimizers of other packages under overlap: the same bits as without, or refused before anything moves.

``make peers`` installs the packages (the extra ``peers``) and runs this. A package that is not there is skipped. The
tables name all that is refused and why; everything else must have the same bits.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat

STEPS = 6

NORM = "depends on other parameters"
DRAWS = "draws random numbers"
ESTIMATE = "by the gradients that it is given"
EMPTY = "step has raised in a trial"  # a step without gradients raises
OBJECT = "which its step may change once for every bucket"

#: What cannot hold, with the reason; by the name of the package and what it calls the optimizer.
REFUSED: dict[str, dict[str, str]] = {
    "schedulefree": {},
    "optimi": dict.fromkeys(
        [f"{name} foreach" for name in ("Adam", "AdamW", "Adan", "Lion", "RAdam", "Ranger", "SGD", "StableAdamW")],
        EMPTY,
    ),
    "timm": {
        **dict.fromkeys(("lamb", "lambc", "lambcd", "lambcw", "lambw", "clamb", "clambw"), NORM),  # max_grad_norm=1.0
        **dict.fromkeys(("kron", "kronc", "kronw"), OBJECT),  # a random.Random of its own
    },
    "pytorch_optimizer": {
        "AdaGC": NORM,
        **dict.fromkeys(("Adai", "AdamS"), EMPTY),
        **dict.fromkeys(("ASGD", "AvaGrad", "Prodigy", "SaRA"), ESTIMATE),
        **dict.fromkeys(("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"), ESTIMATE),
        **dict.fromkeys(("DASH", "Gravity", "Kron"), DRAWS),
        **dict.fromkeys(("LoRARite", "SPAM"), OBJECT),
        "Magma": "wraps another optimizer",
    },
}


def timm_optim() -> Any:
    """``timm.optim``, without the rest of timm, which needs torchvision."""
    found = importlib.util.find_spec("timm")
    assert found is not None
    made = {"timm": types.ModuleType("timm"), "timm.models": types.ModuleType("timm.models")}
    made["timm"].__path__ = list(found.submodule_search_locations or ())
    made["timm.models"].group_parameters = None  # type: ignore[attr-defined]  # imported, and not used here
    for name, module in made.items():
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    try:
        return importlib.import_module("timm.optim")
    finally:
        for name in made:
            del sys.modules[name]


Make = Callable[[Any], Any]


def schedulefree_optimizers(package: Any) -> Iterator[tuple[str, Make]]:
    for name, cls in classes(package):
        if "Closure" not in name:
            yield name, lambda params, cls=cls: cls(params, lr=0.01)
            if "foreach" in inspect.signature(cls).parameters:
                yield f"{name} for-loop", lambda params, cls=cls: cls(params, lr=0.01, foreach=False)


def optimi_optimizers(package: Any) -> Iterator[tuple[str, Make]]:
    for name, cls in classes(package):
        yield name, lambda params, cls=cls: cls(params, lr=0.01, foreach=False, triton=False)
        yield f"{name} foreach", lambda params, cls=cls: cls(params, lr=0.01, foreach=True)


def timm_optimizers(package: Any) -> Iterator[tuple[str, Make]]:
    for name in package.list_optimizers():
        if not name.startswith(("bnb", "fused")):  # of other packages, for CUDA
            yield name, lambda params, name=name: package.create_optimizer_v2(list(params), opt=name, lr=0.01)


def pytorch_optimizer_optimizers(package: Any) -> Iterator[tuple[str, Make]]:
    for name in package.get_supported_optimizers():
        cls = package.load_optimizer(name)
        options = {"lr": 0.01} if "lr" in inspect.signature(cls).parameters else {}
        yield cls.__name__, lambda params, cls=cls, options=options: cls(params, **options)


def classes(package: Any) -> list[tuple[str, Any]]:
    every = [(name, cls) for name, cls in vars(package).items() if isinstance(cls, type)]
    return [(name, cls) for name, cls in every if issubclass(cls, torch.optim.Optimizer) and name[0].isupper()]


PACKAGES: dict[str, Callable[[Any], Iterator[tuple[str, Make]]]] = {
    "schedulefree": schedulefree_optimizers,
    "optimi": optimi_optimizers,
    "timm": timm_optimizers,
    "pytorch_optimizer": pytorch_optimizer_optimizers,
}


def cases() -> Iterator[Any]:
    for package, optimizers in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            yield pytest.param(
                package,
                "",
                None,
                id=package,
                marks=pytest.mark.skip(f"{package} is not installed; `make peers` installs it"),
            )
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = timm_optim() if package == "timm" else importlib.import_module(package)
        for name, make in optimizers(module):
            reason = REFUSED[package].get(name)
            refused = "" if reason is None else f" is refused: {reason}"
            yield pytest.param(package, name, make, id=f"{package} {name}{refused}")


def train(make: Make, overlapped: bool) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = make(model.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    if overlapped:
        offbeat.overlap(optimizer, model, bucket_cap_mb=1e-4)
    generator = torch.Generator().manual_seed(1)
    start = [p.detach().clone() for p in model.parameters()]
    try:
        for _ in range(STEPS):
            model(torch.randn(4, 6, generator=generator) * 5).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except TypeError:
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), start, strict=True)), "parameters have moved"
        raise
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [p.detach() for p in model.parameters()], groups


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "name", "make"), cases())
def test_same_bits_or_refused(package: str, name: str, make: Make) -> None:
    reason = REFUSED[package].get(name)
    if reason is not None:
        with pytest.raises(TypeError, match=reason):
            train(make, True)
        return
    try:
        params, groups = train(make, False)
    except Exception as error:  # needs a closure, a graph, named parameters, or another package
        pytest.skip(f"does not train without overlap either: {type(error).__name__}: {error}")
    same_params, same_groups = train(make, True)
    assert all(torch.equal(p, q) for p, q in zip(params, same_params, strict=True))
    assert str(groups) == str(same_groups)


def test_trac_around_an_optimizer_of_ours_goes_on_exactly() -> None:
    trac = pytest.importorskip("pytorch_optimizer").TRAC

    def run(steps: range, model: nn.Module, optimizer: Any) -> None:
        for step in steps:
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    models = [nn.Linear(6, 3) for _ in range(2)]
    optimizers = [trac(offbeat.AdamW(model.parameters(), lr=0.01)) for model in models]
    run(range(4), models[0], optimizers[0])
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for model, optimizer in zip(models, optimizers, strict=True):
        run(range(4, 8), model, optimizer)
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*sorted({*offbeat.optimizers.__all__} - {"Muon"}), "LBFGS"])
def test_lightning_cli_takes_the_options_of_an_optimizer(name: str, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch import LightningModule
    from lightning.pytorch.cli import LightningCLI

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, x: Any, index: int) -> Any:
            return self.layer(x).sum()

    arguments = [f"--optimizer=offbeat.{name}", "--optimizer.lr=0.1", "--trainer.logger=false"]
    arguments += ["--optimizer.betas=[0.8,0.9]", "--optimizer.state_dtype=8bit"] if name == "AdamW" else []
    arguments += [f"--trainer.default_root_dir={tmp_path}", "--trainer.accelerator=cpu"]
    made = LightningCLI(Module, run=False, args=arguments, save_config_callback=None).model.configure_optimizers()
    assert type(made) is getattr(offbeat, name)
    (group,) = made.param_groups
    assert group["lr"] == 0.1
    if name == "AdamW":
        assert tuple(group["betas"]) == (0.8, 0.9)
        assert group["state_dtype"] == "8bit"
    with pytest.raises(SystemExit):
        LightningCLI(Module, run=False, args=[*arguments, "--optimizer.larning_rate=1"], save_config_callback=None)
