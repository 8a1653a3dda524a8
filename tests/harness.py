"""What tests of replicas share: a model, its data, a loop, and ways to run ranks as processes or as threads.

Tests of several processes are plain test functions of ``(rank, world)``::

    @ranks(2, 4)
    def test_something(rank, world): ...

All tests of a module with as many ranks run in one set of processes, because starting processes takes longer than most
tests. A test fails by raising on any rank, and must leave the process group usable for the next one.
"""

from __future__ import annotations

import importlib
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import offbeat
from offbeat.wire import membership
from offbeat.wire.peers import GroupPeers
from tests.ranks import run_ranks

__all__ = [
    "adamw", "agreements", "batch", "close", "everyone", "failing_reduce", "flat", "flight_of", "loss", "make",
    "miss_vote", "ranks", "same_everywhere", "sgd", "simulate", "simulated", "small", "train", "train_step",
    "wait_for_flight", "write",
]  # fmt: skip


# Models and data


def make(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A model of six parameters, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def small() -> nn.Sequential:
    """A model of four parameters in float32, for simulations."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(5, 6, dtype=dtype, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x[:, :3].cumsum(1)).square().mean()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@torch.no_grad()
def write(model: nn.Module, vector: Tensor) -> None:
    parts = vector.split([p.numel() for p in model.parameters()])
    for p, part in zip(model.parameters(), parts, strict=True):
        p.copy_(part.view_as(p))


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> Any:
    return offbeat.AdamW(params, lr=0.01)


# Loops


def train(module: nn.Module, optimizer: Any, steps: range, rank: int) -> list[Tensor]:
    """The loop a user would write; returns parameters after every step."""
    history = []
    dtype = next(module.parameters()).dtype
    for step in steps:
        loss(module, batch(step, rank, dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(flat(module))
    return history


def train_step(optimizer: Any, module: nn.Module, step: int, rank: int) -> Exception | None:
    """One step of that loop. Returns the error of its round, if there was one."""
    loss(module, batch(step, rank, next(module.parameters()).dtype)).backward()
    error = None
    try:
        optimizer.step()
    except (offbeat.ExchangeError, offbeat.NotFinite) as caught:
        error = caught
    optimizer.zero_grad()
    return error


# Ranks as processes


def everyone(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """What each rank has."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, tensor, group=group)
    return answers


def agreements(module: nn.Module, optimizer: Any, steps: range, rank: int) -> list[bool]:
    """Train; after which of the steps all ranks had the same parameters."""
    return [same_everywhere(parameters) for parameters in train(module, optimizer, steps, rank)]


def same_everywhere(tensor: Tensor) -> bool:
    """Whether all ranks have the same bits."""
    answers = everyone(tensor)
    return all(torch.equal(answer, answers[0]) for answer in answers)


def ranks(*worlds: int) -> Callable[[Any], Any]:
    """Make a test of a function of ``(rank, world)``, to be run with each of these numbers of processes."""

    def register(function: Any) -> Any:
        def test(world: int, request: pytest.FixtureRequest) -> None:
            _Processes.of(request).check(world, test.__name__)

        test.__name__ = test.__qualname__ = function.__name__
        test.__doc__, test.__module__ = function.__doc__, function.__module__
        test.on_rank = function  # type: ignore[attr-defined]
        test.worlds = worlds  # type: ignore[attr-defined]
        return pytest.mark.ranks(pytest.mark.timeout(320)(pytest.mark.parametrize("world", worlds)(test)))

    return register


class _Processes:
    """The tests of a module that were asked for, by number of ranks, and what came out."""

    _all: ClassVar[dict[str, _Processes]] = {}

    def __init__(self, module: str, selected: set[tuple[int, str]]) -> None:
        self._module, self._selected = module, selected
        self._done: dict[int, Any] = {}

    @classmethod
    def of(cls, request: pytest.FixtureRequest) -> _Processes:
        module = request.module
        if module.__name__ not in cls._all:
            items = [item for item in request.session.items if getattr(item, "module", None) is module]
            chosen = {
                (item.callspec.params["world"], item.function.__name__)
                for item in items
                if hasattr(item.function, "on_rank")
            }
            cls._all[module.__name__] = cls(module.__name__, chosen)
        return cls._all[module.__name__]

    def check(self, world: int, name: str) -> None:
        """Run all tests of this number of ranks if they have not been run, and raise if this one failed."""
        if world not in self._done:
            self._done[world] = None  # what hangs is not tried again for every test
            names = [function for size, function in sorted(self._selected) if size == world]
            self._done[world] = run_ranks(_run_all, world, self._module, names, seconds=300)
        assert self._done[world] is not None, "the processes failed; see the first test with as many ranks"
        for rank, results in enumerate(self._done[world]):
            assert results[name] == "", f"rank {rank}:\n{results[name]}"


def _run_all(rank: int, world: int, module: str, names: list[str]) -> dict[str, str]:
    results = {}
    tests = importlib.import_module(module)
    for name in names:
        problem = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                # Most tests leave subgroup= out, and no launcher says what a node is.
                warnings.filterwarnings("ignore", "all . ranks are on one host, and LOCAL_WORLD_SIZE", UserWarning)
                # Many tests end in the middle of training.
                warnings.filterwarnings("ignore", "[A-Za-z]* ends while replicas differ", UserWarning)
                getattr(tests, name).on_rank(rank, world)
        except (Exception, pytest.fail.Exception):
            problem = traceback.format_exc()
            print(f"rank {rank}, {name}:\n{problem}", file=sys.stderr)
        answers: list[Any] = [None] * world
        dist.all_gather_object(answers, problem)
        results[name] = problem
    return results


# Ranks as threads


def simulated(function: Any, world: int = 2, *, make: Any = small, timeout: float = 20, **options: Any) -> list[Any]:
    """Run ``function(rank, peers, model)`` on ranks that are threads, without warnings; ``make`` makes the models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return offbeat.Simulation(world, timeout=timeout).run(function, make=make, **options)


# What goes wrong on purpose


@contextmanager
def failing_reduce(*calls: int, error: Exception | None = None) -> Iterator[Counter[str]]:
    """All-reduces with these numbers, from 1, raise instead of running; without numbers all do. Yields their count."""
    real, count = GroupPeers.all_reduce, Counter[str]()

    def all_reduce(*args: Any, **options: Any) -> Any:
        count["calls"] += 1
        if not calls or count["calls"] in calls:
            raise error or dist.DistBackendError("the network is gone")
        return real(*args, **options)

    GroupPeers.all_reduce = all_reduce  # type: ignore[method-assign]
    try:
        yield count
    finally:
        GroupPeers.all_reduce = real  # type: ignore[method-assign]


@contextmanager
def miss_vote(rank: int, *votes: int, closes: bool = False) -> Iterator[None]:
    """Votes with these numbers, from 1, succeed everywhere, but do not arrive on one rank.

    Args:
        rank: which.
        votes: their numbers.
        closes: whether this closes the rank's connection too, as it does in real processes, so that the others fail in
            their next exchange.
    """
    real, count = membership.vote, Counter[int]()

    def vote(peers: Any) -> None:
        real(peers)
        me = peers.ranks[peers.rank]
        count[me] += 1
        if me == rank and count[me] in votes:
            if closes:
                peers.close()
            raise offbeat.ExchangeError("the connection broke in the middle of the vote")

    membership.vote = vote
    try:
        yield
    finally:
        membership.vote = real


# A look inside: the rounds in flight


def flight_of(replica: Any) -> Any:
    """The only round in flight; None if there is none."""
    flights = list(replica._board.flights.values())
    assert len(flights) <= 1
    return flights[0] if flights else None


def wait_for_flight(replica: Any) -> Any:
    """Wait until the exchange in the background is over, and return what it has brought. It is not applied."""
    flight = flight_of(replica)
    return None if flight is None else flight.pending.wait()


# An independent reference


def close(ours: list[Tensor], theirs: list[list[Tensor]], rank: int) -> None:
    """Raise unless a rank's parameters after every step are those of :func:`simulate`."""
    assert len(ours) == len(theirs)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(a, b[rank], rtol=1e-11, atol=1e-12, msg=lambda m, step=step: f"step {step}: {m}")


def simulate(
    world: int,
    steps: int,
    optimizer: Any,
    due: Any,
    *,
    warmup: int = 0,
    node: int = 1,
    delay: int = 0,
    weight: Any = lambda rank, step: 1.0,
) -> list[list[Tensor]]:
    """Every rank's parameters after every step, from replicas in one process and a few lines.

    Args:
        world: the number of ranks.
        steps: the number of steps.
        optimizer: makes one of parameters.
        due: from the step to the groups of ranks that average after it.
        warmup: steps with gradients averaged over all ranks.
        node: ranks whose gradients are averaged after warm-up.
        delay: after how many steps an average lands.
        weight: of a rank in the average after a step.
    """
    models = [make() for _ in range(world)]
    optimizers = [optimizer(model.parameters()) for model in models]
    flights: list[tuple[int, dict[int, Tensor]]] = []
    history = []
    for step in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss(model, batch(step, rank)).backward()
        size = world if step < warmup else node
        for start in range(0, world, size):
            for same in zip(*(model.parameters() for model in models[start : start + size]), strict=True):
                mean = sum(p.grad for p in same) / size
                for p in same:
                    p.grad = mean.clone()
        for inner in optimizers:
            inner.step()
        groups = due(step)
        for landing, differences in list(flights):
            if step >= landing or groups:
                for rank, difference in differences.items():
                    write(models[rank], flat(models[rank]) + difference)
                flights.remove((landing, differences))
        for group in groups:
            weights = {rank: weight(rank, step) for rank in group}
            mean = sum(weights[rank] * flat(models[rank]) for rank in group) / sum(weights.values())
            differences = {rank: mean - flat(models[rank]) for rank in group}
            flights.append((step + delay, differences))
            if delay == 0:
                flights.pop()
                for rank in group:
                    write(models[rank], mean)
        history.append([flat(model) for model in models])
    return history
