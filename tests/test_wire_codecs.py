"""Codecs: errors within the documented bounds, exact where they should be, and the same bytes by every way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offbeat
from offbeat.engine.cpu.compiler import why_no_compiler
from offbeat.wire import NotFinite, TopK, make_codec
from offbeat.wire.codecs import Int4
from offbeat.wire.codecs.c_kernels import c_kernels
from tests.wire_cases import CODECS, NAN, SIZES, decoded, encoded, error_bound

LARGEST = torch.finfo(torch.float32).max


@pytest.fixture(params=["torch", "C"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setenv("OFFBEAT_NO_COMPILER", "1")
    return request.param


def inputs(kind: str, numel: int, seed: int, power: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    if kind == "sparse":
        x *= torch.rand(numel, generator=generator) < 0.01
    elif kind == "heavy":
        x = x / torch.rand(numel, generator=generator).clamp(min=1e-6) ** 2
    elif kind == "equal":
        x = x.sign() * 3.0
    elif kind == "coarse":
        x = x.round()
    elif kind == "spread":
        x = x * 10 ** (torch.rand(numel, generator=generator) * 30 - 15)
    elif kind == "one-sided":
        x = -x.abs()
    return x * 2.0**power


KINDS = ["normal", "sparse", "heavy", "equal", "coarse", "spread", "one-sided"]
EXAMPLES = {
    "kind": st.sampled_from(KINDS),
    "numel": st.one_of(st.sampled_from(SIZES), st.integers(0, 9000)),
    "seed": st.integers(0, 2**31),
    "power": st.sampled_from([0, 0, -7.3, -40, -75, -79.5, -90, -130, 30]),
}


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(**EXAMPLES)
@settings(max_examples=40, deadline=None)
def test_the_error_is_within_its_bound(codec, kind, numel, seed, power):
    x = inputs(kind, numel, seed, power)
    lost = torch.full_like(x, NAN)
    data = encoded(codec, x, lost)
    got = decoded(codec, data, numel)
    assert ((got.double() - x.double()).abs() <= error_bound(codec, x)).all()
    assert torch.equal(lost, x - got)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(**EXAMPLES)
@settings(max_examples=30, deadline=None)
def test_plain_torch_and_the_kernels_agree_to_the_bit(codec, kind, numel, seed, power):
    x, start = inputs(kind, numel, seed, power), inputs("coarse", numel, seed + 1, -2)
    results = []
    for without in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if without:
                patch.setenv("OFFBEAT_NO_COMPILER", "1")
            data, lost, total = encoded(codec, x), x.clone(), start.clone()
            assert torch.equal(encoded(codec, x, lost), data)
            got = decoded(codec, data, numel)
            codec.decode(data, total, add=True)
            both = torch.full_like(x, NAN)
            codec.decode_sum([data, data, data], both)
            results.append([data, *(t.view(torch.int32) for t in (lost, got, total, both))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(results[0][3].view(torch.float32), start + got)
    assert torch.equal(results[0][4].view(torch.float32), got + got + got)


def test_kernels_are_there(monkeypatch):
    assert (c_kernels() is None) == (why_no_compiler() is not None)
    monkeypatch.setenv("OFFBEAT_NO_COMPILER", "1")
    assert c_kernels() is None


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("numel", SIZES)
def test_sizes(codec, numel, way):
    x = torch.randn(numel)
    data = encoded(codec, x)
    assert data.numel() == codec.encoded_bytes(numel)
    assert decoded(codec, data, numel).isfinite().all()
    # A message may begin at any byte.
    shifted = torch.empty(len(data) + 1, dtype=torch.uint8)[1:].copy_(data)
    assert torch.equal(decoded(codec, shifted, numel), decoded(codec, data, numel))
    codec.encode(x, shifted)
    assert torch.equal(shifted, data)


def test_bits_per_element():
    sizes = {codec.name: codec.encoded_bytes(1 << 20) * 8 / (1 << 20) for codec in CODECS}
    assert {name: round(bits, 4) for name, bits in sizes.items() if not name.startswith("topk")} == {
        "bf16": 16,
        "fp16": 16.0625,
        "int8": 8.0625,
        "int4": 4.25,
        "int2": 2.5,
        "int3": 3.25,
    }
    assert TopK(0.03, bits=2).encoded_bytes(4096) == 147


def test_the_table_in_the_documentation():
    page = (Path(__file__).parents[1] / "docs" / "codecs.md").read_text()
    rows = [line.split(" | ") for line in page.split("$m$ is the largest")[0].splitlines() if line.startswith("| `")]
    x = torch.randn(1_000_000)
    for row in rows:
        name = row[0].strip("|` ")
        codec = TopK(0.03, bits=2) if name.startswith("TopK") else make_codec(name.strip('"'))
        lost = torch.empty_like(x)
        data = encoded(codec, x, lost)
        assert float(row[1]) == round(data.numel() * 8 / 1e6, 2)
        assert int(row[2].replace(",", "")) == data.numel()
        assert float(row[4].strip("% |")) == float(f"{100 * (lost.norm() / x.norm()).item():.2g}")
    assert len(rows) == 6


def representable(codec, numel):
    """Values the codec can hold, each block with its largest code."""
    scale = 2.0 ** torch.randint(-20, 20, (-(-numel // codec.block),)).repeat_interleave(codec.block)[:numel] * 1.25
    if codec.name == "bf16":
        return torch.randn(numel).bfloat16().float()
    if codec.name == "fp16":
        return torch.cat(
            [torch.randn(numel // 2).half().float(), (torch.rand(numel - numel // 2) * 6e-5).half().float()]
        )
    if isinstance(codec, TopK):  # few, and of one size in each chunk
        keep = torch.zeros(numel)
        keep[::50] = 1
        return torch.randn(numel).sign() * scale * 1.2345 * keep
    low, high = (-3, 3) if codec.name == "int3" else (codec.low, codec.high)
    codes = torch.randint(low, high + 1, (numel,)).float()
    codes[:: codec.block] = high
    return codes * scale * (torch.randint(0, 2, scale.shape) * 2 - 1)[0]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("numel", [1, 300, 9000])
def test_exact_where_values_are_representable(codec, numel, way):
    for x in (representable(codec, numel), torch.zeros(numel), torch.full((numel,), -0.75)):
        lost = torch.full_like(x, NAN)
        data = encoded(codec, x, lost)
        if (codec.name in ("int8", "topk(0.03, bits=2)", "topk(0.1, bits=4)")) and (x == -0.75).all():
            continue  # its scale is not a bfloat16; more than it sends
        assert torch.equal(decoded(codec, data, numel), x)
        assert not lost.any()


def test_fp16_holds_every_float16():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    every = every[every.isfinite()]
    codec = make_codec("fp16")
    assert torch.equal(decoded(codec, encoded(codec, every), every.numel()), every)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 700, 8999])
def test_not_finite_raises_and_leaves_the_residual(codec, bad, place, way):
    x = torch.randn(9000)
    x[place] = bad
    kept = torch.randn(9000)
    lost = kept.clone()
    with pytest.raises(NotFinite, match=f"1 of 9000 values.*first at element {place}"):
        encoded(codec, x, lost)
    assert torch.equal(lost, kept)
    with pytest.raises(ValueError, match="NaN or infinite"):
        encoded(codec, x)
    before = x.clone()
    with pytest.raises(NotFinite):
        encoded(codec, x, x)
    assert torch.equal(x.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_largest_numbers_do_not_become_infinite(codec, way):
    for x in (torch.full((300,), LARGEST), torch.linspace(-1, 1, 4097) * LARGEST, torch.tensor([LARGEST, 1.0])):
        got = decoded(codec, encoded(codec, x), x.numel())
        assert got.isfinite().all()
        assert got.abs().max() >= LARGEST * 0.6


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("tiny", [2.0**-81, 2.0**-140])
def test_blocks_of_almost_nothing_are_zeros(codec, tiny, way):
    x = torch.full((1000,), tiny)
    lost = torch.empty(1000)
    data = encoded(codec, x, lost)
    if codec.name != "bf16":
        assert not decoded(codec, data, 1000).any()
        assert torch.equal(lost, x)


def test_topk_sends_the_largest_and_of_equals_the_first(way):
    x = torch.randn(10000)
    got = decoded(TopK(0.01, bits=8), encoded(TopK(0.01, bits=8), x), 10000)
    for chunk, mine in zip(x.split(4096), got.split(4096), strict=True):
        k = -(-len(chunk) // 100)
        assert set(mine.nonzero().flatten().tolist()) == set(chunk.abs().topk(k).indices.tolist())
    got = decoded(TopK(0.01), encoded(TopK(0.01), torch.ones(4096)), 4096)
    assert got.tolist() == [1.0] * 41 + [0.0] * (4096 - 41)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_error_feedback_delivers_everything_in_the_end(codec):
    torch.manual_seed(1)
    residual = torch.zeros(5000)
    wanted, arrived, naive = torch.zeros(5000).double(), torch.zeros(5000).double(), torch.zeros(5000).double()
    bias = torch.randn(5000) * 0.2
    for _ in range(100):
        x = torch.randn(5000) + bias
        data = torch.empty(codec.encoded_bytes(5000), dtype=torch.uint8)
        residual += x
        codec.encode(residual, data, residual)
        arrived += decoded(codec, data, 5000)
        naive += decoded(codec, encoded(codec, x), 5000)
        wanted += x
    assert torch.allclose(arrived + residual, wanted, atol=1e-3)
    assert (arrived - wanted).norm() < 0.6 * (naive - wanted).norm()


@pytest.mark.parametrize("spec", ["int5", "INT8", 8, "topk", Int4])
def test_unknown_names(spec):
    message = f"codec={re.escape(repr(spec))} is not known; use None .float32., 'bf16', .*'int3'.*TopK"
    with pytest.raises(ValueError, match=message):
        make_codec(spec)


def test_names():
    assert make_codec(None) is None
    for codec in CODECS:
        assert make_codec(codec) is codec
    assert [codec.name for codec in CODECS[:6]] == ["bf16", "fp16", "int8", "int4", "int2", "topk(0.03, bits=2)"]
    for arguments in ({"fraction": 0}, {"fraction": 1.1}, {"bits": 1}, {"bits": 3}):
        with pytest.raises(ValueError, match="of TopK must be"):
            TopK(**arguments)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_wrong_tensors(codec, way):
    x, data = torch.randn(100), torch.empty(codec.encoded_bytes(100), dtype=torch.uint8)
    for bad in (x.double(), x.view(10, 10), torch.randn(200)[::2]):
        with pytest.raises(ValueError, match="flat contiguous"):
            codec.encode(bad, data)
    with pytest.raises(ValueError, match="use encoded_bytes"):
        codec.encode(torch.randn(101 + codec.block), data)
    with pytest.raises(ValueError, match="flat contiguous"):
        codec.decode(data.to(torch.int32), x)
    with pytest.raises(ValueError, match="the residual has 99"):
        codec.encode(x, data, torch.empty(99))


def test_a_registered_name_works_wherever_a_codec_is_named():
    assert repr(make_codec("int3")) == repr(offbeat.CodecState("int3").codec) == "<codec int3>"
    level = offbeat.Level(every=4, outer=lambda groups: offbeat.SGD(groups, lr=0.7), codec="int3")
    assert level.codec == "int3"


def test_names_that_cannot_be_registered():
    for name in ("int8", "int3"):
        with pytest.raises(ValueError, match=f"the codec name '{name}' is taken by Int"):
            offbeat.register_codec(name)(type("Other", (Int4,), {}))
    with pytest.raises(ValueError, match="must be a string that is not empty, but got ''"):
        offbeat.register_codec("")
    with pytest.raises(ValueError, match="must be a string"):
        offbeat.register_codec(Int4)  # without the parentheses
    with pytest.raises(TypeError, match="'mine'; derive a class from"):
        offbeat.register_codec("mine")(int)
    with pytest.raises(TypeError, match="the codec Half lacks decode_rows, encode_rows; define it"):
        offbeat.register_codec("mine")(type("Half", (offbeat.BlockCodec,), {"record_bytes": lambda self, width: width}))
    with pytest.raises(ValueError, match="codec='mine' is not known"):
        make_codec("mine")


def test_a_subclass_does_not_get_kernels_that_encode_otherwise():
    """Those of int4 know nothing of its block."""

    class Wide(Int4):
        block, name = 128, "wide"

    x = torch.randn(300)
    data = encoded(Wide(), x)
    assert len(data) == 2 * (2 + 64) + 2 + 22
    assert ((decoded(Wide(), data, 300) - x).abs() <= x.abs().max() / 8).all()
