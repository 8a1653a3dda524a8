"""What may happen to a checkpoint: kills, power cuts, full disks, damaged and malicious files."""

from __future__ import annotations

import builtins
import errno
import json
import os
import pickle
import random
import shutil
import stat
import struct
import subprocess
import warnings
import zlib
from pathlib import Path

import pytest
import torch
from torch import nn

import offbeat
from benchmarks.chaos_checkpoint import kill_saves
from offbeat.checkpoint import DamagedCheckpoint
from offbeat.checkpoint.manifest import SECTIONS, Manifest
from offbeat.checkpoint.tensors import read_tensors
from tests.checkpoint_work import adamw, make_model, same, train

# --- kills


@pytest.mark.timeout(300)
def test_a_run_that_is_killed_during_saves_goes_on_with_the_same_bits(tmp_path):
    assert kill_saves(4, seed=1, folder=tmp_path)["kills"] == 4


# --- power cuts


class Folder:
    """A folder on a disk: its names now, and those that a power cut leaves."""

    def __init__(self):
        self.now, self.durable, self.pending = {}, {}, []

    def change(self, operation):
        self.pending.append(operation)
        operation(self.now)

    def sync(self):
        self.durable, self.pending = dict(self.now), []


class File:
    """A file: its content now, and what a power cut leaves of it."""

    def __init__(self):
        self.now = self.durable = b""


class Disk:
    """Records what happens below a folder, and says what is there after a power cut.

    Only what was synced is certain: a file's content and a folder's names at their last fsync. Everything else may have
    reached the disk or not, in any combination, except that a rename is not torn.
    """

    def __init__(self, root, monkeypatch):
        self.root, self.top, self.count, self.watch = Path(root), Folder(), 0, lambda: None
        self.open_files = {}
        real = {
            name: getattr(os, name)
            for name in ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")
        }
        for name, function in real.items():
            monkeypatch.setattr(os, name, self._wrap(name, function))

    def _wrap(self, name, function):
        def call(*args, **options):
            result = function(*args, **options)
            if getattr(self, "_" + name)(result, *args) is not False:
                self.count += 1
                self.watch()
            return result

        return call

    def _place(self, path):
        try:
            *parts, name = Path(path).relative_to(self.root).parts or ("",)
        except ValueError:
            return None
        folder = self.top
        for part in parts:
            folder = folder.now[part]
        return folder, name

    def _open(self, descriptor, path, flags, *_):
        place = self._place(path) if isinstance(path, (str, os.PathLike)) else None
        if place is None:
            return False
        folder, name = place
        if flags & os.O_CREAT:
            file = File()
            folder.change(lambda names: names.__setitem__(name, file))
        self.open_files[descriptor] = folder.now[name] if name else self.top
        return bool(flags & os.O_CREAT)

    def _write(self, count, descriptor, data):
        if descriptor not in self.open_files:
            return False
        self.open_files[descriptor].now += bytes(data[:count])
        return True

    def _fsync(self, _, descriptor):
        if descriptor not in self.open_files:
            return False
        thing = self.open_files[descriptor]
        if isinstance(thing, Folder):
            thing.sync()
        else:
            thing.durable = thing.now
        return True

    def _close(self, _, descriptor):
        self.open_files.pop(descriptor, None)
        return False

    def _mkdir(self, _, path, *rest):
        if (place := self._place(path)) is None:
            return False
        new = Folder()
        place[0].change(lambda names: names.__setitem__(place[1], new))
        return True

    def _rename(self, _, source, target):
        (folder, old), (other, new) = self._place(source), self._place(target)
        assert folder is other
        thing = folder.now[old]

        def move(names):
            if names.get(old) is thing:
                del names[old]
            names[new] = thing

        folder.change(move)
        return True

    def _unlink(self, _, path, **rest):
        if (place := self._place(path)) is None:
            return False
        place[0].change(lambda names: names.pop(place[1], None))
        return True

    _rmdir = _unlink

    def after_a_cut(self, target, draw):
        """Write what a power cut leaves into a folder. ``draw()`` says whether something unsynced is there."""
        self._leave(self.top, target, draw)

    def _leave(self, thing, target, draw):
        if isinstance(thing, File):
            target.write_bytes(thing.now if draw() else thing.durable)
            return
        names = dict(thing.durable)
        for operation in thing.pending:
            if draw():
                operation(names)
        target.mkdir()
        for name, inside in names.items():
            self._leave(inside, target / name, draw)


def test_every_power_cut_leaves_the_new_checkpoint_or_the_one_before(tmp_path, monkeypatch):
    model = make_model()
    optimizer = adamw(model)
    train(model, optimizer, 0, 1)
    states = {1: {name: value.clone() for name, value in model.state_dict().items()}}
    root = tmp_path / "disk"
    root.mkdir()
    cuts, seen = [], []

    def cut():
        for kind in ("nothing", "all", *range(3)):
            target = tmp_path / f"cut-{len(cuts)}-{kind}"
            draw = random.Random(f"{len(cuts)} {kind}")
            choose = {"nothing": lambda: False, "all": lambda: True}.get(kind, lambda draw=draw: draw.random() < 0.5)
            disk.after_a_cut(target, choose)
            seen.append((len(cuts), kind, target))
        cuts.append(disk.count)

    with monkeypatch.context() as patch:
        disk = Disk(root, patch)
        offbeat.save_checkpoint(root / "a" / "b", model=model, optimizer=optimizer, keep=1)
        disk.watch = cut
        cut()
        train(model, optimizer, 1, 2)
        offbeat.save_checkpoint(root / "a" / "b", model=model, optimizer=optimizer, keep=1)
        cut()
    states[2] = {name: value.clone() for name, value in model.state_dict().items()}
    assert len(cuts) > 20
    loaded = []
    for number, kind, target in seen:
        other = make_model(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step = offbeat.load_checkpoint(target / "a" / "b", model=other, optimizer=adamw(other)).step
        assert same(states[step], dict(other.state_dict())), (number, kind)
        loaded.append((number, kind, step))
        shutil.rmtree(target)
    last = len(cuts) - 1
    assert {step for number, _, step in loaded if number == 0} == {1}
    assert {step for number, _, step in loaded if number == last} == {2}  # which had returned
    assert {step for _, _, step in loaded} == {1, 2}


@pytest.mark.parametrize("what", ["files", "folders"])
def test_the_simulated_disk_notices_a_missing_sync(tmp_path, monkeypatch, what):
    root = tmp_path / "disk"
    root.mkdir()
    with monkeypatch.context() as patch:
        disk = Disk(root, patch)
        real = os.fsync
        patch.setattr(os, "fsync", lambda fd: None if _is_folder(fd) == (what == "folders") else real(fd))
        offbeat.save_checkpoint(root, extra={"a": 1})
        disk.after_a_cut(tmp_path / "cut", lambda: False)
    with pytest.raises((FileNotFoundError, DamagedCheckpoint)):
        offbeat.load_checkpoint(tmp_path / "cut")


def _is_folder(descriptor):
    return stat.S_ISDIR(os.fstat(descriptor).st_mode)


# --- full disks, and any other error of the system


def saved_twice(folder):
    """Checkpoints of steps 1 and 2. Returns the state after each."""
    model = make_model()
    optimizer = adamw(model)
    states = {}
    for step in (1, 2):
        train(model, optimizer, step - 1, step)
        offbeat.save_checkpoint(folder, model=model, optimizer=optimizer, extra={"step": step, "x": torch.ones(3)})
        states[step] = ({n: v.clone() for n, v in model.state_dict().items()}, optimizer.state_dict())
    return states


OPERATIONS = ("open", "write", "fsync", "mkdir", "rename")


class Failing:
    """Makes the ``number``-th operation of the system below a folder fail."""

    def __init__(self, folder, number, monkeypatch):
        self.folder, self.left = str(folder), number
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, function):
        def call(first, *args, **options):
            if isinstance(first, int) or str(first).startswith(self.folder):
                self.left -= 1
                if self.left == 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
            return function(first, *args, **options)

        return call


def test_an_error_at_any_operation_leaves_the_checkpoint_before_or_the_new_one(tmp_path, monkeypatch):
    model = make_model()
    optimizer = adamw(model)
    train(model, optimizer, 0, 1)
    folder = tmp_path / "checkpoints"
    offbeat.save_checkpoint(folder, model=model, optimizer=optimizer)
    before = sorted(folder.rglob("*"))
    train(model, optimizer, 1, 2)
    failed = 0
    for number in range(1, 1000):
        with monkeypatch.context() as patch:
            failing = Failing(tmp_path, number, patch)
            try:
                path = offbeat.save_checkpoint(folder, model=model, optimizer=optimizer).wait()
            except offbeat.CheckpointError:
                failed, path = failed + 1, None
        there = offbeat.list_checkpoints(folder)
        assert all(one.complete for one in there)
        assert [one.step for one in there] == ([1] if path is None else [1, 2]), number
        if path is None:
            assert [one for one in sorted(folder.rglob("*")) if ".tmp" not in str(one)] == before
        elif failing.left > 0:
            break
        else:
            shutil.rmtree(path)
    assert failed > 15
    assert not list(folder.glob(".*"))  # the last save has cleared up


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_is_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        small, large = nn.Linear(100, 1000), nn.Linear(100, 2000)
        offbeat.save_checkpoint(disk, model=small, step=1)
        with pytest.raises(offbeat.CheckpointError, match=r"No space left on device; those before are as they were"):
            offbeat.save_checkpoint(disk, model=large, step=2)
        assert [path.name for path in disk.iterdir()] == ["000001-step-1"]
        other = nn.Linear(100, 1000)
        assert offbeat.load_checkpoint(disk, model=other).step == 1
        assert torch.equal(small.weight, other.weight)
    finally:
        subprocess.run(["umount", disk], check=True)


# --- damaged files


FILES = ["manifest.json", "rank-0.safetensors", *(f"rank-0-{section}.json" for section in SECTIONS)]


def damages():
    draw = random.Random(0)
    for name in FILES:
        for i in range(25):
            where = {0: 0.0, 1: 1.0, 2: 8 / 10_000}.get(i, draw.random())
            yield pytest.param(name, "flip", where, 1 << draw.randrange(8), id=f"{name}-flip-{i}")
        for where in (0.0, 0.001, 0.5, 0.999):
            yield pytest.param(name, "cut", where, 0, id=f"{name}-cut-{where}")
        yield pytest.param(name, "longer", 0.0, 0, id=f"{name}-longer")
        yield pytest.param(name, "zeros", 0.0, 0, id=f"{name}-zeros")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two checkpoints, and the states that they have."""
    folder = tmp_path_factory.mktemp("two")
    return folder, saved_twice(folder)


@pytest.mark.parametrize(("name", "kind", "where", "bit"), damages())
def test_damage_in_any_file_is_named_and_the_one_before_is_loaded(two, tmp_path, name, kind, where, bit):
    folder = tmp_path / "copy"
    shutil.copytree(two[0], folder)
    file = folder / "000002-step-2" / name
    content = bytearray(file.read_bytes())
    at = min(int(where * len(content)), len(content) - 1)
    if kind == "flip":
        content[at] ^= bit
    elif kind == "cut":
        del content[at:]
    elif kind == "longer":
        content += b"\0"
    else:
        content[:] = bytes(len(content))
    file.write_bytes(content)
    model = make_model(1)
    optimizer = adamw(model)
    with pytest.raises(DamagedCheckpoint, match=name):
        offbeat.load_checkpoint(folder, model=model, optimizer=optimizer, step=2)
    with pytest.warns(UserWarning, match=f"{name}: .*000001-step-1 is loaded instead"):
        assert offbeat.load_checkpoint(folder, model=model, optimizer=optimizer)["step"] == 1
    assert same(two[1][1][0], dict(model.state_dict()))
    assert same(two[1][1][1]["param_groups"], optimizer.state_dict()["param_groups"])


# --- malicious files, whose checksums are right


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (builtins.open, (self.path, "w"))


@pytest.fixture
def forged(two, tmp_path):
    """Loads a copy of a checkpoint in which a function has changed files, with right sizes and checksums again."""

    def load(change, manifest=lambda content: None):
        folder = tmp_path / "forged" / "000002-step-2"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(two[0] / "000002-step-2", folder)
        change(folder)
        old = Manifest.read(folder)
        stamps = {}
        for name in old.files:
            content = (folder / name).read_bytes() if (folder / name).is_file() else b""
            stamps[name] = (len(content), zlib.crc32(content))
        (folder / "manifest.json").unlink()
        fields = {**vars(old), "files": stamps}
        manifest(fields)
        Manifest(**fields).write(folder)
        model = make_model(1)
        optimizer = adamw(model)
        before = [{n: v.clone() for n, v in model.state_dict().items()}, optimizer.state_dict()]
        generator = torch.get_rng_state()
        try:
            return offbeat.load_checkpoint(folder, model=model, optimizer=optimizer)
        except offbeat.CheckpointError:
            assert same(before, [dict(model.state_dict()), optimizer.state_dict()])
            assert torch.equal(generator, torch.get_rng_state())
            raise

    assert load(lambda folder: None)["step"] == 2
    return load


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def test_a_pickle_is_not_loaded(forged, tmp_path):
    payload = pickle.dumps(Bomb(str(tmp_path / "exploded")))
    for name in FILES[1:]:
        with pytest.raises(DamagedCheckpoint):
            forged(write(name, payload))
    assert not (tmp_path / "exploded").exists()


def header(content, body=b"", length=None):
    text = json.dumps(content).encode() if not isinstance(content, bytes) else content
    return struct.pack("<Q", len(text) if length is None else length) + text + body


ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header({}, length=2**60), f"its header would have {2**60} bytes"),
        (header({}, length=2**64 - 1), f"its header would have {2**64 - 1} bytes"),
        (b"\0\0", "8 bytes are announced"),
        (header(b"[]"), "malformed"),
        (header(b"{" * 10), "malformed"),
        (header(b'{"a":' * 100_000), "malformed"),
        (header({"a": {**ONE, "data_offsets": [0, 2**62]}}, b"1234"), "malformed"),
        (header({"a": {**ONE, "shape": [2**62]}}, b"1234"), "malformed"),
        (header({"a": {**ONE, "shape": [-1]}}, b"1234"), "malformed"),
        (header({"a": {**ONE, "shape": [1.0]}}, b"1234"), "malformed"),
        (header({"a": {**ONE, "dtype": "OBJ"}}, b"1234"), "malformed"),
        (header({"a": {**ONE, "data_offsets": [4, 0]}}, b"1234"), "malformed"),
        (header({"a": ONE, "b": ONE}, b"1234"), "overlap, leave a gap"),
        (header({"a": ONE}, b"12345678"), "overlap, leave a gap"),
        (header(b'{"a": %b, "a": %b}' % ((json.dumps(ONE).encode(),) * 2), b"1234"), "there twice"),
    ],
)
def test_a_malformed_file_of_tensors_is_refused(forged, tmp_path, content, message):
    with pytest.raises(DamagedCheckpoint):
        forged(write("rank-0.safetensors", content))
    file = tmp_path / "rank-0.safetensors"
    file.write_bytes(content)
    with pytest.raises(DamagedCheckpoint, match=f"{file}.*{message}"):
        read_tensors(file, (len(content), zlib.crc32(content)), lambda name, size: None)


def test_a_tensor_that_is_not_in_its_file_is_missed(forged):
    def rename(folder):
        file = folder / "rank-0.safetensors"
        file.write_bytes(file.read_bytes().replace(b"model/0.bias", b"model/0.bits"))

    with pytest.raises(DamagedCheckpoint, match=r"rank-0\.safetensors: does not have 'model/0\.bias'"):
        forged(rename)


@pytest.mark.parametrize(
    "name",
    [
        "../000001-step-1/rank-0.safetensors",
        "/etc/passwd",
        "..",
        "rank-0.safetensors/../x",
        "rank-0.json\0",
        "",
        "manifest.json",
    ],
)
def test_a_name_outside_of_the_folder_is_refused(forged, name):
    def in_files(fields):
        fields["files"][name] = (1, 2)

    def in_sections(fields):
        fields["sections"][0]["model"] = name

    def in_entries(folder):
        file = folder / "rank-0-model.json"
        content = json.loads(file.read_text())
        content["tensors"]["model/0.bias"]["file"] = name
        file.write_text(json.dumps(content))

    for change in (in_files, in_sections):
        with pytest.raises(DamagedCheckpoint, match="which is no file of a checkpoint"):
            forged(lambda folder: None, change)
    with pytest.raises(DamagedCheckpoint, match="is no file of tensors"):
        forged(in_entries)


def test_links_and_folders_in_place_of_files_are_refused(forged, two):
    def link(folder):
        (folder / "rank-0.safetensors").unlink()
        (folder / "rank-0.safetensors").symlink_to(two[0] / "000002-step-2" / "rank-0.safetensors")

    def directory(folder):
        (folder / "rank-0.safetensors").unlink()
        (folder / "rank-0.safetensors").mkdir()

    def pipe(folder):
        (folder / "rank-0-model.json").unlink()
        os.mkfifo(folder / "rank-0-model.json")

    for change in (link, directory, pipe):
        with pytest.raises(DamagedCheckpoint):
            forged(change)


ODD = [None, -1, 2**70, 1.5, "", "a/b", True, [], {}, [[]], {"$": 1}, {"$": "x", "value": 1}]
TAGS = [("tensor", 3), ("float", "1e999"), ("dtype", "os"), ("device", "x"), ("dict", [1]), ("tuple", 1), ("size", "a")]
ODD += [{"$": kind, "value": value} for kind, value in TAGS]


def mutated(value, draw, depth=0):
    """A copy in which one thing is replaced, removed or doubled."""
    if draw.random() < 0.15 * depth or not isinstance(value, (dict, list)) or not value:
        return draw.choice(ODD)
    if isinstance(value, list):
        i = draw.randrange(len(value))
        return [*value[:i], *draw.choice([[], [value[i]] * 2, [mutated(value[i], draw, depth + 1)]]), *value[i + 1 :]]
    key = draw.choice(sorted(value))
    if draw.random() < 0.3:
        return {k: v for k, v in value.items() if k != key}
    return {**value, key: mutated(value[key], draw, depth + 1)}


def test_documents_with_anything_in_them_load_or_are_refused(forged):
    """Random changes of the documents, with right checksums: nothing but a CheckpointError, and nothing half-loaded."""
    draw, refused = random.Random(0), 0

    def change(folder):
        file = folder / draw.choice(FILES[2:])
        file.write_text(json.dumps(mutated(json.loads(file.read_text()), draw)))

    for _ in range(300):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                forged(change)
            except offbeat.CheckpointError:
                refused += 1
    assert refused > 100


def test_very_deep_documents_are_refused(forged):
    for name in FILES[2:]:
        with pytest.raises(DamagedCheckpoint, match="malformed"):
            forged(write(name, b"[" * 200_000))
        with pytest.raises(DamagedCheckpoint, match="malformed"):
            forged(write(name, b'{"tensors":{},"tree":' + b"[" * 900 + b"]" * 900 + b"}"))
