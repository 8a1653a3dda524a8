"""The cost model against published figures. No number of the model was chosen to meet them.

Where it misses one, the miss is listed here and in docs/plan.md. All published simulations send bfloat16 and overlap a
reduction with the backward pass.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from offbeat.plan import Settings, estimate
from offbeat.plan.settings import codec_bytes

GBIT = 1e9 / 8
PAGE = Path(__file__).parent.parent / "docs" / "plan.md"

#: Hours of training on 250 B tokens, 1 B parameters, over 1 Gbit/s (2501.18512, 2502.12996). Without any communication
#: it is 6.75 h of steps of 0.1 s. Streaming: every 100 steps, 8 fragments (24 layers by 3), 4 bits.
STEPS, COMPUTE = 6.75 * 3600 / 0.1, 0.1
HOURS = {
    Settings("ddp", codec="bf16"): 1097.0,
    Settings("diloco", 100, 8, 1, "int4"): 8.75,  # one inner step of overlap
    Settings("diloco", 100, 1, 100, "int4"): 6.75,  # one outer step of overlap
}


@pytest.mark.parametrize("settings", HOURS, ids=lambda settings: settings.name)
def test_hours_at_a_gigabit(settings):
    found = _estimate(settings, params=1e9, step_seconds=COMPUTE, replicas=2, bandwidth=GBIT)
    assert STEPS * found.step_seconds / 3600 == pytest.approx(HOURS[settings], rel=0.1)


def test_streaming_sends_four_hundred_times_fewer_bits():
    sent = [
        _estimate(settings, params=1e9, step_seconds=COMPUTE, replicas=2, bandwidth=GBIT).bytes_per_step
        for settings in list(HOURS)[:2]
    ]
    assert sent[0] / sent[1] == pytest.approx(400, rel=0.1)


#: Gbit/s at which a simulation first reaches 50, 80, 90, 95, 99 % (2503.09799, Table 6): parameters, seconds a step.
TABLE_6 = {
    (10e9, 0.8, 1): (104.8, 184.2, 222.3, 222.3, 390.7),
    (10e9, 0.8, 10): (16.0, 49.4, 86.8, 152.6, 222.3),
    (10e9, 0.8, 50): (3.0, 11.0, 23.3, 41.0, 126.5),
    (10e9, 0.8, 300): (0.5, 2.0, 4.3, 9.1, 41.0),
    (405e9, 26.0, 100): (2.0, 7.5, 16.0, 33.9, 126.5),
}
UTILISATION = (50, 80, 90, 95, 99)
#: 50 bandwidths from 0.1 to 1,000 Gbit/s; what is published is rounded to a digit.
GRID = [0.1 * 10 ** (4 * index / 49) for index in range(50)]
#: Period and published utilisation of those that the model misses by more than 7 points, and by how much.
DISAGREEMENTS = {(1, 80): -9.6, (1, 90): -8.9, (1, 95): -13.9, (50, 50): -7.2}


def test_bandwidths_for_a_utilisation():
    """The nearest that offbeat has to a reduction behind the last backward pass is a delay of one step."""
    missed = {}
    for (params, seconds, every), row in TABLE_6.items():
        settings = Settings("ddp", codec="bf16") if every == 1 else Settings("diloco", every, 1, 1, "bf16")
        for published, rounded in zip(UTILISATION, row, strict=True):
            gbit = min(GRID, key=lambda point, rounded=rounded: abs(point - rounded))
            found = _estimate(settings, params=params, step_seconds=seconds, replicas=2, bandwidth=gbit * GBIT)
            difference = 100 * found.utilisation - published
            if abs(difference) > 7:
                missed[every, published] = round(difference, 1)
    assert missed == DISAGREEMENTS


def test_the_page_lists_each_disagreement():
    rows = re.findall(r"\| (\d+) \| (\d+) % \| (−[\d.]+) \|", PAGE.read_text())
    assert {(int(h), int(u)): float(d.replace("−", "-")) for h, u, d in rows} == DISAGREEMENTS


#: INTELLECT-1, measured: seconds of an all-reduce of 10 B parameters in int8, and utilisation; 100 steps take 38 min.
INTELLECT_1 = {103: 95.7, 382: 85.6, 469: 83.0}


@pytest.mark.parametrize("seconds", INTELLECT_1)
def test_intellect_1(seconds):
    bandwidth = codec_bytes("int8", 10**10) / seconds
    settings = Settings("diloco", 100, codec="int8")
    found = _estimate(settings, params=1e10, step_seconds=38 * 60 / 100, replicas=2, bandwidth=bandwidth)
    assert 100 * found.utilisation == pytest.approx(INTELLECT_1[seconds], abs=1)


def _estimate(settings, **link):
    numbers = {} if settings.strategy == "ddp" else {"every": settings.every}
    return estimate(
        **link, strategy=settings.strategy, fragments=settings.fragments, delay=settings.delay, codec=settings.codec,
        **numbers,
    )  # fmt: skip
