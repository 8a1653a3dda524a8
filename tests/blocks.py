"""Runs the code of the documentation: every block of a page in order, in one namespace, on two ranks.

A block marked ``python`` is executed, one marked ``pycon`` must print (or raise) what it says, and of one marked
``diff`` what it leads to is executed. Blocks may use the names that ``names()`` gives them, which are those of a
program that trains a small model with DDP.
"""

from __future__ import annotations

import copy
import doctest
import functools
import re
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat

__all__ = ["blocks", "names", "run_page", "run_pages"]

ROOT = Path(__file__).parent.parent
# What a page says for many ranks is run on two, and what it says for long runs is run for some steps.
SCALED = {
    "docs/levels.md": {"group=8": "group=1"},
    "docs/elastic.md": {"every=32": "every=2", "10_000": "6"},
    "docs/guides/across-sites.md": {"every=32": "every=2", "10_000": "6", "size=32": "size=2"},
}


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Line, language and text of each block that runs."""
    text = page.read_text()
    found = []
    for match in re.finditer(r"(?ms)^( *)```(python|pycon|diff)\n(.*?)^ *```$", text):
        line = text[: match.start(3)].count("\n") + 1
        code = re.sub(f"(?m)^{match[1]}", "", match[3])
        if match[2] == "diff":
            code = re.sub(r"(?m)^[+ ]", "", re.sub(r"(?m)^-.*\n", "\n", code))
        found.append((line, match[2].replace("diff", "python"), code))
    return found


class Small(nn.Module):
    """With an embedding, hidden matrices, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.embedding(tokens))))


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class MyOptimizer(torch.optim.SGD):
    def update_some(self, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        torch._foreach_add_(params, grads, alpha=-self.param_groups[0]["lr"])


class Anything(types.ModuleType):
    """Stands for a package that need not be installed: takes every call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        CALLS.append((args, kwargs))
        return self


#: Calls of packages that are not installed.
CALLS: list[tuple[Any, Any]] = []


class NoScheduler:
    def step(self) -> None:
        pass


def names() -> dict[str, Any]:
    """What a block may use without making it."""
    torch.manual_seed(0)
    model = Small()
    params = [p.detach().clone().requires_grad_() for p in model.parameters()]
    return {
        "__name__": "__main__",
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "copy": copy,
        "functools": functools,
        "offbeat": offbeat,
        "DistributedDataParallel": DistributedDataParallel,
        "model": model,
        "make_model": Small,
        "data": [torch.randint(0, 16, (4, 9)) for _ in range(4)],
        "loss": loss,
        "params": params,
        "gradients": [torch.ones_like(p) for p in params],
        "scheduler": NoScheduler(),
        "MyOptimizer": MyOptimizer,
    }


def run_page(page: Path) -> str | None:
    """Run one page; what went wrong, or None."""
    namespace = names()
    if page.name == "reports.md":
        for package in ("wandb", "opentelemetry"):
            sys.modules.setdefault(package, Anything(package))
    for line, language, code in blocks(page):
        for old, new in SCALED.get(page.relative_to(ROOT).as_posix(), {}).items():
            code = code.replace(old, new)
        where = f"{page.relative_to(ROOT)}:{line}"
        try:
            if language == "python":
                exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
            else:
                test = doctest.DocTestParser().get_doctest(code, namespace, where, str(page), line)
                told: list[str] = []
                runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
                runner.run(test, out=told.append, clear_globs=False)
                if runner.failures:
                    return f"{where}\n{''.join(told)}"
                namespace.update(test.globs)
        except Exception:
            return f"{where}\n{traceback.format_exc()}"
    return None


def run_pages(rank: int, world: int, pages: list[Path]) -> list[str]:
    """On every rank: what went wrong, page by page."""
    return [problem for problem in map(run_page, pages) if problem is not None]
