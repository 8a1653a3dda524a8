"""How averaging behaves: late, in bounded memory, with policies and weights, and when ranks or the network differ."""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import offbeat
from offbeat.rules.rule import Slot, Surface
from offbeat.sync.undo import Undo
from offbeat.wire.peers import GroupPeers
from tests.scenarios import Scenarios
from tests.sync_reference import (
    adamw,
    batch,
    close,
    everyone,
    flat,
    flight_of,
    loss,
    make,
    sgd,
    simulate,
    train,
    wait_for_flight,
    write,
)

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("sync_behaviour"), pytest.mark.timeout(320)]

scenario = Scenarios(__name__)


@scenario(2, 4)
def late_averages(rank, world):
    """The difference the average made is added some steps later; nothing that was learnt meanwhile is lost."""
    everybody = [list(range(world))]
    for every, delay in ((4, 1), (4, 3), (4, 4), (1, 1), (5, 2)):
        for place in ("device", "cpu")[: 2 if delay == 3 else 1]:
            model = make()
            local = offbeat.LocalSGD(
                sgd(model.parameters()), model, every=every, warmup=2, subgroup=None, delay=delay, snapshot=place
            )
            addresses = [p.data_ptr() for p in model.parameters()]
            history = train(model, local, range(14), rank)
            due = lambda s, every=every: everybody if s >= 2 and (s - 2) % every == 0 else []  # noqa: E731
            close(history, simulate(world, 14, sgd, due, warmup=2, delay=delay), rank)
            assert [p.data_ptr() for p in model.parameters()] == addresses
            local.finish()
            assert all(torch.equal(one, flat(model)) for one in everyone(flat(model)))
    # A function may ask for the next average before the last has landed, which then lands first.
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=lambda s: 2, subgroup=None, delay=5)
    close(
        train(model, local, range(9), rank),
        simulate(world, 9, sgd, lambda s: everybody if s % 2 == 0 else [], delay=5),
        rank,
    )


@scenario(4)
def late_averages_in_a_hierarchy(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every={2: 2, 6: 4}, subgroup=None, delay=1)
    everybody, pairs = [[0, 1, 2, 3]], [[0, 1], [2, 3]]
    due = lambda s: everybody if s % 6 == 0 else pairs if s % 2 == 0 else []  # noqa: E731
    close(train(model, local, range(15), rank), simulate(4, 15, sgd, due, delay=1), rank)
    local.finish()
    assert all(torch.equal(one, flat(model)) for one in everyone(flat(model)))


@scenario(2)
def training_goes_on_meanwhile(rank, world):
    """Between launch and landing the link may be slow: steps do not wait, and the program's own collectives work."""
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=8, subgroup=None, delay=6)
    released = threading.Event()
    real = GroupPeers.all_reduce

    def slow(*args, **kwargs):
        assert threading.current_thread().name == "offbeat-rounds"
        assert released.wait(60)
        return real(*args, **kwargs)

    GroupPeers.all_reduce = slow
    try:
        history = []
        for step in range(6):
            history += train(model, local, range(step, step + 1), rank)
            total = torch.tensor([float(rank + step)])
            dist.all_reduce(total)  # on the group of all ranks, while the average is held up
            assert total.item() == 2 * step + 1
        assert not released.is_set()
        released.set()
        history += train(model, local, range(6, 9), rank)
    finally:
        released.set()
        GroupPeers.all_reduce = real
    close(history, simulate(2, 9, sgd, lambda s: [[0, 1]] if s % 8 == 0 else [], delay=6), rank)
    local.finish()


class Memory(TorchDispatchMode):
    """Bytes of storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given:
                self.made += t.untyped_storage().nbytes()
        return result


@scenario(2)
def bounded_memory(rank, world):
    """A model of 4 MB through a bucket of 0.25 MB; one tensor alone is larger than the bucket."""
    model = nn.Sequential(nn.Linear(600, 1000), nn.Linear(1000, 400), nn.Linear(400, 100))
    size = sum(p.numel() * p.itemsize for p in model.parameters())
    for p in model.parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(rank))
    mine = flat(model)
    mean = sum(everyone(mine)) / 2
    for delay in (0, 1):
        write_back(model, mine)
        local = offbeat.LocalSGD(
            torch.optim.SGD(model.parameters(), lr=0.0), model, every=2, subgroup=None, delay=delay, bucket_mb=0.25
        )
        for _ in range(delay + 1):
            with Memory() as memory:
                local.step()
                if delay:
                    wait_for_flight(local)
            limit = 0.25 * 2**20 + 4096 + (size if delay else 0)
            assert memory.made <= limit, (memory.made, limit)
        torch.testing.assert_close(flat(model), mean)
        with Memory() as memory:  # everything is reused
            for _ in range(2 * 2):
                local.step()
            local._tracks.land()
        assert memory.made <= 4096, memory.made
        # A ring all-reduce of two ranks sends every byte once.
        assert local.bytes_sent == size * local.syncs
    averager = offbeat.PeriodicModelAverager(2, bucket_mb=0.25)
    with Memory() as memory:
        averager.average_parameters(model.parameters())
    assert memory.made <= 0.25 * 2**20 + 4096
    assert averager.bytes_sent == size


def write_back(model: nn.Module, vector: torch.Tensor) -> None:
    with torch.no_grad():
        start = 0
        for p in model.parameters():
            p.copy_(vector[start : start + p.numel()].view_as(p))
            start += p.numel()


@scenario(2)
def odd_tensors(rank, world):
    """Dtypes, layouts, sizes: all averaged, each in its own dtype, wherever it lies."""

    def tensors() -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(rank)
        base = torch.randn(40, 30, generator=g)
        return [
            torch.randn(8, 3, 5, 5, generator=g).to(memory_format=torch.channels_last),
            torch.randn(17, 23, generator=g).t(),
            base[3:20, 2:19],  # gaps in memory
            torch.randn(100, 64, generator=g).to(torch.bfloat16),
            torch.randn(9, generator=g).half(),
            torch.randn(7, 3, generator=g, dtype=torch.float64),
            torch.randn(5, 5, generator=g, dtype=torch.complex64),
            torch.randn((), generator=g),
            torch.randn(0, 4, generator=g),
            torch.randn(1, generator=g),
        ]

    both: list[Any] = [None, None]
    dist.all_gather_object(both, tensors())
    expected = [(a / 2 + b / 2).to(a.dtype) for a, b in zip(*both, strict=True)]
    for bucket_mb in (0.0001, 0.001, 32):
        for delay in (0, 1):
            params = nn.ParameterList([nn.Parameter(t) for t in tensors()])
            addresses = [p.data_ptr() for p in params]
            strides = [p.stride() for p in params]
            local = offbeat.LocalSGD(
                torch.optim.SGD(params, lr=0.0), params, every=4, subgroup=None, bucket_mb=bucket_mb, delay=delay
            )
            for _ in range(delay + 1):
                local.step()
            for p, value in zip(params, expected, strict=True):
                # A late difference is rounded once when it is taken and once when it is added, by numbers up to 4.
                rounding = 2 * 4 * torch.finfo(p.dtype).eps if delay else 0.0
                torch.testing.assert_close(p.detach(), value, rtol=0, atol=rounding)
            assert [p.data_ptr() for p in params] == addresses
            assert [p.stride() for p in params] == strides
    # Half precision may travel in float32, where the sum of many does not lose digits.
    params = nn.ParameterList([nn.Parameter(torch.tensor([1.0 + rank / 128]).bfloat16())])
    local = offbeat.LocalSGD(
        torch.optim.SGD(params, lr=0.0), params, every=4, subgroup=None, reduce_dtype=torch.float32
    )
    local.step()
    assert params[0].item() == torch.tensor(1 + 1 / 256).bfloat16().item()
    assert local.bytes_sent == 4


@scenario(2)
def ranks_that_differ(rank, world):
    """In shapes, dtypes, names, requires_grad, or steps: the same error everywhere, and nothing is changed."""

    def check(module: nn.Module, words: str, optimizer: Any = None) -> None:
        local = optimizer or offbeat.LocalSGD(torch.optim.SGD(module.parameters(), lr=0.0), module, subgroup=None)
        before = [p.detach().clone() for p in module.parameters()]
        with pytest.raises(offbeat.Disagreement, match=words) as caught:
            local.step()
        said: list[Any] = [None] * world
        dist.all_gather_object(said, str(caught.value))
        assert said[0] == said[1]
        assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))

    check(nn.Linear(3, 4 + rank), r"'weight' differs.*rank 0: .*\(4, 3\).*rank 1: .*\(5, 3\)")
    check(nn.Linear(3, 4, dtype=(torch.float32, torch.float64)[rank]), "float32.*float64")
    check(nn.Linear(3, 4, bias=rank == 0), "rank 0: 'bias'.*rank 1: nothing more")
    module = nn.Linear(3, 4)
    module.weight.requires_grad_(rank == 0)
    check(module, "rank 0: 'weight'.*rank 1: 'bias'")
    check(nn.Sequential(nn.Linear(3, 4)) if rank else nn.Linear(3, 4), "the names differ")
    module = nn.Linear(3, 4)
    local = offbeat.LocalSGD(torch.optim.SGD(module.parameters(), lr=0.0), module, every=2, subgroup=None)
    local._calendar.step = 2 * rank
    check(module, "rank 0 at step 0, rank 1 at step 2", local)
    averager = offbeat.PeriodicModelAverager(2)
    with pytest.raises(offbeat.Disagreement, match=r"'parameter 0' differs"):
        averager.average_parameters([nn.Parameter(torch.zeros(2 + rank))])
    # Found later too: parameters are compared at every sync.
    module = nn.Linear(3, 4)
    local = offbeat.LocalSGD(torch.optim.SGD(module.parameters(), lr=0.0), module, every=1, subgroup=None, delay=1)
    local.step()
    local.step()
    if rank == 1:
        local.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    local.step()
    with pytest.raises(offbeat.Disagreement, match="rank 1: 'parameter 0 of group 1'"):
        local.step()


@scenario(2)
def gradients_do_not_decide(rank, world):
    """Parameters without a gradient, on one rank or on all, are averaged; frozen ones that never moved are not."""
    for make_optimizer in (
        lambda opt, holder: offbeat.LocalSGD(opt, holder, every=2, subgroup=None),
        lambda opt, holder: offbeat.PostLocalSGDOptimizer(opt, offbeat.PeriodicModelAverager(2)),
    ):
        holder = nn.ParameterList([nn.Parameter(torch.full((3,), float(rank))) for _ in range(3)])
        holder[2].requires_grad_(False)
        optimizer = make_optimizer(torch.optim.SGD(holder.parameters(), lr=0.0), holder)
        if rank == 0:
            holder[0].sum().backward()
        optimizer.step()
        assert [p.tolist()[0] for p in holder] == [0.5, 0.5, float(rank)]
    # Frozen between two averages, after it has moved: averaged all the same, or it would differ for good.
    holder = nn.ParameterList([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))])
    local = offbeat.LocalSGD(torch.optim.SGD(holder.parameters(), lr=1.0), holder, every=2, subgroup=None)
    for step in range(3):
        (sum(p.sum() for p in holder) * float(rank)).backward()
        local.step()
        local.zero_grad()
        if step == 1:
            holder[0].requires_grad_(False)
    assert torch.equal(*everyone(holder[0].detach()))


@scenario(2)
def overflows_on_one_rank(rank, world):
    """A GradScaler skips that rank's step, and nobody's average: with DDP and without, any inner optimizer."""
    kinds: list[Any] = [
        lambda params: torch.optim.SGD(params, lr=0.1),
        lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
        lambda params: offbeat.SGD(params, lr=0.1),
        lambda params: offbeat.AdamW(params, lr=0.1, foreach=False),
    ]

    overflow = {1: (0,), 3: (1,), 4: (0,), 5: (1,), 7: (0, 1)}  # step: the ranks that overflow
    for inner in kinds:
        for wrap in (lambda m: m, DistributedDataParallel):
            start = make(dtype=torch.float32)
            for index in range(2):
                model = copy.deepcopy(start)
                module: Any = wrap(model)
                if index == 0:
                    optimizer: Any = offbeat.LocalSGD(
                        inner(model.parameters()), module, every=3, warmup=2, subgroup=None
                    )
                elif module is model:
                    continue  # the hook needs DDP
                else:
                    state = offbeat.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False)
                    module.register_comm_hook(state, offbeat.post_local_sgd_hook)
                    averager = offbeat.PeriodicModelAverager(3, 2)
                    optimizer = offbeat.PostLocalSGDOptimizer(inner(model.parameters()), averager)
                scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
                reference = [copy.deepcopy(start) for _ in range(2)]
                plain = [inner(m.parameters()) for m in reference]
                for step in range(10):
                    x = batch(step, rank, torch.float32)
                    value = loss(module, x)
                    value = value * (float("inf") if rank in overflow.get(step, ()) else 1.0)
                    scaler.scale(value).backward()
                    if step % 2:
                        scaler.unscale_(optimizer)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    bad = overflow.get(step, ())
                    for r, m in enumerate(reference):
                        loss(m, batch(step, r, torch.float32)).backward()
                    if step < 2:
                        for p, q in zip(*(m.parameters() for m in reference), strict=True):
                            p.grad = (p.grad + q.grad) / 2
                            q.grad = p.grad.clone()
                    for r, opt in enumerate(plain):
                        if r not in bad and not (step < 2 and bad):
                            opt.step()
                        opt.zero_grad()
                    if step >= 2 and (step - 2) % 3 == 0:
                        mean = (flat(reference[0]) + flat(reference[1])) / 2
                        for m in reference:
                            write(m, mean)
                    torch.testing.assert_close(flat(model), flat(reference[rank]), rtol=2e-5, atol=1e-6)
                    agreed = step < 2 or (step - 2) % 3 == 0
                    assert torch.equal(*everyone(flat(model))) is agreed, (step, rank)
                steps = optimizer.steps if isinstance(optimizer, offbeat.LocalSGD) else optimizer.averager.step
                assert steps == 10


@scenario(2)
def overflows_under_overlap(rank, world):
    """An overlapped optimizer with the scaler given to overlap(), before LocalSGD is made or after."""
    results = []
    for overlap in ("before", "after", None):
        model = make(dtype=torch.float32)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        inner = offbeat.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
        if overlap == "before":
            offbeat.overlap(inner, ddp, scaler=scaler)
        local = offbeat.LocalSGD(inner, ddp, every=3, warmup=2, subgroup=None)
        if overlap == "after":
            offbeat.overlap(inner, ddp, scaler=scaler)
        history = []
        for step in range(10):
            bad = rank in {1: (0,), 3: (1,), 5: (0,), 6: (1,)}.get(step, ())
            value = loss(ddp, batch(step, rank, torch.float32)) * (float("inf") if bad else 1.0)
            scaler.scale(value).backward()
            if step % 2:
                scaler.unscale_(local)
            scaler.step(local)
            scaler.update()
            local.zero_grad()
            history.append(flat(model))
            assert torch.equal(*everyone(history[-1])) is (step < 2 or (step - 2) % 3 == 0)
        assert local.steps == 10
        results.append((history, scaler.get_scale()))
    for history, scale in results:
        assert all(torch.equal(a, b) for a, b in zip(history, results[-1][0], strict=True))
        assert scale == 1024 / 2 ** (2 + rank)


@scenario(2)
def warmup_of_hook_and_averager(rank, world):
    """Two counters that do not fit raise before anything is averaged by nobody."""

    def parts(start: int, warmup: int) -> Any:
        ddp = DistributedDataParallel(make())
        state = offbeat.PostLocalSGDState(None, None, start, post_local_gradient_allreduce=False)
        ddp.register_comm_hook(state, offbeat.post_local_sgd_hook)
        averager = offbeat.PeriodicModelAverager(4, warmup)
        return ddp, state, offbeat.PostLocalSGDOptimizer(sgd(ddp.parameters()), averager)

    for start, warmup in ((3, 5), (5, 3)):
        ddp, state, optimizer = parts(start, warmup)
        with pytest.raises(ValueError, match=f"after {start} steps .* averager after {warmup}"):
            train(ddp, optimizer, range(1), rank)
    ddp, state, optimizer = parts(4, 4)
    loss(ddp, batch(0, rank)).backward()
    loss(ddp, batch(1, rank)).backward()  # two passes, one step, and no no_sync()
    with pytest.raises(RuntimeError, match="has counted 2 backward passes, but the averager 1 steps"):
        optimizer.step()
    ddp, state, optimizer = parts(4, 4)
    for step in range(6):
        with ddp.no_sync():
            loss(ddp, batch(step, rank)).backward()
        train(ddp, optimizer, range(step, step + 1), rank)
    # A checkpoint from before, loaded into the running program: the hook goes back with the averager.
    ddp, state, optimizer = parts(4, 4)
    early = copy.deepcopy(optimizer.state_dict())
    train(ddp, optimizer, range(7), rank)
    assert state.iter == 4
    optimizer.load_state_dict(early)
    assert (state.iter, optimizer.averager.step) == (0, 0)


@scenario(2)
def state_policies(rank, world):
    def after(policy: Any, library: Any, name: str = "AdamW", **options: Any) -> Any:
        model = make()
        inner = getattr(library, name)(model.parameters(), lr=0.01, **options)
        local = offbeat.LocalSGD(inner, model, every=4, state=policy, subgroup=None)
        train(model, local, range(4), rank)
        before = [{k: v.clone() for k, v in inner.state[p].items()} for p in model.parameters()]
        loss(model, batch(4, rank)).backward()
        local.step()
        return before, [inner.state.get(p, {}) for p in model.parameters()], local, model

    for library in (torch.optim, offbeat):
        _, state, *_ = after("keep", library)
        for one in state:
            assert not torch.equal(*everyone(one["exp_avg"]))
        _, state, *_ = after("average", library)
        for one in state:
            assert torch.equal(*everyone(one["exp_avg"]))
            assert torch.equal(*everyone(one["exp_avg_sq"]))
            assert one["step"].item() == 5
        _, state, local, model = after("reset", library)
        assert not any(state)
        train(model, local, range(5, 7), rank)
        assert all(int(local.state[p]["step"]) == 2 for p in model.parameters())
        _, state, *_ = after({"exp_avg": "average", "exp_avg_sq": "keep"}, library)
        for one in state:
            assert torch.equal(*everyone(one["exp_avg"]))
            assert not torch.equal(*everyone(one["exp_avg_sq"]))
        _, state, local, model = after({"momentum_buffer": "reset"}, library, "SGD", momentum=0.9)
        assert all(not one["momentum_buffer"].any() for one in state)
        train(model, local, range(5, 6), rank)
        assert all(local.state[p]["momentum_buffer"].any() for p in model.parameters())
    # The mean is the mean: after one step a moment is a tenth of the gradient.
    model = make()
    local = offbeat.LocalSGD(adamw(model.parameters()), model, state="average", subgroup=None)
    loss(model, batch(0, rank)).backward()
    means = [sum(everyone(0.1 * p.grad)) / 2 for p in model.parameters()]
    local.step()
    for p, mean in zip(model.parameters(), means, strict=True):
        torch.testing.assert_close(local.state[p]["exp_avg"], mean, rtol=1e-12, atol=1e-14)
    for policy, words in (("mean", "must be one of"), ({"exp_avg": "zero"}, r"state\['exp_avg'\] must be one of")):
        with pytest.raises(ValueError, match=words):
            offbeat.LocalSGD(adamw(model.parameters()), model, state=policy)
    with pytest.raises(ValueError, match="negative"):
        offbeat.LocalSGD(adamw(model.parameters()), model, state="average", delay=2)


class Odd(torch.optim.Optimizer):
    """An optimizer nobody knows, with a momentum, a count and a list."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state.setdefault("velocity", torch.zeros_like(p)).add_(p.grad)
                state["count"] = state.get("count", 0) + 1
                state.setdefault("history", []).append(state["count"])
                p -= 0.1 * state["velocity"]


@scenario(2)
def state_keys_are_checked(rank, world):
    """A misspelt key raises on every rank: at once where a rule knows the keys, else when a rank has state."""
    model = make()
    cases = [
        (offbeat.AdamW, {}, "exp_avgg", "'exp_avg', 'exp_avg_sq', 'step'"),
        (torch.optim.AdamW, {}, "exp_avgg", "'exp_avg', 'exp_avg_sq', 'step'"),
        (offbeat.AdamW, {"state_dtype": "8bit"}, "exp_avg_8bit", "'exp_avg', 'exp_avg_sq', 'step'"),
        (offbeat.AdamW, {}, "max_exp_avg_sq", "'exp_avg', 'exp_avg_sq', 'step'"),
        (offbeat.SGD, {}, "momentum_buffer", "its hyperparameters need none"),
    ]
    for cls, options, key, there in cases:
        for policy in ("reset", "keep", "average"):
            with pytest.raises(ValueError, match=rf"state\['{key}'\] .* {cls.__name__} does not have: .*{there}"):
                offbeat.LocalSGD(cls(model.parameters(), **options), model, state={key: policy})
    for policy in ("average", {"exp_avg": "average"}):
        with pytest.raises(TypeError, match="'exp_avg' of AdamW is stored as 8-bit codes"):
            offbeat.LocalSGD(offbeat.AdamW(make().parameters(), state_dtype="8bit"), model, state=policy)

    class MyAdagrad(torch.optim.Adagrad):
        """Known to start from its parent's values, but it may have keys of its own."""

    for cls, key, words in (
        (Odd, "velocityy", r"Odd does not have: it has 'count', 'history', 'velocity'"),
        (MyAdagrad, "summ", r"MyAdagrad does not have: it has 'step', 'sum'"),
        (Odd, "history", r"'history' of Odd is neither a tensor nor a number"),
    ):
        for delay in (0, 1):
            model = make()
            local = offbeat.LocalSGD(cls(model.parameters()), model, subgroup=None, delay=delay, state={key: "reset"})
            if rank == 0:  # the other rank has no state yet, and raises the same
                loss(model, batch(0, rank)).backward()
            before = flat(model)
            if delay:
                local.step()
                local.zero_grad()
            with pytest.raises((ValueError, TypeError), match=words):
                local.step()
            assert rank == 0 or torch.equal(flat(model), before)
    # Nobody has state: nothing is known, and nothing is wrong.
    local = offbeat.LocalSGD(Odd(model.parameters()), model, subgroup=None, state={"velocity": "reset"})
    local.step()


@scenario(2)
def state_is_reset_to_its_initial_values(rank, world):
    """The rule says what they are, also for torch's classes; of others, tensors and numbers become zero."""

    def after(cls: Any, policy: Any, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
        model = make(dtype=dtype)
        inner = cls(model.parameters(), **options)
        local = offbeat.LocalSGD(inner, model, every=3, state=policy, subgroup=None)
        for step in range(4):
            local.zero_grad()
            loss(model, batch(step, rank, dtype)).backward()
            local.step()
        return model, inner, local

    for library in (torch.optim, offbeat):
        for name, options, initial in (
            ("Adagrad", {"initial_accumulator_value": 0.5}, {"sum": 0.5, "step": 0}),
            ("Rprop", {"lr": 0.03}, {"step_size": 0.03, "prev": 0}),
            ("NAdam", {}, {"mu_product": 1, "exp_avg": 0}),
            ("ASGD", {"lr": 0.02}, {"eta": 0.02, "mu": 1, "ax": 0}),
        ):
            _, inner, _ = after(getattr(library, name), dict.fromkeys(initial, "reset"), **options)
            for entry in inner.state.values():
                for key, value in initial.items():
                    want = torch.full_like(torch.as_tensor(entry[key]), value)
                    torch.testing.assert_close(torch.as_tensor(entry[key]), want, rtol=1e-6, atol=0)
        # A reset as a whole is a new optimizer, also where state is made when the optimizer is.
        for name in ("Adagrad", "AdamW", "Rprop"):
            model, _, local = after(getattr(library, name), "reset", lr=0.01)
            fresh = copy.deepcopy(model)
            other = getattr(library, name)(fresh.parameters(), lr=0.01)
            for module, optimizer in ((model, local), (fresh, other)):
                optimizer.zero_grad()
                loss(module, batch(9, rank)).backward()
                optimizer.step()
            torch.testing.assert_close(flat(model), flat(fresh), rtol=0, atol=0)
    _, inner, _ = after(Odd, {"velocity": "reset", "count": "reset"})
    for entry in inner.state.values():
        assert not entry["velocity"].any()
        assert entry["count"] == 0

    # A rule of the user's own, whose state starts at one.
    rule = dataclasses.replace(
        offbeat.SGD.rule, name="Ones", slots=lambda h: (Slot("momentum_buffer", init=1.0),), surface=Surface()
    )

    class Ones(offbeat.RuleOptimizer, rule=rule):
        pass

    _, inner, _ = after(Ones, {"momentum_buffer": "reset"}, momentum=0.9)
    assert all(torch.equal(e["momentum_buffer"], torch.ones_like(e["momentum_buffer"])) for e in inner.state.values())

    # 8-bit state under its plain name: codes and scales both.
    _, inner, _ = after(
        offbeat.AdamW, {"exp_avg": "reset", "exp_avg_sq": "keep"}, torch.float32, lr=0.01, state_dtype="8bit"
    )
    for entry in inner.state.values():
        assert not entry["exp_avg_8bit"].any()
        assert not entry["exp_avg_scale"].any()
        assert entry["exp_avg_sq_8bit"].any()
        assert entry["exp_avg_sq_scale"].all()


@scenario(2)
def a_momentum_that_was_reset_begins_anew(rank, world):
    """With dampening SGD's first step differs; after a reset the next step is a first step."""
    for cls, options, dtype in (
        (torch.optim.SGD, {}, torch.float64),
        (torch.optim.SGD, {"foreach": False}, torch.float64),
        (offbeat.SGD, {}, torch.float64),
        (offbeat.SGD, {"foreach": False}, torch.float64),
        (offbeat.SGD, {"state_dtype": "8bit"}, torch.float32),
    ):
        model = make(dtype=dtype)
        inner = cls(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, **options)
        local = offbeat.LocalSGD(inner, model, every=3, subgroup=None, state={"momentum_buffer": "reset"})
        for step in range(4):  # averaged after steps 0 and 3
            local.zero_grad()
            loss(model, batch(step, rank, dtype)).backward()
            local.step()
        local.zero_grad()
        loss(model, batch(4, rank, dtype)).backward()
        before, gradient = flat(model), torch.cat([p.grad.flatten() for p in model.parameters()])
        local.step()
        torch.testing.assert_close(flat(model), before - 0.1 * gradient)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


@scenario(2)
def buffer_policies(rank, world):
    """BatchNorm's statistics after an average, and between averages each rank's own."""
    for policy in ("average", "broadcast", "keep"):
        for delay in (0, 2):
            torch.manual_seed(0)
            model = Norm()
            ddp = DistributedDataParallel(model)
            inner = torch.optim.SGD(model.parameters(), lr=0.01)
            local = offbeat.LocalSGD(inner, ddp, every=4, warmup=2, buffers=policy, subgroup=None, delay=delay)
            for step in range(9):
                if step == 3:
                    model.scratch.fill_(rank)  # not persistent: nobody's business
                launches = step in (2, 6)
                x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank)) + rank
                ddp(x).square().mean().backward()
                before = everyone(model.norm.running_var.clone())
                if launches:
                    sent = before
                local.step()
                local.zero_grad()
                now = everyone(model.norm.running_var.clone())
                landed = step in (2 + delay, 6 + delay)
                if policy == "keep" or not landed:
                    assert torch.equal(now[rank], before[rank])  # step() left them alone
                elif policy == "average":
                    torch.testing.assert_close(now[rank], (sent[0] + sent[1]) / 2)
                else:
                    assert torch.equal(now[rank], sent[0])
                assert int(model.norm.num_batches_tracked) == step + 1
                if step == 3:  # DDP would have broadcast rank 0's at the beginning of this step's forward
                    assert not torch.equal(*now)
            assert model.scratch[0].item() == rank
            assert ddp.broadcast_buffers is False
    ddp = DistributedDataParallel(Norm())
    offbeat.LocalSGD(sgd(ddp.parameters()), ddp, warmup=3)
    ddp(torch.randn(5, 6))
    assert ddp.broadcast_buffers is True
    with pytest.raises(ValueError, match="buffers must be one of"):
        offbeat.LocalSGD(sgd(ddp.parameters()), ddp, buffers="mean")


@scenario(2)
def weights(rank, world):
    """Ranks count by what they have seen since the last average, in the background too."""
    amounts = [[3.0, 1.0], [2.0, 6.0], [0.0, 5.0], [4.0, 4.0], [1.0, 0.0], [2.0, 2.0], [7.0, 1.0]]
    for delay in (0, 1):
        model = make()
        local = offbeat.LocalSGD(sgd(model.parameters()), model, every=2, weighted=True, subgroup=None, delay=delay)
        history = []
        for step in range(7):
            local.seen(amounts[step][rank])
            history += train(model, local, range(step, step + 1), rank)

        def weight(r, step):
            return amounts[step][r] + (amounts[step - 1][r] if step else 0)

        expected = simulate(2, 7, sgd, lambda s: [[0, 1]] if s % 2 == 0 else [], weight=weight, delay=delay)
        close(history, expected, rank)
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, weighted=True, subgroup=None)
    with pytest.raises(ValueError, match="no rank has a weight"):
        train(model, local, range(1), rank)
    with pytest.raises(ValueError, match="non-negative"):
        local.seen(-1)
    with pytest.raises(ValueError, match="weighted=True"):
        offbeat.LocalSGD(sgd(model.parameters()), model, subgroup=None).seen(3)
    # A rank that does not count may hold anything.
    model = make()
    if rank == 1:
        write_back(model, torch.full_like(flat(model), float("nan")))
    local = offbeat.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.0), model, weighted=True, subgroup=None)
    local.seen(1 - rank)
    local.step()
    assert torch.equal(flat(model), flat(make()))


@scenario(2, 4)
def ranks_without_data(rank, world):
    """Ranks run out at different steps; nobody hangs, and all end with the same parameters."""
    batches = [11, 6, 7, 2][rank] if world == 4 else [9, 4][rank]
    total = [11, 6, 7, 2][:world] if world == 4 else [9, 4]
    for delay in (0, 2):
        for weighted in (False, True):
            model = make()
            local = offbeat.LocalSGD(
                sgd(model.parameters()), model, every=4, subgroup=None, delay=delay, weighted=weighted
            )
            for step in range(batches):
                if weighted:
                    local.seen(3 + rank)
                train(model, local, range(step, step + 1), rank)
            local.finish()
            mine = flat(model)
            assert all(torch.equal(one, mine) for one in everyone(mine))
            assert local.steps == max(total)
            if delay == 0 and not weighted:
                torch.testing.assert_close(mine, uneven(total), rtol=1e-11, atol=1e-12)
    if world == 4:
        model = make()
        local = offbeat.LocalSGD(sgd(model.parameters()), model, every={2: 2, 4: 4}, subgroup=None)
        train(model, local, range(batches), rank)
        local.finish()
        assert all(torch.equal(one, flat(model)) for one in everyone(flat(model)))


def uneven(total: list[int]) -> torch.Tensor:
    """Ranks count in the average after their last step, and no more after it."""
    models = [make() for _ in total]
    optimizers = [sgd(m.parameters()) for m in models]
    moved = [False] * len(total)
    for step in range(100):
        for r, m in enumerate(models):
            if step < total[r]:
                train(m, optimizers[r], range(step, step + 1), r)
                moved[r] = True
        if step % 4 == 0:
            counting = [flat(m) for r, m in enumerate(models) if moved[r] or step < total[r]]
            if counting:
                mean = sum(counting) / len(counting)
                for m in models:
                    write(m, mean)
            moved = [False] * len(total)
            if step >= max(total):
                return flat(models[0])
    raise AssertionError("the schedule never came to an end")


@scenario(2)
def ranks_without_data_under_join(rank, world):
    """torch's Join, with DDP (warm-up and all) and without."""
    for wrap in (DistributedDataParallel, lambda m: m):
        model = make()
        module: Any = wrap(model)
        local = offbeat.LocalSGD(sgd(model.parameters()), module, every=3, warmup=4, subgroup=None)
        joining = [module, local] if isinstance(module, DistributedDataParallel) else [local]
        steps = 12 if rank == 0 else 7
        with Join(joining):
            train(module, local, range(steps), rank)
        assert torch.equal(*everyone(flat(model)))
        assert local.steps == 12
    # Also in warm-up: who has data goes on with gradients that count the others as zero.
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=3, warmup=9, subgroup=None)
    with Join([local]):
        train(model, local, range(6 if rank == 0 else 3), rank)
    assert torch.equal(*everyone(flat(model)))


@scenario(2)
def save_load_go_on(rank, world):
    """In the middle of a period, of a delayed average, of warm-up: to the bit as if nothing had happened."""
    for options in (
        {"every": 4, "warmup": 3},
        {"every": 4, "warmup": 3, "delay": 3},
        {"every": 4, "warmup": 3, "delay": 3, "snapshot": "cpu"},
        {"every": lambda s: 3 if s < 8 else 5, "warmup": lambda s: s < 2, "delay": 2},
        {"every": 3, "weighted": True},
        {"every": {2: 1, 4: 2}, "delay": 1},
    ):
        for at in (2, 5, 9):
            finals = []
            for stop in (False, True):
                torch.manual_seed(0)
                model = Norm().double()
                ddp = DistributedDataParallel(model)
                local = offbeat.LocalSGD(adamw(model.parameters()), ddp, subgroup=None, **options)
                for step in range(16):
                    if stop and step == at:
                        saved = copy.deepcopy((model.state_dict(), local.state_dict()))
                        loss(ddp, batch(99, rank)).backward()  # what comes after is forgotten
                        local.step()
                        torch.manual_seed(1)
                        model = Norm().double()
                        ddp = DistributedDataParallel(model)
                        local._tracks.abandon()
                        local = offbeat.LocalSGD(adamw(model.parameters()), ddp, subgroup=None, **options)
                        model.load_state_dict(saved[0])
                        local.load_state_dict(saved[1])
                    if options.get("weighted"):
                        local.seen(step + rank)
                    train(ddp, local, range(step, step + 1), rank)
                local.finish()
                finals.append(torch.cat([flat(model), model.norm.running_mean, model.norm.running_var]))
            assert torch.equal(*finals), (options, at)


@scenario(2)
def loading_what_others_saved(rank, world):
    model = make()
    local = offbeat.LocalSGD(adamw(model.parameters()), model, every=4, warmup=2, subgroup=None, delay=3)
    train(model, local, range(8), rank)
    saved = copy.deepcopy(local.state_dict())
    post = offbeat.PostLocalSGDOptimizer(adamw(make().parameters()), offbeat.PeriodicModelAverager(4, 2))
    with pytest.warns(UserWarning, match="in flight, which PostLocalSGDOptimizer cannot apply"):
        post.load_state_dict(saved)
    assert post.averager.step == 8
    plain = torch.optim.AdamW(make().parameters())
    plain.load_state_dict({key: saved[key] for key in ("state", "param_groups")})
    other = make()
    again = offbeat.LocalSGD(adamw(other.parameters()), other, every=4, warmup=2, subgroup=None)
    again.load_state_dict(post.state_dict())
    assert again.steps == 8
    with pytest.warns(UserWarning, match="does not contain a step counter"):
        again.load_state_dict(plain.state_dict())
    assert again.steps == 0
    # An average under way for another model: refused, and nothing is changed.
    small = nn.Linear(6, 3).double()
    one = offbeat.LocalSGD(adamw(small.parameters()), small, every=4, subgroup=None, delay=3)
    train(small, one, range(2), rank)
    before = copy.deepcopy(one.state_dict())
    with pytest.raises(ValueError, match=r"average in flight for '0\.weight'"):
        one.load_state_dict(saved)
    assert one.steps == 2
    assert str(one.state_dict()) == str(before)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(local)
    local.finish()


@scenario(2)
def collectives_that_fail(rank, world):
    """In the first, a middle and the last bucket, at once and late: parameters are as they were before the sync."""
    real = GroupPeers.all_reduce

    def failing(at: int) -> Any:
        calls = [0]

        def all_reduce(*args, **kwargs):
            calls[0] += 1
            if calls[0] == at:
                raise dist.DistBackendError("the network is gone")
            return real(*args, **kwargs)

        return all_reduce

    module = Norm()
    for p in (*module.parameters(), module.norm.running_mean):
        nn.init.normal_(p, generator=torch.Generator().manual_seed(rank))
    kept = [t.clone() for t in (*module.parameters(), *module.buffers())]
    for undo in ("auto", "disk", "memory"):
        for at in (1, 2, 3, 5):
            local = offbeat.LocalSGD(
                torch.optim.SGD(module.parameters(), lr=0.0),
                module,
                every=2,
                subgroup=None,
                bucket_mb=0.0002,
                undo=undo,
            )
            GroupPeers.all_reduce = failing(at)
            try:
                with pytest.raises(dist.DistBackendError, match="network"):
                    local.step()
            finally:
                GroupPeers.all_reduce = real
            now = [*module.parameters(), *module.buffers()]
            assert all(torch.equal(a, b) for a, b in zip(now, kept, strict=True)), (undo, at)
            assert local.steps == 1  # the step was made
            dist.barrier()
    local = offbeat.LocalSGD(
        torch.optim.SGD(module.parameters(), lr=0.0), module, every=3, subgroup=None, bucket_mb=0.0002, delay=2
    )
    GroupPeers.all_reduce = failing(4)
    try:
        local.step()
        local.step()
        with pytest.raises(dist.DistBackendError, match="network"):
            local.step()
    finally:
        GroupPeers.all_reduce = real
    now = [*module.parameters(), *module.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(now, kept, strict=True))
    dist.barrier()
    local.step()  # and the next one works, once the network is back
    local.step()
    local.step()
    mean = sum(everyone(flat(module))) / 2
    torch.testing.assert_close(flat(module), mean)
    averager = offbeat.PeriodicModelAverager(2, bucket_mb=0.0002)
    write_back(module, torch.cat([t.reshape(-1) for t in kept[: len(list(module.parameters()))]]))
    GroupPeers.all_reduce = failing(2)
    try:
        with pytest.raises(dist.DistBackendError, match="network"):
            averager.average_parameters(module.parameters())
    finally:
        GroupPeers.all_reduce = real
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), kept, strict=False))
    assert averager.step == 1
    dist.barrier()


@scenario(2)
def an_interrupted_wait(rank, world):
    """Whoever interrupts the program while it waits for an average can go on: it lands the next time."""
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=4, subgroup=None, delay=2)
    train(model, local, range(2), rank)
    driver = local._tracks._driver
    driver.wait = lambda one: (_ for _ in ()).throw(KeyboardInterrupt)
    loss(model, batch(2, rank)).backward()
    with pytest.raises(KeyboardInterrupt):
        local.step()
    del driver.wait
    local.zero_grad()
    train(model, local, range(3, 4), rank)
    expected = simulate(2, 4, sgd, lambda s: [[0, 1]] if s == 0 else [], delay=3)
    close([flat(model)], [expected[3]], rank)


@scenario(2)
def nowhere_to_write(rank, world):
    """A record that cannot be written to disk is kept in memory, with a warning, and the average goes on."""
    import tempfile

    real = tempfile.TemporaryFile

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    module = Norm()
    nn.init.constant_(module.first.weight, float(rank))
    local = offbeat.LocalSGD(
        torch.optim.SGD(module.parameters(), lr=0.0), module, every=1, subgroup=None, bucket_mb=0.0002
    )
    tempfile.TemporaryFile = full
    try:
        with pytest.warns(UserWarning, match="No space left"):
            local.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            local.step()
    finally:
        tempfile.TemporaryFile = real
    assert (module.first.weight == 0.5).all()
    for where in ("disk", "memory"):  # what is written comes back
        undo, kept = Undo(where), [torch.randn(50), torch.randn(60).half()]
        for one in kept:
            undo.keep(one)
        for index, one in enumerate(kept):
            undo.recall(index, back := torch.empty_like(one))
            assert torch.equal(back, one)
        undo.clear()
        assert len(undo) == 0


@scenario(2)
def sync_at_will(rank, world):
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=5, subgroup=None, delay=2)
    train(model, local, range(4), rank)
    before = everyone(flat(model))
    assert not torch.equal(*before)
    local.sync()
    torch.testing.assert_close(flat(model), (before[0] + before[1]) / 2, rtol=1e-13, atol=1e-13)
    assert torch.equal(*everyone(flat(model)))


@scenario(2)
def dropped_in_the_middle(rank, world):
    """An optimizer may be dropped with an average under way, which then ends by itself."""
    model = make()
    local = offbeat.LocalSGD(sgd(model.parameters()), model, every=5, subgroup=None, delay=4)
    train(model, local, range(1), rank)
    flight, thread, gone = flight_of(local), local._tracks._driver._thread, weakref.ref(local)
    del local
    gc.collect()
    assert gone() is None
    thread.join(30)
    assert not thread.is_alive()
    assert flight.error is None
    assert flight.shares is not None
    assert flight.track.peers.group is None  # its connection is closed


@pytest.mark.parametrize(("world", "name"), scenario.cases)
def test_sync(world, name):
    scenario.check(world, name)
