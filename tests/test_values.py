"""The values of a round: copies of items of any dtype and layout, reduced in bounded memory."""

from __future__ import annotations

import pytest
import torch

import offbeat
from offbeat.replicas.contents import FIRST, MEAN, Item, local_part
from offbeat.replicas.hello import Verdict
from offbeat.replicas.values import Reduction, Values


def tensors(seed):
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(13, 7, generator=g),
        torch.randn(30, 30, generator=g)[3:20, ::2],  # gaps in memory
        torch.randn(17, 23, generator=g).t(),
        torch.randn(4, 3, 5, 5, generator=g).to(memory_format=torch.channels_last),
        torch.randn(100, generator=g).half(),
        torch.randn(100, 3, generator=g).bfloat16(),
        torch.randn(7, generator=g, dtype=torch.float64),
        torch.randn(0, 3),
        torch.randn((), generator=g),
        torch.randn(5, dtype=torch.complex64, generator=g),
    ]


def as_items(values):
    return [Item(str(i), t) for i, t in enumerate(values)]


def test_copies_hold_every_element():
    items = as_items(tensors(0))
    values = Values(items)
    values.copy(items)
    for item in items:
        assert torch.equal(values[item.name], local_part(item.tensor))
    assert sum(flat.tensor.numel() for flat in values.flats) == sum(local_part(i.tensor).numel() for i in items)
    other = as_items(tensors(1))
    assert values.fits(other, None)
    values.copy(other)
    assert all(torch.equal(values[item.name], local_part(item.tensor)) for item in other)
    assert not values.fits(other[1:], None)


@pytest.mark.parametrize("limit", [300, 1000, 10**6])
@pytest.mark.parametrize("differences", [False, True])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (1.0, 0.0, 3.0)])
@pytest.mark.parametrize("ordered", [False, True])
def test_means_of_three_in_buckets_of_any_size(limit, differences, weights, ordered):
    def reduce(rank, peers):
        items = as_items(tensors(rank))
        if weights[rank] == 0:
            for item in items:
                item.tensor.fill_(float("nan"))  # it does not count, whatever it has
        values = Values(items)
        values.copy(items)
        Reduction(limit, ordered=ordered).run(
            values.flats, peers, Verdict(weights=weights), differences=[differences] * len(values.flats)
        )
        return {item.name: (values[item.name], local_part(item.tensor).clone()) for item in items}

    answers = offbeat.Simulation(3).run(reduce)
    before = [as_items(tensors(rank)) for rank in range(3)]
    for i, same in enumerate(zip(*before, strict=True)):
        parts = [local_part(item.tensor) for item in same]
        mean = sum(w / sum(weights) * part.double() for w, part in zip(weights, parts, strict=True))
        for rank, answer in enumerate(answers):
            if weights[rank]:
                own = parts[rank].double()
                precision = 4 * torch.finfo(parts[0].dtype).eps
                expected = mean - own if differences else mean
                torch.testing.assert_close(answer[str(i)][0].double(), expected, rtol=0, atol=8 * precision)


def test_items_that_cannot_be_averaged_are_the_first_replicas():
    def reduce(rank, peers):
        items = [
            Item("flag", torch.tensor([rank == 1, False, True]), FIRST),
            Item("place", torch.tensor([10 + rank]), FIRST),
            Item("short", torch.tensor([rank], dtype=torch.int16), FIRST),
            Item("mean", torch.tensor([float(rank)])),
        ]
        values = Values(items)
        values.copy(items)
        Reduction(1000).run(values.flats, peers, Verdict(weights=(0.0, 1.0, 1.0)))
        return [values[item.name].tolist() for item in items]

    for answer in offbeat.Simulation(3).run(reduce):
        assert answer == [[1, 0, 1], [11], [1], [1.5]]
    with pytest.raises(TypeError, match="cannot be reduced"):
        Values([Item("short", torch.zeros(3, dtype=torch.int16), MEAN)])


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [(torch.bfloat16, [4, 2]), (torch.float32, [4, 4]), (torch.float64, [8, 8]), (None, [4, 2])],
)
def test_values_never_travel_in_a_narrower_dtype(wanted, expected):
    """Bytes by element of what is sent, for float32 and bfloat16."""

    def reduce(rank, peers):
        sent = []
        for tensor in (torch.randn(64), torch.randn(64).bfloat16()):
            values, before = Values([Item("a", tensor)]), peers.bytes_sent
            values.copy([Item("a", tensor)])
            Reduction(1000, wanted).run(values.flats, peers, Verdict(weights=(1.0, 1.0)))
            sent.append((peers.bytes_sent - before) // 64)
        return sent

    assert offbeat.Simulation(2).run(reduce) == [expected, expected]


def test_half_precision_that_travels_in_float32_is_rounded_once():
    """256 and three times 1: in bfloat16 the ones would be lost in a sum."""

    def reduce(rank, peers):
        tensor = torch.full((4,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
        values = Values([Item("a", tensor)])
        values.copy([Item("a", tensor)])
        Reduction(1000, torch.float32).run(values.flats, peers, Verdict(weights=(1.0,) * 4))
        return values["a"].tolist()

    expected = torch.tensor((256 + 3) / 4).bfloat16().item()
    assert offbeat.Simulation(4).run(reduce) == [[expected] * 4] * 4
