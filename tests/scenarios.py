"""Many checks in one set of processes: starting the processes takes longer than most of the checks.

A scenario runs on every rank and fails by raising there. It must leave the process group usable for the next one.
"""

from __future__ import annotations

import importlib
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks

__all__ = ["Scenarios"]


class Scenarios:
    """The scenarios of a test module, by number of ranks."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._all: dict[int, dict[str, Any]] = {}
        self._done: dict[int, Any] = {}

    def __call__(self, *worlds: int) -> Callable[[Any], Any]:
        """Decorates a test, a function of ``(rank, world)``, to be run with each of these numbers of ranks."""

        def register(function: Any) -> Any:
            name = function.__name__
            for world in worlds:
                self._all.setdefault(world, {})[name] = function

            @pytest.mark.parametrize("world", worlds)
            def test(world: int) -> None:
                self.check(world, name)

            test.__name__, test.__qualname__, test.__doc__ = name, name, function.__doc__
            test.__module__ = function.__module__
            return test

        return register

    @property
    def cases(self) -> list[tuple[int, str]]:
        return [(world, name) for world, some in sorted(self._all.items()) for name in some]

    def check(self, world: int, name: str) -> None:
        """Run all scenarios of this number of ranks if they have not been run, and raise if this one failed."""
        if world not in self._done:
            self._done[world] = None  # what hangs is not tried again for every scenario
            self._done[world] = run_ranks(_run_all, world, self._module, seconds=300)
        assert self._done[world] is not None, "the processes failed; see the first test with as many ranks"
        for rank, results in enumerate(self._done[world]):
            assert results[name] == "", f"rank {rank}:\n{results[name]}"


def _run_all(rank: int, world: int, module: str) -> dict[str, str]:
    results = {}
    for name, function in importlib.import_module(module).scenario._all[world].items():
        problem = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                # Most scenarios leave subgroup= out, and no launcher says what a node is.
                warnings.filterwarnings("ignore", "all . ranks are on one host, and LOCAL_WORLD_SIZE", UserWarning)
                warnings.filterwarnings("ignore", "with clip=.exact. every update waits", UserWarning)
                # And many end in the middle of training.
                warnings.filterwarnings("ignore", ".* ends while replicas differ", UserWarning)
                function(rank, world)
        except Exception:
            problem = traceback.format_exc()
        found: list[Any] = [None] * world
        dist.all_gather_object(found, problem)
        results[name] = problem
    return results
