"""Sums of encoded values over ranks: the same bits everywhere, and those of a plain simulation."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import offbeat
from offbeat.wire import CodedMean, NotFinite, TopK, make_codec
from offbeat.wire.peers import GroupPeers
from offbeat.wire.simulated import SimulatedPeers
from tests.ranks import run_ranks
from tests.wire_cases import CODECS, decoded, encoded, run_threads


def through(codec, x):
    return decoded(codec, encoded(codec, x), x.numel())


def simulated(codec, values):
    """What a reduction should give, by its definition."""
    size, numel = len(values), values[0].numel()
    if size == 1:
        return through(codec, values[0])
    part = numel if size == 2 else -(-numel // (size * codec.block)) * codec.block
    total = []
    for start in range(0, numel, max(1, part)):
        parts = [through(codec, x[start : start + part]) for x in values]
        one = parts[0].clone()
        for other in parts[1:]:
            one += other
        total.append(one if size == 2 else through(codec, one))
    return torch.cat(total) if total else torch.empty(0)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equals_the_simulation_on_every_rank(codec, size):
    for numel in (0, 1, 257, 20001):
        values = [torch.randn(numel) * (rank + 1) for rank in range(size)]

        def reduce(peers):
            x = values[peers.rank]
            lost = torch.full_like(x, float("nan"))
            total = CodedMean(codec).reduce(x, peers, 1.0, lost)
            assert peers.sent == CodedMean(codec).bytes_sent(numel, size)
            again = x.clone()
            assert torch.equal(CodedMean(codec).reduce(again, peers, out=again), total)
            return total, lost

        wanted = simulated(codec, values)
        for rank, (total, lost) in enumerate(run_threads(size, reduce)):
            assert torch.equal(total.view(torch.int32), wanted.view(torch.int32))
            assert torch.equal(lost, values[rank] - through(codec, values[rank]))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("bad", [[0], [1], [0, 2], [3]])
def test_not_finite_on_some_ranks_raises_on_all(size, bad):
    bad = [rank for rank in bad if rank < size]
    if not bad:
        return

    def reduce(peers):
        x = torch.randn(500)
        if peers.rank in bad:
            x[417] = float("inf")
        lost = torch.full_like(x, 5.0)
        try:
            CodedMean(make_codec("int4")).reduce(x, peers, residual=lost)
        except NotFinite as error:
            assert (lost == 5).all() or peers.rank not in bad
            return error
        return None

    for error in run_threads(size, reduce):
        assert isinstance(error, NotFinite)
        if size > 1:
            assert list(error.ranks) == bad
            assert ", ".join(map(str, bad)) in str(error)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_sum_that_overflows_raises_on_all(size):
    def reduce(peers):
        x = torch.ones(1000)
        x[600] = 3e38
        return CodedMean(make_codec("bf16")).reduce(x, peers)

    for error in run_threads(size, reduce):
        assert isinstance(error, NotFinite)
        assert "beyond float32" in str(error)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_weight_of_zero_leaves_a_rank_out(size):
    codec, values = make_codec("int8"), [torch.randn(700) for _ in range(size)]

    def reduce(peers):
        x, lost = values[peers.rank].clone(), torch.full((700,), 5.0)
        if peers.rank == size - 1:
            x[3] = float("nan")
            return CodedMean(codec).reduce(x, peers, 0.0, lost), lost
        return CodedMean(codec).reduce(x, peers, 0.5, lost), lost

    zeros = [through(codec, x) for x in values[:-1]]
    wanted = sum(zeros[1:], zeros[0].clone()) if zeros else torch.zeros(700)
    answers = run_threads(size, reduce)
    for total, _ in answers:
        if size < 3:
            assert torch.equal(total, wanted)
        else:
            assert (total - wanted).abs().max() <= wanted.abs().max() / 126
    assert (answers[-1][1] == 5).all()


@pytest.mark.parametrize("codec", [make_codec("int4"), make_codec("int2"), TopK(0.1)], ids=repr)
@pytest.mark.parametrize("size", [2, 3])
def test_error_feedback_delivers_everything_over_ranks(codec, size):
    """Also what is lost when sums are encoded."""
    rounds, numel = 60, 9000
    values = [[torch.randn(numel) + 0.2 for _ in range(rounds)] for _ in range(size)]

    def train(peers):
        mean = CodedMean(codec, return_sum_error=True)
        arrived, residual = torch.zeros(numel), torch.zeros(numel)
        for x in values[peers.rank]:
            residual += x
            arrived += mean.reduce(residual, peers, residual=residual)
        return arrived, residual

    answers = run_threads(size, train)
    wanted = torch.stack([torch.stack(mine).sum(0) for mine in values]).sum(0)
    arrived = answers[0][0]
    assert torch.allclose(arrived + sum(residual for _, residual in answers), wanted, atol=1e-2)
    naive = sum(simulated(codec, [mine[i] for mine in values]) for i in range(rounds))
    assert (arrived - wanted).norm() < 0.5 * (naive - wanted).norm()


def test_wrong_arguments():
    def reduce(peers):
        x, mean = torch.randn(10), CodedMean(make_codec("int8"))
        for weight in (-1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="weight="):
                mean.reduce(x, peers, weight)
        with pytest.raises(ValueError, match="the same tensor"):
            mean.reduce(x, peers, residual=x, out=x)

    assert run_threads(1, reduce) == [None]


def over_gloo(rank, world):
    peers = GroupPeers(dist.group.WORLD, range(world))
    totals = []
    if rank == 1:  # its bytes must be the same
        os.environ["OFFBEAT_NO_COMPILER"] = "1"
    for codec in CODECS:
        torch.manual_seed(rank)
        x = torch.randn(10001)
        totals.append(CodedMean(codec).reduce(x, peers))
        x[5] = float("nan") if rank == 1 else 1.0
        with pytest.raises(NotFinite, match="rank 1 "):
            CodedMean(codec).reduce(x, peers)
    return totals


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 3])
def test_processes(world):
    answers = run_ranks(over_gloo, world)
    values = []
    for rank in range(world):
        torch.manual_seed(rank)
        values.append(torch.randn(10001))
    for codec, *totals in zip(CODECS, *answers, strict=True):
        for total in totals:
            assert torch.equal(total, simulated(codec, values))


@pytest.mark.parametrize("decay", [1.0, 0.5])
@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_of_weight_0_feeds_back_what_its_sum_loses(absent, decay):
    """Against the definition; and with a decay of 1 everything arrives, though the rank stays away."""
    size, part, rounds, codec = 3, 4096, 40, TopK(0.03)
    numel = size * part
    values = [[torch.randn(numel) + 0.2 for _ in range(rounds)] for _ in range(size)]
    before = torch.randn(numel)  # what the absent rank had lost when it was there

    def train(peers):
        mean = CodedMean(codec, return_sum_error=True, decay=decay)
        totals = []
        residual = before.clone() if peers.rank == absent else torch.zeros(numel)
        for x in values[peers.rank]:
            if peers.rank == absent:
                totals.append(mean.reduce(torch.full_like(x, float("nan")), peers, 0.0, residual))
            else:
                y = torch.add(x, residual, alpha=decay)
                totals.append(mean.reduce(y, peers, 0.5, residual=residual))
        return totals, residual

    answers = run_threads(size, train)
    lost = [before.clone() if rank == absent else torch.zeros(numel) for rank in range(size)]
    for t, total in enumerate(answers[0][0]):
        assert all(torch.equal(other[0][t], total) for other in answers)
        taken = torch.zeros(numel)
        for rank in range(size):
            if rank != absent:
                y = values[rank][t] + decay * lost[rank]
                taken += through(codec, y)
                lost[rank] = y - through(codec, y)
        for owner in range(size):
            place = slice(owner * part, (owner + 1) * part)
            if owner == absent:
                taken[place] += decay * lost[owner][place]
            sent = through(codec, taken[place])
            lost[owner][place] = (taken[place] - sent) + (0 if owner == absent else lost[owner][place])
            taken[place] = sent
        torch.testing.assert_close(total, taken, rtol=0, atol=1e-5)
    for (_, residual), expected in zip(answers, lost, strict=True):
        torch.testing.assert_close(residual, expected, rtol=0, atol=1e-5)
    others = [place for rank in range(size) if rank != absent for place in range(rank * part, (rank + 1) * part)]
    assert torch.equal(answers[absent][1][others], before[others])
    if decay == 1:
        given = sum(sum(mine) for rank, mine in enumerate(values) if rank != absent)
        given[absent * part : (absent + 1) * part] += before[absent * part : (absent + 1) * part]
        left = sum(residual for rank, (_, residual) in enumerate(answers) if rank != absent)
        left[absent * part : (absent + 1) * part] += answers[absent][1][absent * part : (absent + 1) * part]
        torch.testing.assert_close(sum(answers[0][0]) + left, given, rtol=0, atol=1e-3)


@pytest.mark.parametrize("decay", [0.0, -1.0, 1.5, float("nan")])
def test_a_decay_that_cannot_be(decay):
    with pytest.raises(ValueError, match=r"the decay .* must be above 0 and at most 1"):
        CodedMean(make_codec("int8"), decay=decay)


@pytest.mark.parametrize("kind", ["x", "residual", "out"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (torch.full((2000,), float("nan"), dtype=torch.float64), "is a torch.float64 tensor"),
        (torch.ones(2000, dtype=torch.bfloat16), "is a torch.bfloat16 tensor"),
        (torch.full((4000,), float("nan"))[::2], r"strides \(2,\)"),
        (torch.ones(20, 100), r"shape \(20, 100\)"),
        (torch.ones(1999), "has 1999 elements on cpu"),
        (torch.ones(2000, device="meta"), "on meta"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_they_are_read(kind, wrong, words):
    """The kernels get addresses, and would read whatever lies there."""
    if kind == "x" and ("meta" in words or "1999" in words):
        return

    def reduce(peers):
        tensors = {"x": torch.ones(2000), "residual": None, "out": None, kind: wrong}
        with pytest.raises(ValueError, match=f"^{kind} .*{words}") as error:
            CodedMean(make_codec("int8")).reduce(tensors["x"], peers, 1.0, tensors["residual"], tensors["out"])
        return type(error.value)

    assert run_threads(2, reduce) == [ValueError] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_errors_name_global_ranks(size):
    ranks = [3, 5, 9][:size]

    def run(rank, peers):
        if rank not in ranks:
            return
        some = SimulatedPeers(peers.simulation, rank, ranks, "some")
        for bad, words in ((float("nan"), "the values of rank 5 are NaN"), (3e38, "beyond float32")):
            x = torch.ones(1000)
            x[600] = bad if rank == 5 or bad == 3e38 else 1.0
            with pytest.raises(NotFinite, match=words) as error:
                CodedMean(make_codec("bf16")).reduce(x, some)
            # Two ranks add up everything both; of three, the second owns the element.
            assert error.value.ranks == ((3, 5) if size == 2 and bad == 3e38 else (5,))
            assert size == 2 or "rank 5" in str(error.value)

    offbeat.Simulation(10, timeout=20).run(run)


class Elsewhere:
    """Peers that exchange only tensors of another device. Counts what they are handed."""

    def __init__(self, peers):
        self.peers, self.rank, self.size, self.ranks = peers, peers.rank, peers.size, peers.ranks
        self.device, self.handed = torch.device("cpu"), []

    def can_exchange(self, device):
        return False

    def all_gather(self, out, mine):
        self.handed += [out, mine]
        return self.peers.all_gather(out, mine)

    def all_to_all(self, out, mine, *splits):
        self.handed += [out, mine]
        return self.peers.all_to_all(out, mine, *splits)


class Noting(offbeat.BlockCodec):
    """int8, which notes where it reads and writes messages."""

    name, block = "noting", 256

    def __init__(self):
        self.inner, self.touched = make_codec("int8"), set()

    def record_bytes(self, width):
        return self.inner.record_bytes(width)

    def encode_rows(self, rows, records):
        self.touched.add(records.untyped_storage().data_ptr())
        return self.inner.encode_rows(rows, records)

    def decode_rows(self, records, width):
        self.touched.add(records.untyped_storage().data_ptr())
        return self.inner.decode_rows(records, width)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_only_codes_cross_where_peers_cannot_exchange_the_device_of_the_values(size):
    values = [torch.randn(5001) for _ in range(size)]

    def reduce(peers):
        codec, away = Noting(), Elsewhere(peers)
        lost = torch.zeros(5001)
        total = CodedMean(codec).reduce(values[peers.rank], away, residual=lost)
        assert peers.sent == CodedMean(codec).bytes_sent(5001, size)
        assert {tensor.dtype for tensor in away.handed} == {torch.uint8}
        # Messages are encoded and decoded beside the values, and the peers see only copies of them.
        assert not codec.touched & {tensor.untyped_storage().data_ptr() for tensor in away.handed}
        return total, lost

    wanted = simulated(make_codec("int8"), values)
    for rank, (total, lost) in enumerate(run_threads(size, reduce)):
        assert torch.equal(total.view(torch.int32), wanted.view(torch.int32))
        assert torch.equal(lost, values[rank] - through(make_codec("int8"), values[rank]))
