"""The cost model, against arithmetic done here, a plain simulation of events, and published figures."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

import offbeat
from offbeat.plan import BACKWARD, Machine, Settings, estimate
from tests.test_docstrings import check

GBIT = 1e9 / 8


def simulated_step(compute, every, fragments, delay, exchange, local=0.0, periods=60):
    """The mean step of one replica whose rounds share one link, played event by event; half of it is start-up."""
    begins = {every * (f + 1) // fragments % every for f in range(fragments)}
    now = free = half = 0.0
    landings = {}
    for step in range(1, every * periods + 1):
        now += compute
        now = max(now, landings.pop(step, 0.0))
        if step % every in begins:
            now += local
            free = max(now, free) + exchange
            if delay:
                landings[step + delay] = free
            else:
                now = free
        if step == every * periods // 2:
            half = now
    return (now - half) / (every * periods / 2)


@pytest.mark.parametrize("gbit", [0.05, 0.3, 1.0, 4.0, 30.0])
@pytest.mark.parametrize(
    ("every", "fragments", "delay"),
    [(8, 1, 0), (8, 1, 3), (8, 1, 8), (32, 4, 0), (32, 4, 4), (32, 4, 8), (32, 4, 20), (32, 8, 32), (100, 5, 7)],
)
def test_a_step_takes_as_long_as_when_events_are_played(every, fragments, delay, gbit):
    params, compute, latency = 100_000_000, 0.12, 0.004
    exchange = params / fragments * 4 / (gbit * GBIT) + 3 * latency
    expected = simulated_step(compute, every, fragments, delay, exchange)
    found = estimate(
        params=params, step_seconds=compute, replicas=2, bandwidth=gbit * GBIT, latency=latency,
        every=every, fragments=fragments, delay=delay,
    )  # fmt: skip
    assert found.step_seconds == pytest.approx(expected, rel=1e-3)
    assert found.utilisation == pytest.approx(compute / expected, rel=1e-3)


@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 5), (4, 0), (4, 3)])
def test_a_replicas_own_work_comes_on_top(fragments, delay):
    params, seconds = 40_000_000, 2e-9
    machine = Machine(local={"diloco/float32": seconds})
    found = estimate(
        params=params, step_seconds=0.05, replicas=2, bandwidth=GBIT, every=32, fragments=fragments, delay=delay,
        machine=machine,
    )  # fmt: skip
    exchange = params / fragments * 4 / GBIT
    expected = simulated_step(0.05, 32, fragments, delay, exchange, local=params / fragments * seconds)
    assert found.step_seconds == pytest.approx(expected, rel=1e-3)


def test_sending_in_the_background_takes_the_processor_from_training():
    """All of the exchange is hidden, so that only the lost processor time is left."""
    machine = Machine(busy=1e-9)
    found = estimate(params=10**7, step_seconds=0.1, replicas=2, bandwidth=GBIT, every=10, delay=10, machine=machine)
    assert found.step_seconds == pytest.approx((10 * 0.1 + 4e7 * 1e-9) / 10)
    blocking = {"params": 10**7, "step_seconds": 0.1, "replicas": 2, "bandwidth": GBIT, "every": 10}
    # A round that training waits for takes nothing from it.
    assert estimate(**blocking, machine=machine) == estimate(**blocking)


def test_ddp_hides_what_fits_into_the_backward_pass():
    found = estimate(params=10**8, step_seconds=0.3, replicas=4, strategy="ddp", bandwidth=GBIT)
    assert found.bytes_per_step == found.peak_bytes == 2 * 3 / 4 * 4e8
    # The first bucket has been sent before the second one is ready; from then on the link is busy.
    first, second = 2**20 / 4e8, 26 * 2**20 / 4e8
    assert first * 6e8 / GBIT < 0.2 * (second - first)
    assert found.step_seconds == pytest.approx(0.1 + 0.2 * second + (1 - first) * 6e8 / GBIT)
    assert pytest.approx(2 / 3) == BACKWARD


@pytest.mark.parametrize("gbit", [0.1, 1, 10, 100, 1000])
@pytest.mark.parametrize("params", [1_000, 200_000, 2_000_000, 7_000_000, 50_000_000, 1_000_000_000])
def test_ddp_reduces_buckets_one_after_the_other(params, gbit):
    """Played bucket by bucket: the first of 1 MiB, others of 25 MiB; each is ready when its gradients are."""
    compute, size = 0.3, 4 * params
    buckets, left = [min(2**20, size)], size - min(2**20, size)
    while left:
        buckets.append(min(25 * 2**20, left))
        left -= buckets[-1]
    ready, free = compute / 3, 0.0
    for bucket in buckets:
        ready += compute * 2 / 3 * bucket / size
        free = max(ready, free) + bucket / (gbit * GBIT)
    found = estimate(params=params, step_seconds=compute, replicas=2, strategy="ddp", bandwidth=gbit * GBIT)
    assert found.step_seconds == pytest.approx(free, rel=1e-9)


@pytest.mark.parametrize(
    ("codec", "block", "block_bytes"),
    [("bf16", 1, 2), ("fp16", 256, 514), ("int8", 256, 258), ("int4", 64, 34), ("int2", 32, 10)],
)
def test_bytes_are_those_of_the_encoding(codec, block, block_bytes):
    """As docs/codecs.md has them: two ranks send their codes, more send those of parts to owners and back."""
    params = 2**24
    whole = estimate(params=params, step_seconds=1, replicas=2, bandwidth=1, every=8, codec=codec)
    assert whole.peak_bytes == 8 + params // block * block_bytes
    assert whole.bytes_per_step == whole.peak_bytes / 8
    part = math.ceil(params / 5)
    full, rest = divmod(part, block)
    encoded = full * block_bytes + (rest * block_bytes // block if rest == 0 else None or _tail(codec, rest))
    parts = estimate(params=params, step_seconds=1, replicas=5, bandwidth=1, every=8, codec=codec)
    # Parts are whole blocks, so that a part may be up to one block larger than a fifth.
    assert 2 * 4 * (8 + encoded) <= parts.peak_bytes <= 2 * 4 * (8 + encoded + block_bytes)


def _tail(codec, rest):
    return math.ceil(rest * {"fp16": 16, "int8": 8, "int4": 4, "int2": 2}[codec] / 8) + 2


def test_a_simulated_replica_sends_as_many_bytes():
    """The library's own count, of rounds over three simulated replicas."""
    import torch

    for settings in ({"codec": None}, {"codec": "int8"}, {"codec": "int4", "fragments": 4}):

        def replica(rank, peers, settings=settings):
            model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
            for p in model.parameters():
                torch.nn.init.constant_(p, 0.01)
            inner = offbeat.SGD(model.parameters(), lr=0.1)
            optimizer = offbeat.DiLoCo(inner, model, every=8, group=peers, subgroup=None, **settings)
            sent: list[int] = []
            optimizer.register_round_hook(lambda report: sent.append(report.bytes_sent.get("parameters", 0)))
            fragments = settings.get("fragments", 1)
            for _ in range(24):
                model(torch.ones(2, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            total = sum(sent[-2 * fragments :])  # of the last two periods
            optimizer.finish()
            return total / 16

        (counted, *_) = offbeat.Simulation(3).run(replica)
        found = estimate(params=8 * 64 * 64, step_seconds=1, replicas=3, bandwidth=1, every=8, **settings)
        # Parts of a sum are rounded up to whole blocks of codes, and small models have few of them.
        assert found.bytes_per_step - 1 <= counted <= 1.05 * found.bytes_per_step + 50


def test_one_replica_sends_nothing():
    found = estimate(params=1e6, step_seconds=0.1, replicas=1, bandwidth=1, latency=5, every=8)
    assert (found.step_seconds, found.bytes_per_step, found.peak_bytes) == (0.1, 0, 0)


def test_memory_counts_the_copies_that_rounds_keep():
    link = {"params": 10**6, "step_seconds": 1, "replicas": 2, "bandwidth": 1}
    copies = {
        Settings("local_sgd", 8): 1,  # the result
        Settings("local_sgd", 8, delay=2): 2,  # and a copy of what travels
        Settings("slowmo", 8): 3,  # anchor, momentum, result
        Settings("diloco", 8): 3,
        Settings("diloco", 8, delay=8): 4,
        Settings("diloco", 8, fragments=4): 2.25,
        Settings("ddp"): 1,  # buckets
    }
    for settings, count in copies.items():
        found = estimate(
            **link, strategy=settings.strategy, every=settings.every, fragments=settings.fragments, delay=settings.delay
        )
        assert found.extra_memory == 4e6 * count, settings.name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params": 0}, "params=0 must be a finite number above 0"),
        ({"params": 1.5}, "params=1.5 must be a whole number"),
        ({"step_seconds": math.nan}, "step_seconds=nan"),
        ({"step_seconds": "1"}, "step_seconds='1'"),
        ({"bandwidth": math.inf}, "bandwidth=inf"),
        ({"latency": -1.0}, "latency=-1.0 must be a finite number at least 0"),
        ({"replicas": 0}, "replicas=0"),
        ({"replicas": 2.0}, "replicas=2.0"),
        ({"replicas": True}, "replicas=True"),
        ({"strategy": "dlc"}, "strategy='dlc' is not known; use 'ddp'"),
        ({"every": 0}, "every must be a whole number of at least 1"),
        ({"fragments": 9}, "fragments=9 must be at most every=8"),
        ({"delay": 9}, "delay=9 must be at most every=8"),
        ({"codec": "int5"}, "codec='int5' is not known"),
        ({"strategy": "local_sgd", "codec": "int8"}, "needs an outer optimizer"),
        ({"strategy": "ddp"}, "mean nothing for strategy='ddp'"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    fine = {"params": 1e6, "step_seconds": 0.1, "replicas": 2, "bandwidth": 1e6, "every": 8}
    with pytest.raises(ValueError) as caught:
        estimate(**{**fine, **changes})
    assert message in str(caught.value)


def test_periods_are_those_of_the_classes():
    for strategy, every in (("ddp", 1), ("local_sgd", 8), ("slowmo", 12), ("diloco", 32)):
        assert Settings(strategy).period == every


def test_the_docstring_has_every_parameter():
    check(estimate, estimate.__doc__)


def test_plan_is_imported_when_it_is_first_used():
    program = """
import sys, offbeat
assert not any(name.startswith(("offbeat.plan", "offbeat.cli")) for name in sys.modules)
assert offbeat.plan.estimate(params=1e6, step_seconds=1, replicas=1, bandwidth=1).utilisation == 1
assert not any(name.startswith("offbeat.cli") for name in sys.modules)
try:
    offbeat.plann
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=150)
    assert done.stdout.strip() == "module 'offbeat' has no attribute 'plann'"
