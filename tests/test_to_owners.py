"""Gradients that reach only the owner of a matrix (DDP): the numbers of DDP's all-reduce, the same on every rank.

With two ranks a sum has one order, so the bits are those of a chain that does all of the work on every rank. With more,
the numbers are within 1e-9 of one process with the whole gradient, with ``ns_dtype=torch.float64``.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import offbeat
from offbeat.engine import exchange
from offbeat.engine.owned import OwnedGradient
from offbeat.rules import muon as muon_module
from tests.ranks import run_ranks
from tests.test_matrix_ranks import EXACT, ROUGH, Net, assert_near, chain, data, raised, reference

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("matrices")]

LIMIT = 0.05


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


class Counted:
    """Counts what this process does: the cost of matrices, and the bytes that it sends."""

    def __enter__(self) -> Counted:
        self.cost = self.sent = self.reduced = 0
        self._old = muon_module.newton_schulz, dist.broadcast, dist.all_to_all_single, dist.all_reduce
        whole, broadcast, all_to_all, all_reduce = self._old

        def counted(x: torch.Tensor, *args: Any) -> torch.Tensor:
            self.cost += x.numel() * min(x.shape[-2:])
            return whole(x, *args)

        def counted_broadcast(t: torch.Tensor, source: int, **more: Any) -> Any:
            self.sent += t.nbytes * (dist.get_world_size() - 1) * (source == dist.get_rank())
            return broadcast(t, source, **more)

        def counted_all_to_all(to: Any, of: Any, arriving: Any, leaving: Any, **more: Any) -> Any:
            self.sent += sum(n for rank, n in enumerate(leaving) if rank != dist.get_rank())
            return all_to_all(to, of, arriving, leaving, **more)

        def counted_all_reduce(t: torch.Tensor, *args: Any, **more: Any) -> Any:
            self.reduced += t.nbytes
            return all_reduce(t, *args, **more)

        muon_module.newton_schulz = counted
        dist.broadcast, dist.all_to_all_single, dist.all_reduce = (
            counted_broadcast,
            counted_all_to_all,
            counted_all_reduce,
        )
        return self

    def __exit__(self, *error: Any) -> None:
        muon_module.newton_schulz, dist.broadcast, dist.all_to_all_single, dist.all_reduce = self._old


def train(rank: int, world: int, hyper: dict[str, Any], exact: bool, round_bytes: int, overlapped: bool) -> Any:
    exchange.ROUND_BYTES = round_bytes
    net = Net().double()
    module = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1e-4)
    optimizer = chain(net, hyper)
    handle = offbeat.reduce_to_owners(optimizer, module, exact=exact)
    if overlapped:
        offbeat.overlap(optimizer, module)
    with Counted() as counted:
        for step in range(5):
            module(data(step, world)[rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    owners = [handle.owner(p) for p in net.parameters()]
    return values(net), counted.cost, counted.sent, counted.reduced, owners


@pytest.mark.parametrize("overlapped", [False, True], ids=["step", "overlap"])
@pytest.mark.parametrize(("world", "round_bytes"), [(1, 64 << 20), (2, 64 << 20), (3, 400), (4, 1)])
def test_gradients_reach_their_owner_and_the_work_is_done_once(world, round_bytes, overlapped):
    runs = run_ranks(train, world, EXACT, True, round_bytes, overlapped)
    expected = reference(world, EXACT)
    for run, *_ in runs:
        assert_near(run, expected, EXACT)
        assert all(torch.equal(run[name], runs[0][0][name]) for name in run)
    matrices = [(7, 6), (7, 7), (3, 7), (10, 3), (2, 10, 4)]
    costs = [torch.Size(shape).numel() * min(shape[-2:]) for shape in matrices]
    assert sum(cost for _, cost, *_ in runs) == 5 * sum(costs)
    if world == 1:
        return
    assert all(owners == runs[0][4] for *_, owners in runs)
    # A matrix is owned; embeddings, heads, biases and norms are not.
    assert [owner is None for owner in runs[0][4]] == [
        p.dim() < 2 or name == "head.weight" for name, p in expected.items()
    ]
    # Each number of a matrix goes to its owner once and comes back to the others once, and nothing else does: 8 bytes
    # each way here, and 16 for the flag with each broadcast.
    numbers = sum(torch.Size(shape).numel() for shape in matrices)
    sent = sum(sent for _, _, sent, *_ in runs)
    assert 5 * (world - 1) * numbers * 16 <= sent <= 5 * (world - 1) * (numbers * 16 + 16 * len(matrices))
    # What is all-reduced: the other parameters, and a few numbers to agree.
    rest = sum(p.numel() for p in expected.values()) - numbers
    assert runs[0][3] <= 5 * (8 * rest + 16 * 2 * len(matrices))


@pytest.mark.parametrize("hyper", [ROUGH, {"lr": 0.05, "ns_dtype": torch.float32}], ids=str)
def test_updates_travel_in_bfloat16_unless_asked(hyper):
    runs = run_ranks(train, 2, hyper, False, 64 << 20, False)
    assert_near(runs[0][0], reference(2, hyper), ROUGH)
    assert all(torch.equal(runs[1][0][name], p) for name, p in runs[0][0].items())
    numbers = 7 * 6 + 7 * 7 + 3 * 7 + 10 * 3 + 2 * 10 * 4
    assert sum(sent for _, _, sent, *_ in runs) <= 5 * (numbers * (8 + 2) + 16 * 5)


# In step(): every feature against a chain that does all of the work on every rank, bit for bit with two ranks.


class Sometimes(nn.Module):
    """A layer that a rank uses at some steps only, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.sometimes, self.never = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if use:
            x = torch.tanh(self.sometimes(x))
        return self.head(torch.tanh(self.last(x)))


FEATURES = (
    "plain", "no_sync", "clip", "scaler", "scaler_clip", "reload", "schedule", "find_unused", "bucket_view",
    "zeros", "added", "removed", "closure", "zero_in_step",
)  # fmt: skip


def loop(feature: str, owned: bool, rank: int, world: int) -> dict[str, Any]:
    """Some steps; returns what must be the same with and without owners."""
    model = Sometimes()
    ddp = nn.parallel.DistributedDataParallel(
        model,
        bucket_cap_mb=0.0005,
        find_unused_parameters=True,
        gradient_as_bucket_view=feature == "bucket_view",
    )
    hyper = {"lr": 0.02, "ns_dtype": torch.float32}
    split = offbeat.split_parameters(model)
    later = split.matrices[-1:] if feature == "added" else []
    first = [p for p in split.matrices if all(p is not q for q in later)]
    optimizer = offbeat.Chain([offbeat.Muon(first, **hyper), offbeat.AdamW(split.rest, lr=0.01)])
    optimizer.optimizers[0].init_state()
    handle = offbeat.reduce_to_owners(optimizer, ddp, exact=True) if owned else None
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if feature == "schedule" else None
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) if "scaler" in feature else None
    norms: list[Any] = []
    for step in range(8):
        for micro in range(2 if feature == "no_sync" else 1):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            use = (step + rank) % 3 > 0 and step != 4 if feature == "find_unused" else True

            def backward(x: Any = x, use: bool = use, step: int = step) -> Any:
                loss = ddp(x, use).square().mean()
                if scaler is not None and step == 3 and rank == 1:
                    loss = loss * float("inf")
                (scaler.scale(loss) if scaler is not None else loss).backward()
                return loss

            with ddp.no_sync() if feature == "no_sync" and micro == 0 else contextlib.nullcontext():
                if feature != "closure":
                    backward()
        if owned and feature != "closure":
            held = [p.grad for p in first if p.grad is not None]
            assert held
            assert all(isinstance(g, OwnedGradient) for g in held) or (feature == "removed" and step > 4)
        if "clip" in feature:
            if scaler is not None:
                scaler.unscale_(optimizer)
            if handle is not None:
                norms.append(handle.clip_grad_norm_(LIMIT))
            else:
                norms.append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT))
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif feature == "closure":
            optimizer.step(backward)
        elif feature == "zero_in_step":
            optimizer.optimizers[0].step(zero_grad=True)
            optimizer.optimizers[1].step(zero_grad=True)
            assert all(type(p.grad) is torch.Tensor and not p.grad.any() for p in first if p.grad is not None)
        else:
            optimizer.step()
        if feature != "zero_in_step":
            optimizer.zero_grad(set_to_none=feature != "zeros")
        if schedule is not None:
            schedule.step()
        if feature == "added" and step == 2:
            optimizer.add_param_group({"params": later, "lr": 0.01, "optimizer": 0})
            optimizer.optimizers[0].init_state()
        if feature == "removed" and step == 4 and handle is not None:
            handle.remove()
        if feature == "reload" and step == 3:
            optimizer.gather_state()
            saved = copy.deepcopy(optimizer.state_dict())
            for p in first:  # what is loaded counts, not what was there
                optimizer.state[p]["momentum_buffer"].fill_(7.0)
            optimizer.load_state_dict(saved)
    optimizer.gather_state()
    state = optimizer.state_dict()["state"]
    return {
        "params": values(model),
        "norms": norms,
        "scale": scaler.get_scale() if scaler is not None else 0.0,
        "state": {(i, key): value for i, entry in state.items() for key, value in entry.items()},
    }


def both(feature: str, rank: int, world: int) -> Any:
    try:
        return loop(feature, True, rank, world), loop(feature, False, rank, world)
    except Exception:
        return traceback.format_exc()


def all_features(rank: int, world: int) -> dict[str, Any]:
    return {feature: both(feature, rank, world) for feature in FEATURES}


@pytest.fixture(scope="module")
def runs():
    return run_ranks(all_features, 2, seconds=120)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_loop_stays_as_it_is(feature, runs):
    for result in (run[feature] for run in runs):
        assert not isinstance(result, str), result
        ours, theirs = result
        assert ours["scale"] == theirs["scale"]
        for a, b in zip(ours["norms"], theirs["norms"], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        for key in ("params", "state"):
            assert ours[key].keys() == theirs[key].keys()
            for name, value in theirs[key].items():
                assert torch.equal(ours[key][name], value), f"{key} {name}"
    first, second = (run[feature][0]["params"] for run in runs)
    assert all(torch.equal(first[name], second[name]) for name in first)


# What cannot be right raises, on every rank, and changes nothing.


def misuse(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = Sometimes()
    wrap = nn.parallel.DistributedDataParallel
    ddp = wrap(model, find_unused_parameters=True)
    split = offbeat.split_parameters(model)
    muon, adamw = offbeat.Muon(split.matrices), offbeat.AdamW(split.rest)
    optimizer = offbeat.Chain([muon, adamw])
    found["no ddp"] = raised(lambda: offbeat.reduce_to_owners(optimizer, model))
    found["no matrices"] = raised(lambda: offbeat.reduce_to_owners(adamw, ddp))
    found["no matrices in a chain"] = raised(lambda: offbeat.Chain([adamw]).share_matrices())
    found["other module"] = raised(lambda: offbeat.reduce_to_owners(optimizer, wrap(Sometimes())))
    hook = default_hooks.allreduce_hook
    hooked = wrap(model)
    hooked.register_comm_hook(None, hook)
    found["own hook"] = raised(lambda: offbeat.reduce_to_owners(optimizer, hooked))
    overlapped = wrap(model)
    overlap = offbeat.overlap(optimizer, overlapped, comm_hook=hook)
    found["hook of overlap"] = raised(lambda: offbeat.reduce_to_owners(optimizer, overlapped))
    overlap.remove()
    local = wrap(model)
    wrapped = offbeat.LocalSGD(optimizer, local, every=2, warmup=1)
    found["LocalSGD before"] = raised(lambda: offbeat.reduce_to_owners(optimizer, local))
    del wrapped
    shared = offbeat.Muon(split.matrices)
    shared.share_matrices()
    found["shared"] = raised(lambda: offbeat.reduce_to_owners(shared, ddp))
    found["nothing begun"] = muon.owners is None and not muon.state

    handle = offbeat.reduce_to_owners(optimizer, ddp)
    found["twice"] = raised(lambda: offbeat.reduce_to_owners(optimizer, ddp))
    found["share_matrices"] = raised(muon.share_matrices)
    found["LocalSGD after"] = raised(lambda: offbeat.LocalSGD(optimizer, ddp, every=2, warmup=1))
    found["comm_hook"] = raised(lambda: offbeat.overlap(optimizer, ddp, comm_hook=hook))
    before = values(model)
    x = torch.ones(4, 6) * (1 + rank)
    ddp(x, True).square().mean().backward()
    found["norm"] = raised(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    found["read"] = raised(lambda: split.matrices[0].grad.abs().max())
    found["removed too early"] = raised(handle.remove)
    optimizer.zero_grad()
    with ddp.no_sync():
        ddp(x, True).square().mean().backward()
    found["not reduced"] = raised(optimizer.step)
    optimizer.zero_grad()
    for p in split.matrices:
        p.grad = torch.ones_like(p)
    found["by hand"] = raised(optimizer.step)
    optimizer.zero_grad()
    found["unchanged"] = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    found["unchanged"] &= not any(optimizer.state[p]["momentum_buffer"].any() for p in split.matrices)
    found["state before a step"] = raised(optimizer.state_dict)
    ddp(x, True).square().mean().backward()
    optimizer.step()
    found["state"] = raised(optimizer.state_dict)
    found["copy"] = raised(lambda: copy.deepcopy(muon))
    found["missing on a rank"] = "nothing"
    optimizer.zero_grad()
    ddp(x, True).square().mean().backward()
    if rank == 1:
        split.matrices[0].grad = None
    before = values(model)
    found["missing on a rank"] = raised(optimizer.step)
    found["unchanged"] &= all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    optimizer.zero_grad()
    found["join"] = raised(lambda: join(ddp, x))
    dist.barrier()
    return found


def join(ddp: Any, x: torch.Tensor) -> None:
    with ddp.join():
        ddp(x, True).square().mean().backward()


def test_what_cannot_be_right_raises_on_every_rank():
    said = {
        "no ddp": "takes a DistributedDataParallel module",
        "no matrices": "has no matrices",
        "no matrices in a chain": "has matrices to share",
        "other module": "does not reduce",
        "own hook": "communication hook already (allreduce_hook)",
        "hook of overlap": "reduces the gradients of this DistributedDataParallel module already",
        "LocalSGD before": "LocalSGD averages the gradients",
        "shared": "shares its matrices already",
        "twice": "reduce_to_owners() reduces the gradients",
        "share_matrices": "reduced to their owners",
        "LocalSGD after": "reduce_to_owners() reduces the gradients",
        "comm_hook": "reduce_to_owners() reduces the gradients",
        "norm": "clip_grad_norm_() of the handle",
        "read": "has been reduced to the rank that owns it",
        "removed too early": "zero_grad() first",
        "not reduced": "outside of no_sync()",
        "by hand": "has not been reduced to its owner",
        "state before a step": "nothing",
        "state": "optimizer.gather_state()",
        "copy": "optimizer.gather_state()",
        "missing on a rank": "gradients for different matrices",
        "join": "join() cannot be used with reduce_to_owners()",
    }
    for found in run_ranks(misuse, 2):
        assert found["nothing begun"]
        assert found["unchanged"]
        for what, words in said.items():
            assert words in found[what], (what, found[what])


# What ranks could get wrong in silence, or hang in. One pair of processes runs all of these.


def small(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def begin(model: Sometimes, *more: nn.Parameter, **kw: Any) -> tuple[Any, Any]:
    """A DDP module and a chain; ``more`` are parameters for its AdamW."""
    split = offbeat.split_parameters(model)
    muon = offbeat.Muon(split.matrices, lr=0.02, ns_dtype=torch.float32)
    optimizer = offbeat.Chain([muon, offbeat.AdamW([*split.rest, *more], lr=0.01)])
    return nn.parallel.DistributedDataParallel(model, **{"find_unused_parameters": True, **kw}), optimizer


def pass_too_many(rank: int, world: int, kw: dict[str, Any]) -> Any:
    """Forgets zero_grad() once, or calls it between forward() and backward() as many loops do."""
    ends, said = [], "nothing"
    for forgets in (True, False):
        model = Sometimes()
        model.never = nn.Identity()
        ddp, optimizer = begin(model, **kw)
        offbeat.reduce_to_owners(optimizer, ddp)
        for step in range(4):
            if forgets and step == 2:
                said = raised(lambda: ddp(small(rank, 7), True).square().mean().backward())
            loss = ddp(small(rank, step), True).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ends.append(values(model))
    return said, all(torch.equal(p, ends[1][name]) for name, p in ends[0].items())


def not_reduced(rank: int, world: int, how: str) -> Any:
    """A matrix of the optimizer that DDP does not reduce."""
    model, extra = Sometimes(), nn.Linear(2, 5, bias=False)
    nn.init.constant_(extra.weight, 0.1)
    p = extra.weight if how == "added outside" else model.last.weight
    p.requires_grad_(how == "added outside")
    ddp, optimizer = begin(model)
    if how == "frozen":
        optimizer.add_param_group({"params": [p], "optimizer": 0})
        said = raised(lambda: offbeat.reduce_to_owners(optimizer, ddp))
        return said, optimizer.optimizers[0].owners is None
    if how == "unfrozen":
        p.requires_grad_()
        optimizer.add_param_group({"params": [p], "optimizer": 0})
    handle = offbeat.reduce_to_owners(optimizer, ddp)
    if how == "added outside":
        optimizer.add_param_group({"params": [p], "optimizer": 0})
    before = {**values(model), "extra": extra.weight.detach().clone()}
    extra(ddp(small(rank), True)).square().mean().backward()
    said = raised(lambda: handle.clip_grad_norm_(1.0)), raised(optimizer.step)
    after = {**values(model), "extra": extra.weight.detach()}
    return said[0], said[0] == said[1] and all(torch.equal(q, after[k]) for k, q in before.items())


def clip_outside(rank: int, world: int, differs: bool) -> Any:
    """Clips parameters outside of the DDP module too, as torch does."""
    found = []
    for owned in (True, False):
        model, extra = Sometimes(), nn.Linear(2, 3)
        for p in extra.parameters():
            nn.init.constant_(p, 0.5)
        ddp, optimizer = begin(model, *extra.parameters())
        clip: Any = offbeat.reduce_to_owners(optimizer, ddp, exact=True).clip_grad_norm_ if owned else None
        extra(ddp(small(rank), True)).square().mean().backward()
        if differs:
            before = extra.weight.grad.clone()
            return raised(lambda clip=clip: clip(LIMIT)), torch.equal(extra.weight.grad, before)
        for p in extra.parameters():
            dist.all_reduce(p.grad)
        everyone = [*model.parameters(), *extra.parameters()]
        norm = clip(LIMIT) if owned else nn.utils.clip_grad_norm_(everyone, LIMIT)
        grads = [p.grad for p in everyone if p.grad is not None and not isinstance(p.grad, OwnedGradient)]
        optimizer.step()
        found.append((norm, grads[-2:], [p.detach() for p in everyone]))
    (norm, grads, params), (norm2, grads2, params2) = found
    return norm > LIMIT and torch.equal(norm, norm2), all(map(torch.equal, [*grads, *params], [*grads2, *params2]))


def clip_missing(rank: int, world: int) -> Any:
    """One rank has no gradient of a matrix, then none of any; then nobody has."""
    model = Sometimes()
    ddp, optimizer = begin(model)
    handle = offbeat.reduce_to_owners(optimizer, ddp)
    ddp(small(rank), True).square().mean().backward()
    if rank == 1:
        model.last.weight.grad = None
    said = [raised(lambda: handle.clip_grad_norm_(1.0))]
    if rank == 1:
        optimizer.zero_grad()
    said.append(raised(lambda: handle.clip_grad_norm_(1.0)))
    optimizer.zero_grad()
    words = "gradients for different parameters"
    return all(words in one for one in said), handle.clip_grad_norm_(1.0) == 0


def second_fails(rank: int, world: int) -> Any:
    """The second Muon of a chain has other matrices on the other rank."""
    model = Sometimes()
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    first = offbeat.Muon([model.first.weight])
    second = offbeat.Muon([model.last.weight, model.sometimes.weight][: 1 + rank])
    said = raised(lambda: offbeat.reduce_to_owners(offbeat.Chain([first, second]), ddp))
    alone = first.owners is None and first.sharing_group is None and not first.state
    ddp(small(rank), True).square().mean().backward()
    first.step()  # as if nothing had been asked for
    first.zero_grad()
    offbeat.reduce_to_owners(first, ddp)
    return said, alone and first.owners is not None


def static_graph(rank: int, world: int, how: str) -> Any:
    """The ranks use different layers in a static graph, overlapped."""
    ends = []
    for one in (how, "alone"):
        model = Sometimes()
        ddp, optimizer = begin(model, find_unused_parameters=False, static_graph=True, bucket_cap_mb=0.0005)
        if one == "owned":
            offbeat.reduce_to_owners(optimizer, ddp, exact=True)
        elif one == "shared":
            optimizer.share_matrices(exact=True)
        if one != "alone":
            offbeat.overlap(optimizer, ddp)
        for step in range(4):
            ddp(small(rank, step), rank == 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(values(model))
    return "", all(torch.equal(p, ends[1][name]) for name, p in ends[0].items())


def unreduced_here_none_there(rank: int, world: int, how: str) -> Any:
    """A matrix has this rank's own gradient on one rank, and none on the other."""
    model = Sometimes()
    ddp, optimizer = begin(model)
    taken: Any = optimizer if how != "muon alone" else optimizer.optimizers[0]
    offbeat.reduce_to_owners(optimizer, ddp)
    ddp(small(rank), True).square().mean().backward()
    before = values(model)
    for p in optimizer.optimizers[0].param_groups[0]["params"] if how == "all" else [model.last.weight]:
        p.grad = torch.ones_like(p) if rank == 1 else None
    said = raised(taken.step)
    same = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    optimizer.zero_grad()
    ddp(small(rank), True).square().mean().backward()
    optimizer.step()  # the ranks are still in step
    words = "has not been reduced to its owner" if rank == 1 else "another rank cannot take this step"
    return said, same and words in said and not torch.equal(model.last.weight, before["last.weight"])


def bad_gradient_of_adamw(rank: int, world: int) -> Any:
    """One rank finds out by itself that it cannot step the parameters beside the matrices."""
    model, extra = Sometimes(), nn.Parameter(torch.ones(3))
    ddp, optimizer = begin(model, extra)
    offbeat.reduce_to_owners(optimizer, ddp)
    ddp(small(rank), True).square().mean().backward()
    extra.grad = torch.ones(3).to_sparse() if rank == 1 else torch.ones(3)
    before = values(model)
    said = raised(optimizer.step)
    words = "sparse" if rank == 1 else "another rank cannot take this step"
    return said, words in said and all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def other_options(rank: int, world: int, name: str, how: str) -> Any:
    """The ranks have different values of an option that decides the update."""
    model = Sometimes()
    ddp, optimizer = begin(model)
    if how == "shared":
        optimizer.share_matrices()
    else:
        offbeat.reduce_to_owners(optimizer, ddp)
    if how == "overlap":
        offbeat.overlap(optimizer, ddp)
    ddp(small(rank), True).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    group = optimizer.optimizers[0].param_groups[0]
    before, right = values(model), group[name]
    change = {"lr": 0.03, "nesterov": False, "ns_steps": 4, "ns_coefficients": (3.0, -4.0, 2.0)}
    if rank == 1:
        group[name] = change[name]

    def step() -> None:
        ddp(small(rank, 1), True).square().mean().backward()
        optimizer.step()

    said = raised(step)
    # In overlap, buckets of other parameters may have been stepped before the first with a matrix.
    kept = {id(p) for p in group["params"]} if how == "overlap" else {id(p) for p in model.parameters()}
    same = all(torch.equal(p, before[key]) for key, p in model.named_parameters() if id(p) in kept)
    if how != "overlap":
        group[name] = right
        optimizer.step()
    return said, same and f"option {name!r}" in said


DENSE = {"find_unused_parameters": False}
# By name: the function, its arguments, and what it says.
CASES: dict[str, tuple[Any, tuple[Any, ...], str]] = {
    "a pass too many": (pass_too_many, (DENSE,), "zero_grad() before backward()"),
    "a pass too many, unused parameters": (pass_too_many, ({},), "zero_grad() before backward()"),
    "a pass too many, static graph": (
        pass_too_many,
        ({**DENSE, "static_graph": True},),
        "zero_grad() before backward()",
    ),
    "frozen": (not_reduced, ("frozen",), "frozen matrix"),
    "unfrozen": (not_reduced, ("unfrozen",), "has not been reduced to its owner"),
    "added outside": (not_reduced, ("added outside",), "has not been reduced to its owner"),
    "clip outside": (clip_outside, (False,), ""),
    "clip outside, other gradients": (clip_outside, (True,), "have different gradients on the ranks"),
    "clip, missing gradients": (clip_missing, (), ""),
    "the second of a chain fails": (second_fails, (), "the ranks have different parameters"),
    "unreduced on a rank": (unreduced_here_none_there, ("one",), ""),
    "unreduced on a rank, nothing elsewhere": (unreduced_here_none_there, ("all",), ""),
    "unreduced on a rank, muon alone": (unreduced_here_none_there, ("muon alone",), ""),
    "a bad gradient beside matrices": (bad_gradient_of_adamw, (), ""),
    "another lr": (other_options, ("lr", "step"), "drift apart"),
    "another lr, overlap": (other_options, ("lr", "overlap"), "drift apart"),
    "another lr, shared": (other_options, ("lr", "shared"), "drift apart"),
    "another nesterov": (other_options, ("nesterov", "step"), "drift apart"),
    "another number of iterations": (other_options, ("ns_steps", "step"), "drift apart"),
    "other coefficients": (other_options, ("ns_coefficients", "step"), "drift apart"),
    "static graph, owned": (static_graph, ("owned",), ""),
    "static graph, shared": (static_graph, ("shared",), ""),
}


def all_cases(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        function, args, _ = CASES[name]
        try:
            found[name] = function(rank, world, *args)
        except Exception:
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def cases():
    return run_ranks(all_cases, 2, list(CASES), seconds=120)


@pytest.mark.parametrize("name", CASES)
def test_nothing_goes_wrong_in_silence(name, cases):
    for found in (one[name] for one in cases):
        assert not isinstance(found, str), found
        said, right = found
        assert right
        if isinstance(said, str):
            assert CASES[name][2] in said
        else:
            assert said


def with_dcp(rank: int, world: int, folder: str) -> Any:
    """Trains, saves through torch.distributed.checkpoint, and goes on from it in new objects."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def begin() -> Any:
        net = Net().double()
        ddp = nn.parallel.DistributedDataParallel(net)
        optimizer = chain(net, EXACT)
        offbeat.reduce_to_owners(optimizer, ddp, exact=True)
        return net, ddp, optimizer

    def steps(ddp: Any, optimizer: Any, start: int, end: int) -> None:
        for step in range(start, end):
            ddp(data(step, world)[rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    net, ddp, optimizer = begin()
    steps(ddp, optimizer, 0, 3)
    refused = raised(lambda: get_optimizer_state_dict(net, optimizer))
    optimizer.gather_state()
    dcp.save({"model": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=folder)
    again, ddp_again, optimizer_again = begin()
    optimizer_again.init_state()
    state = {"model": again.state_dict(), "optimizer": get_optimizer_state_dict(again, optimizer_again)}
    dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state["model"])
    set_optimizer_state_dict(again, optimizer_again, state["optimizer"])
    steps(ddp, optimizer, 3, 5)
    steps(ddp_again, optimizer_again, 3, 5)
    return refused, values(net), values(again)


def test_distributed_checkpoints_go_on_exactly(tmp_path):
    for refused, never_saved, loaded in run_ranks(with_dcp, 2, str(tmp_path)):
        assert "gather_state()" in refused
        assert all(torch.equal(loaded[name], p) for name, p in never_saved.items())


# An owner that fails


def failing(rank: int, world: int, how: str) -> Any:
    """Rank 1 cannot transform its matrices in one step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = Net().double()
    module: Any = net
    if how.startswith("fsdp"):
        fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    else:
        module = nn.parallel.DistributedDataParallel(net)
    optimizer = chain(net, EXACT)
    if how.startswith("shared"):
        optimizer.share_matrices(exact=True)
    elif how.startswith("owners"):
        offbeat.reduce_to_owners(optimizer, module, exact=True)
    if how.endswith("rounds"):
        exchange.ROUND_BYTES = 1
    whole, answers = muon_module.newton_schulz, []

    def out_of_memory(x: torch.Tensor, *args: Any) -> torch.Tensor:
        if rank == 1:
            raise MemoryError("no memory left")
        return whole(x, *args)

    for step in range(4):
        module(data(step, world)[rank]).square().mean().backward()
        if step == 2:
            before = copy.deepcopy(values(net)), [s.clone() for s in momentum(optimizer)]
            muon_module.newton_schulz = out_of_memory
            try:
                optimizer.step()
                answers.append("nothing")
            except RuntimeError as error:
                answers.append(f"{error} <- {type(error.__cause__).__name__}")
            muon_module.newton_schulz = whole
            same = [torch.equal(local(p), local(before[0][name])) for name, p in net.named_parameters()]
            same += [torch.equal(local(a), local(b)) for a, b in zip(momentum(optimizer), before[1], strict=True)]
            answers.append(all(same))
        if not how.endswith("rounds") or step < 2:
            optimizer.step()  # again, now with memory enough
        optimizer.zero_grad()
    return answers, {name: whole_of(p) for name, p in values(net).items()}


def momentum(optimizer: Any) -> list[torch.Tensor]:
    muon = optimizer.optimizers[0]
    return [muon.state[p]["momentum_buffer"] for p in muon.param_groups[0]["params"]]


def local(t: Any) -> torch.Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def whole_of(t: Any) -> torch.Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


@pytest.mark.parametrize("how", ["shared", "owners", "fsdp"])
def test_all_ranks_raise_if_an_owner_fails_and_nothing_has_changed(how):
    runs = run_ranks(failing, 3, how)
    expected = reference(3, EXACT, steps=4)
    for rank, ((said, unchanged), params) in enumerate(runs):
        assert "rank 1 (in the process group) could not be transformed" in said
        assert said.endswith("<- MemoryError" if rank == 1 else "<- NoneType")
        assert unchanged
        assert_near(params, expected, EXACT)  # the step that failed was taken again


@pytest.mark.parametrize("how", ["shared rounds", "owners rounds", "fsdp rounds"])
def test_an_owner_that_fails_in_one_of_several_rounds_leaves_all_ranks_alike(how):
    runs = run_ranks(failing, 3, how)
    for (said, _), params in runs:
        assert "could not be transformed" in said
        assert all(torch.equal(params[name], runs[0][1][name]) for name in params)
