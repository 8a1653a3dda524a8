"""Checkpoints of one process: exact resume, values, names, order, and what is refused."""

from __future__ import annotations

import collections
import math
import random
import threading
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import offbeat
from offbeat.checkpoint import CheckpointMismatch, DamagedCheckpoint, files, import_torch_save
from tests.checkpoint_work import PLAIN, adamw, make_model, same, train


@pytest.mark.parametrize("form", PLAIN)
@pytest.mark.parametrize("background", [False, True])
def test_save_load_go_on_equals_never_saved(form, background, tmp_path):
    model = make_model()
    optimizer = PLAIN[form](model)
    train(model, optimizer, 0, 7)
    saved = offbeat.save_checkpoint(tmp_path, model=model, optimizer=optimizer, background=background)
    train(model, optimizer, 7, 20)
    saved.wait()
    model2 = make_model(1)
    optimizer2 = PLAIN[form](model2)
    offbeat.load_checkpoint(tmp_path, model=model2, optimizer=optimizer2)
    train(model2, optimizer2, 7, 20)
    assert same(dict(model.state_dict()), dict(model2.state_dict()))
    assert same(optimizer.state_dict(), optimizer2.state_dict())


def test_overlapped_and_scheduled(tmp_path):
    def make(seed):
        model = make_model(seed)
        optimizer = adamw(model)
        handle = offbeat.overlap(optimizer, model, clip_norm=0.1, clip="previous")
        return model, optimizer, handle, torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9, 9, 12])

    def go(model, optimizer, scheduler, first, last):
        for step in range(first, last):
            train(model, optimizer, step, step + 1)
            scheduler.step()

    model, optimizer, handle, scheduler = make(0)
    go(model, optimizer, scheduler, 0, 7)
    extra = {"overlap": handle.state_dict(), "scheduler": scheduler.state_dict()}
    offbeat.save_checkpoint(tmp_path, model=model, optimizer=optimizer, extra=extra)
    go(model, optimizer, scheduler, 7, 20)
    model2, optimizer2, handle2, scheduler2 = make(1)
    extra = offbeat.load_checkpoint(tmp_path, model=model2, optimizer=optimizer2)
    handle2.load_state_dict(extra["overlap"])
    scheduler2.load_state_dict(extra["scheduler"])
    go(model2, optimizer2, scheduler2, 7, 20)
    assert same(dict(model.state_dict()), dict(model2.state_dict()))
    assert scheduler.state_dict() == scheduler2.state_dict()


def test_parameters_without_gradients_stay_without_state(tmp_path):
    model = make_model()
    optimizer = offbeat.AdamW(model.parameters())
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    offbeat.save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    other = offbeat.AdamW(model.parameters())
    offbeat.load_checkpoint(tmp_path, optimizer=other)
    assert [bool(other.state.get(p)) for p in model.parameters()] == [True] + [False] * 6


# --- values


VALUES = {
    "numbers": [0, -1, 2**80, True, None, 0.1, -0.0, 5e-324, math.inf, -math.inf, 1 + 2j, complex(math.inf, -0.0)],
    "text": ["", 'ä/"\\\n\x00\u2028', "%2F", "$"],
    "keys": {1: "int", "1": "str", 1.5: "float", None: "none", (1, "a"): "tuple", True + 1: "two"},
    "tagged": {"$": "tensor", "value": "a/b"},
    "nested": ({"a": [(), (1,), [{"b": ()}]]}, torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 3)),
    "order": {"z": 1, "a": 2},
    "kinds": [collections.OrderedDict(b=1, a=2), collections.Counter("abca")],
}


def test_values_come_back_as_they_were(tmp_path):
    offbeat.save_checkpoint(tmp_path, extra=VALUES)
    loaded = offbeat.load_checkpoint(tmp_path)
    assert loaded == VALUES
    assert repr(dict(loaded)) == repr(VALUES)  # the types, the order, and the sign of zero
    offbeat.save_checkpoint(tmp_path, extra={"nan": math.nan})
    assert math.isnan(offbeat.load_checkpoint(tmp_path)["nan"])


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
]  # fmt: skip


def test_tensors_of_every_dtype_and_layout(tmp_path):
    raw = torch.randint(0, 2, (64,), dtype=torch.uint8)
    tensors = {str(dtype): raw.clone().view(dtype) for dtype in DTYPES}
    tensors |= {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "strided": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)[::2],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "expanded": torch.ones(1).expand(5),
        "last": torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "nan": torch.tensor([math.nan, -0.0]),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    offbeat.save_checkpoint(tmp_path, extra={"tensors": tensors})
    loaded = offbeat.load_checkpoint(tmp_path)["tensors"]
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        assert (loaded[name].dtype, loaded[name].shape) == (plain.dtype, plain.shape), name
        assert torch.equal(loaded[name].flatten().view(torch.uint8), plain.flatten().view(torch.uint8)), name


def test_files_of_tensors_are_safetensors_and_tied_weights_are_there_once(tmp_path):
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    model[1].weight = model[0].weight
    path = offbeat.save_checkpoint(tmp_path, model=model, extra={"x": torch.tensor([1.5, 2.0, 3.0])}).wait()
    tensors = load_file(path / "rank-0.safetensors")
    assert set(tensors) == {"model/0.weight", "model/1.bias", "extra/x", "random/torch"}
    assert torch.equal(tensors["model/0.weight"], model[0].weight)
    assert torch.equal(tensors["extra/x"], torch.tensor([1.5, 2.0, 3.0]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model[0].weight.zero_()
    offbeat.load_checkpoint(tmp_path, model=model)
    assert same(before, dict(model.state_dict()))


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [1, {"b": Odd()}]}, r"extra/a/1/b is a tests\.test_checkpoint\.Odd, which a checkpoint cannot hold"),
        ({"a": b"bytes"}, r"extra/a is a builtins\.bytes"),
        ({"a": np.float32(1)}, r"extra/a is a numpy\.float32"),
        ({"a": {Odd: 1}}, r"extra/a is a builtins\.type"),
        ({"a": torch.eye(2).to_sparse()}, r"extra/a is a tensor of torch\.float32, torch\.sparse_coo"),
        ({"a": torch.empty(2, device="meta")}, "extra/a is a tensor of .* on meta"),
        ([1], "extra must be a dict with strings as keys"),
        ({1: 2}, "extra must be a dict with strings as keys"),
    ],
)
def test_what_cannot_be_held_is_refused_with_its_place(value, message, tmp_path):
    with pytest.raises(offbeat.CheckpointError, match=message):
        offbeat.save_checkpoint(tmp_path / "new", extra=value)
    assert not (tmp_path / "new").exists()


def test_random_generators_are_restored(tmp_path):
    def draw():
        return [
            torch.rand(2).tolist(),
            random.random(),
            random.gauss(0, 1),
            np.random.rand(2).tolist(),
            np.random.randn(),
        ]

    draw()
    offbeat.save_checkpoint(tmp_path)
    first = draw()
    assert draw() != first
    offbeat.load_checkpoint(tmp_path)
    assert draw() == first
    second = draw()
    offbeat.load_checkpoint(tmp_path, generators=False)
    assert draw() not in (first, second)


# --- names


def test_parameters_are_found_by_name_in_another_order(tmp_path):
    model, other = make_model(), make_model(1)
    optimizer = offbeat.AdamW([{"params": list(model.parameters()), "lr": 0.03}])
    train(model, optimizer, 0, 4)
    offbeat.save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    backwards = offbeat.AdamW(list(reversed(list(other.named_parameters()))))
    offbeat.load_checkpoint(tmp_path, model=other, optimizer=backwards)
    assert backwards.param_groups[0]["lr"] == 0.03
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert same(optimizer.state[p], backwards.state[q])
    torch.manual_seed(1)
    train(model, optimizer, 4, 9)
    torch.manual_seed(1)
    train(other, backwards, 4, 9)
    assert same(dict(model.state_dict()), dict(other.state_dict()))


def test_compiled_and_bare_models_have_the_same_names(tmp_path):
    model, other = make_model(), make_model(1)
    optimizer = adamw(model)
    train(model, optimizer, 0, 3)
    offbeat.save_checkpoint(tmp_path, model=torch.compile(model), optimizer=optimizer)
    offbeat.load_checkpoint(tmp_path, model=other, optimizer=adamw(other))
    assert same(dict(model.state_dict()), dict(other.state_dict()))


def test_strict_and_partial(tmp_path):
    model = make_model()
    optimizer = adamw(model)
    train(model, optimizer, 0, 3)
    offbeat.save_checkpoint(tmp_path, model=model, optimizer=optimizer, extra={"a": 1})
    other = nn.Sequential(*make_model(1)[:4])
    other.add_module("head", nn.Linear(5, 2))
    optimizer2 = adamw(other)
    before = [{name: value.clone() for name, value in other.state_dict().items()}, optimizer2.state_dict()]
    with pytest.raises(CheckpointMismatch, match=r"it lacks model: head\.weight.*Nothing was changed") as caught:
        offbeat.load_checkpoint(tmp_path, model=other, optimizer=optimizer2)
    assert caught.value.missing == [
        "model: head.weight", "model: head.bias", "optimizer group 0: head.weight", "optimizer group 0: head.bias"
    ]  # fmt: skip
    assert caught.value.unexpected == [
        "model: 4.weight", "model: 4.bias", "optimizer group 0: 4.weight", "optimizer group 0: 4.bias"
    ]  # fmt: skip
    assert same(before, [dict(other.state_dict()), optimizer2.state_dict()])
    with pytest.warns(UserWarning, match=r"it lacks model: head\.weight"):
        loaded = offbeat.load_checkpoint(tmp_path, model=other, optimizer=optimizer2, strict=False)
    assert (loaded, loaded.missing) == ({"a": 1}, caught.value.missing)
    for name, value in other.state_dict().items():
        assert torch.equal(value, before[0][name] if name.startswith("head") else model.state_dict()[name])
    for (name, p), q in zip(other.named_parameters(), model.parameters(), strict=True):
        assert not optimizer2.state.get(p) if name.startswith("head") else same(optimizer2.state[p], optimizer.state[q])


def test_another_shape_or_kind_changes_nothing(tmp_path):
    model = make_model()
    optimizer = adamw(model)
    train(model, optimizer, 0, 3)
    offbeat.save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    wide = make_model(1)
    wide[4] = nn.Linear(5, 4)
    before = {name: value.clone() for name, value in wide.state_dict().items()}
    with pytest.raises(CheckpointMismatch, match=r"'4\.weight' in shape \(3, 5\), and the model in \(4, 5\)"):
        offbeat.load_checkpoint(tmp_path, model=wide)
    assert same(before, dict(wide.state_dict()))
    other = make_model(1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointMismatch, match="another kind of optimizer"):
        offbeat.load_checkpoint(tmp_path, model=other, optimizer=offbeat.ASGD(other.parameters()))
    assert same(before, dict(other.state_dict()))
    offbeat.save_checkpoint(tmp_path, model=model, step=4)
    with pytest.raises(CheckpointMismatch, match="has no optimizer; leave optimizer= out"):
        offbeat.load_checkpoint(tmp_path, model=other, optimizer=adamw(other))


# --- order, keep, background


def test_list_keep_and_step(tmp_path):
    folder = tmp_path / "deep" / "down"
    assert offbeat.list_checkpoints(folder) == []
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
        offbeat.load_checkpoint(folder)
    for step in (10, 20, 30):
        path = offbeat.save_checkpoint(folder, extra={"step": step}, step=step, keep=2).wait()
    there = offbeat.list_checkpoints(folder)
    assert [(one.step, one.complete, one.damage) for one in there] == [(20, True, ""), (30, True, "")]
    assert there[-1].path == path
    assert sorted(one.name for one in folder.iterdir()) == ["000002-step-20", "000003-step-30"]
    assert offbeat.load_checkpoint(folder)["step"] == 30
    assert offbeat.load_checkpoint(folder, step=20)["step"] == 20
    assert offbeat.load_checkpoint(there[0].path)["step"] == 20
    with pytest.raises(FileNotFoundError, match=r"of step 10 in .*; there are those of steps \[20, 30\]"):
        offbeat.load_checkpoint(folder, step=10)


def test_going_back_keeps_later_checkpoints_until_their_step_comes_again(tmp_path):
    for step in (10, 20, 30):
        offbeat.save_checkpoint(tmp_path, step=step, keep=2)
    with pytest.warns(UserWarning, match=r"is of step 30, and this one is of step 15"):
        offbeat.save_checkpoint(tmp_path, step=15, keep=1, extra={"again": True})
    assert [one.step for one in offbeat.list_checkpoints(tmp_path)] == [20, 30, 15]
    assert offbeat.load_checkpoint(tmp_path)["again"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offbeat.save_checkpoint(tmp_path, step=25, keep=1)
    assert [one.step for one in offbeat.list_checkpoints(tmp_path)] == [30, 25]
    offbeat.save_checkpoint(tmp_path, step=30, keep=1)
    assert [one.step for one in offbeat.list_checkpoints(tmp_path)] == [30]


@pytest.mark.parametrize(
    ("options", "message"), [({"keep": 0}, "keep must be at least 1"), ({"step": -1}, "step must not")]
)
def test_options_are_checked(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        offbeat.save_checkpoint(tmp_path, **options)


def test_steps_are_counted_by_the_optimizer_or_by_the_folder(tmp_path):
    model = make_model()
    optimizer = adamw(model)
    train(model, optimizer, 0, 7)
    assert "step-7" in offbeat.save_checkpoint(tmp_path / "a", optimizer=optimizer).wait().name
    plain = offbeat.SGD(model.parameters())
    names = [offbeat.save_checkpoint(tmp_path / "b", optimizer=plain).wait().name for _ in range(2)]
    assert names == ["000001-step-0", "000002-step-1"]


@pytest.fixture
def held(monkeypatch):
    """Writes wait until this is set."""
    event, real = threading.Event(), files.write_file

    def write(path, buffers):
        event.wait(30)
        return real(path, buffers)

    monkeypatch.setattr("offbeat.checkpoint.tensors.write_file", write)
    yield event
    event.set()


def test_a_save_in_the_background_has_the_moment_of_the_call(held, tmp_path):
    model = make_model()
    state = {"list": [1], "tensor": torch.ones(2)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    saved = offbeat.save_checkpoint(tmp_path, model=model, extra=state, background=True)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state["list"].append(2)
    state["tensor"].zero_()
    assert not saved.done
    assert offbeat.list_checkpoints(tmp_path) == []
    with pytest.raises(TimeoutError, match="the save goes on"):
        saved.wait(0.01)
    threading.Timer(0.2, held.set).start()
    second = offbeat.save_checkpoint(tmp_path, step=5)  # waits for the first
    assert saved.done
    assert saved.wait().name < second.wait().name
    loaded = offbeat.load_checkpoint(saved.wait(), model=model)
    assert same(before, dict(model.state_dict()))
    assert (loaded["list"], loaded["tensor"].tolist()) == ([1], [1.0, 1.0])


def test_an_error_in_the_background_is_raised_or_warned_of(tmp_path, monkeypatch):
    offbeat.save_checkpoint(tmp_path, step=1)

    def fail(path, buffers):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("offbeat.checkpoint.tensors.write_file", fail)
        saved = offbeat.save_checkpoint(tmp_path, step=2, background=True)
        with pytest.raises(offbeat.CheckpointError, match="No space left on device; those before are as they were"):
            saved.wait()
        with pytest.raises(offbeat.CheckpointError):
            saved.wait()
        lost = offbeat.save_checkpoint(tmp_path, step=3, background=True)
        while not lost.done:
            pass
    with pytest.warns(RuntimeWarning, match="the save before this one failed.*No space left"):
        offbeat.save_checkpoint(tmp_path, step=4)
    assert [one.step for one in offbeat.list_checkpoints(tmp_path)] == [1, 4]


# --- other makes


def test_a_file_of_torch_save_is_refused_and_can_be_imported(tmp_path):
    model, other = make_model(), make_model(1)
    optimizer, optimizer2 = adamw(model), adamw(other)
    train(model, optimizer, 0, 3)
    file = tmp_path / "last.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, file)
    for path in (file, tmp_path):
        with pytest.raises(offbeat.CheckpointError, match=r"import_torch_save\('.*last\.pt'"):
            offbeat.load_checkpoint(path, model=other)
    assert import_torch_save(file, model=other, optimizer=optimizer2) == {"epoch": 3}
    assert same(dict(model.state_dict()), dict(other.state_dict()))
    assert same(optimizer.state_dict(), optimizer2.state_dict())
    with pytest.raises(CheckpointMismatch, match="other shapes"):
        import_torch_save(file, model=nn.Sequential(nn.Linear(2, 2)))
    torch.save({"epoch": 3}, file)
    with pytest.raises(offbeat.CheckpointError, match="has none of the keys"):
        import_torch_save(file, model=other)


def test_a_file_of_torch_save_that_runs_code_is_refused(tmp_path):
    torch.save({"model": {}, "bad": Bomb(str(tmp_path / "exploded"))}, tmp_path / "bad.pt")
    with pytest.raises(offbeat.CheckpointError, match="cannot be loaded with weights_only=True"):
        import_torch_save(tmp_path / "bad.pt", model=nn.Linear(1, 1))
    assert not (tmp_path / "exploded").exists()


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_folder_of_dcp_is_refused_and_can_be_converted(tmp_path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    model, other = make_model(), make_model(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
        with pytest.raises(offbeat.CheckpointError, match="format_utils dcp_to_torch"):
            offbeat.load_checkpoint(tmp_path / "dcp", model=other)
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "file.pt")  # what the command in the message calls
    import_torch_save(tmp_path / "file.pt", model=other)
    assert same(dict(model.state_dict()), dict(other.state_dict()))


def test_damage_falls_back_or_raises_if_asked_for(tmp_path):
    model = make_model()
    for step in (1, 2, 3):
        path = offbeat.save_checkpoint(tmp_path, model=model, step=step, extra={"step": step}).wait()
    (path / "rank-0.safetensors").write_bytes(b"")
    (tmp_path / "000002-step-2" / "rank-0-model.json").unlink()
    assert [one.complete for one in offbeat.list_checkpoints(tmp_path)] == [True, False, False]
    assert "rank-0.safetensors: has 0 bytes" in offbeat.list_checkpoints(tmp_path)[-1].damage
    with pytest.warns(UserWarning, match="000001-step-1 is loaded instead") as caught:
        assert offbeat.load_checkpoint(tmp_path, model=model)["step"] == 1
    assert [str(one.message).split("; ")[0].rsplit("/", 1)[1] for one in caught] == [
        "rank-0.safetensors: has 0 bytes, but 6280 were written",
        "rank-0-model.json: is missing (No such file or directory)",
    ]
    for asked in ({"folder": tmp_path, "step": 3}, {"folder": path}):
        with pytest.raises(DamagedCheckpoint, match="has 0 bytes"):
            offbeat.load_checkpoint(asked.pop("folder"), model=model, **asked)
    (tmp_path / "000001-step-1" / "manifest.json").unlink()
    with pytest.raises(
        DamagedCheckpoint, match=r"no checkpoint in .* can be loaded: .*has 0 .*is missing.*manifest.json"
    ):
        offbeat.load_checkpoint(tmp_path, model=model)
