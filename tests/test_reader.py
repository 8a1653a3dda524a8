"""The two readers of addresses say the same, and the compiled one is built once, in the background, or not at all."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.utils.flop_counter import FlopCounterMode

import offbeat
from offbeat.engine.addresses import AddressBook
from offbeat.engine.cpu import reader
from offbeat.engine.cpu import reader_build as extension
from tests.ranks import rank_context, run_ranks

LONG = 170


class Subclass(Tensor):
    pass


class Handled(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


def inference():
    with torch.inference_mode():
        return torch.zeros(4, 3)


def freed(offset=0):
    t = torch.zeros(12 + offset)[offset:].view(4, 3)
    t.untyped_storage().resize_(0)
    return t


def shrunk():
    t = torch.zeros(4, 3)
    t.untyped_storage().resize_(44)
    return t


def grown():
    t = torch.zeros(4, 3)
    t.untyped_storage().resize_(4096)
    return t


def set_elsewhere():
    return torch.zeros(4, 3).set_(torch.zeros(40).untyped_storage(), 5, (4, 3), (3, 1))


def functorch():
    found = []
    torch.func.vmap(lambda x: (found.append(x), x)[1])(torch.zeros(2, 4, 3))
    return found[0]


FINE = {
    "plain": lambda: torch.zeros(4, 3),
    "parameter": lambda: Parameter(torch.zeros(4, 3)),
    "part of a storage": lambda: torch.zeros(8, 3)[2:6],
    "set elsewhere": set_elsewhere,
    "grown storage": grown,
    "none": lambda: None,
    "needs a gradient": lambda: torch.zeros(4, 3).requires_grad_(),
    "copied when written": lambda: torch._lazy_clone(torch.zeros(4, 3)),
}
ODD = {
    "negated": lambda: torch._neg_view(torch.zeros(4, 3)),
    "imaginary part": lambda: torch.zeros(4, 3, dtype=torch.complex64).conj().imag,
    "conjugate": lambda: torch.zeros(4, 3, dtype=torch.complex64).conj(),
    "zero tensor": lambda: torch._efficientzerotensor((4, 3)),
    "subclass": lambda: torch.zeros(4, 3).as_subclass(Subclass),
    "subclass with dispatch": lambda: torch.zeros(4, 3).as_subclass(Handled),
    "meta": lambda: torch.zeros(4, 3, device="meta"),
    "sparse": lambda: torch.zeros(4, 3).to_sparse(),
    "compressed": lambda: torch.zeros(4, 3).to_sparse_csr(),
    "mkldnn": lambda: torch.zeros(4, 3).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(4, 3), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(3)] * 4),
    "dtype": lambda: torch.zeros(4, 3, dtype=torch.float64),
    "dtype of the same size": lambda: torch.zeros(4, 3, dtype=torch.int32),
    "shape": lambda: torch.zeros(3, 4),
    "fewer dimensions": lambda: torch.zeros(12),
    "more dimensions": lambda: torch.zeros(4, 3, 1),
    "strides": lambda: torch.zeros(3, 4).t(),
    "gaps": lambda: torch.zeros(4, 6)[:, ::2],
    "expanded": lambda: torch.zeros(1).expand(4, 3),
    "inference": inference,
    "freed": freed,
    "freed, with an offset": lambda: freed(5),
    "shrunk": shrunk,
    "functional": lambda: torch._to_functional_tensor(torch.zeros(4, 3)),
    "functorch": functorch,
    "number": lambda: 1.0,
    "text": lambda: "tensor",
    "type": lambda: Tensor,
}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    if not reader.wait_for_reader(LONG):
        pytest.fail(f"no compiled reader: {reader.why_no_reader()}")


def both(*arguments, **options):
    """What each reader says: a function of parameters and gradients, and all tables if it says that all is well."""
    in_python, compiled = AddressBook(*arguments, **options), AddressBook(*arguments, **options)
    assert compiled._compiled is not None
    in_python.read = in_python._read_in_python
    in_python._compiled = None

    def read(params, grads):
        answers = []
        for book in (in_python, compiled):
            count = book.read(params, grads)
            answers.append((count, None if count is None else [table.tolist() for table in book.tables]))
        assert answers[0] == answers[1]
        return answers[0]

    read.books = (in_python, compiled)
    return read


def rows():
    params = [Parameter(torch.zeros(4, 3)), Parameter(torch.zeros(4, 3)), Parameter(torch.zeros(()))]
    state = [torch.zeros_like(p, dtype=torch.bfloat16) for p in params]
    return params, state


@pytest.mark.parametrize("name", [*FINE, *ODD])
def test_both_readers_agree_on_a_gradient(name):
    params, state = rows()
    read = both([params, state])
    g = (FINE.get(name) or ODD[name])()
    grads = [torch.zeros(4, 3), g, torch.zeros(())]
    count, tables = read(params, grads)
    if name in ODD:
        assert count is None
    else:
        assert count == (2 if g is None else 3)
        assert tables[0] == [p.data_ptr() for p in params]
        assert tables[1] == [0 if g is None else g.data_ptr() for g in grads]
        assert tables[2] == [t.data_ptr() for t in state]
    try:
        for p, gradient in zip(params, grads, strict=True):
            p.grad = gradient
    except (RuntimeError, TypeError):
        return  # torch refuses it as a gradient
    assert read(params, None) == (count, tables)


@pytest.mark.parametrize("name", [*FINE, *ODD])
@pytest.mark.parametrize("column", [0, 1], ids=["parameter", "state"])
def test_both_readers_agree_on_what_becomes_of_a_tensor(name, column):
    params = rows()[0]
    columns = [params, [torch.zeros_like(p) for p in params]]
    read = both(columns)
    try:
        columns[column][1].data = (FINE.get(name) or ODD[name])()
    except (RuntimeError, TypeError):
        pytest.skip("a tensor cannot become that")
    fits = name in FINE or "subclass" in name  # the tensor's own class stays what it was
    count, tables = read(params, [None, torch.zeros(4, 3), None])
    assert count == (1 if fits else None)
    if fits:
        assert tables[2 * column][1] == columns[column][1].data_ptr()


@pytest.mark.parametrize("change", [lambda t: t.t(), lambda t: t.view(9), lambda t: t.view(torch.bfloat16)])
def test_a_parameter_that_stays_where_it_is_but_changes_is_noticed(change):
    params = [Parameter(torch.zeros(3, 3, dtype=torch.float16)) for _ in range(2)]
    read = both([params, [torch.zeros_like(p) for p in params]])
    grads = [torch.zeros(3, 3, dtype=torch.float16) for _ in params]
    assert read(params, grads)[0] == 2
    address = params[1].data_ptr()
    params[1].data = change(params[1].data)
    assert params[1].data_ptr() == address
    assert read(params, grads)[0] is None


def test_python_reads_state_again_only_when_it_has_moved(monkeypatch):
    monkeypatch.setenv("OFFBEAT_READER", "python")
    params, state = rows()
    book = AddressBook([params, state])
    checked = []
    fit = book._fit
    monkeypatch.setattr(book, "_fit", lambda tensors, *more: checked.append(tensors) or fit(tensors, *more))
    grads = [torch.zeros_like(p) for p in params]
    for _ in range(2):
        assert book.read(params, grads) == 3
    assert checked == [params, state, grads, grads]
    state[1].data = torch.zeros(4, 3, dtype=torch.bfloat16)
    assert book.read(params, grads) == 3
    assert checked[4:] == [state, grads]
    assert book.tables[2][1] == state[1].data_ptr()


@pytest.mark.parametrize("column", [0, 1], ids=["parameter", "state"])
@pytest.mark.parametrize("bytes_left", [0, 20])
def test_memory_that_is_taken_away_is_seen(column, bytes_left):
    params, state = rows()
    whole = torch.zeros(24, dtype=torch.bfloat16)
    state[1] = whole[12:].view(4, 3)
    read = both([params, state])
    assert read(params, None)[0] == 0
    [params, state][column][1].untyped_storage().resize_(bytes_left)
    assert read(params, None)[0] is None
    [params, state][column][1].untyped_storage().resize_(4096)
    assert read(params, None)[0] == 0


def test_strides_of_single_elements_and_empty_tensors():
    params = [Parameter(torch.zeros(1, 5)), Parameter(torch.zeros(0, 3)), Parameter(torch.zeros(2, 1, 2, 1, 2, 1))]
    read = both([params])
    grads = [
        torch.zeros(5, 1).t(),
        torch.zeros(0, 3),
        torch.zeros(8).as_strided((2, 1, 2, 1, 2, 1), (4, 9, 2, 8, 1, 7)),
    ]
    count, tables = read(params, grads)
    assert count == 3
    assert tables[0][1] == 0
    assert tables[1] == [grads[0].data_ptr(), 1, grads[2].data_ptr()]


def test_lists_that_are_not_the_books():
    params, state = rows()
    read = both([params, state])
    grads = [torch.zeros_like(p) for p in params]
    assert read(tuple(params), tuple(grads))[0] == 3
    for wrong in (params[:2], [], params[::-1], [*params, params[0]], [1, 2, 3], [None] * 3):
        assert read(wrong, None)[0] is None
    for wrong in (grads[:2], [], [*grads, None]):
        assert read(params, wrong)[0] is None
    assert read(params, grads)[0] == 3


def test_pinned_tensors_stay_where_they_are():
    params, state = rows()
    pinned = [torch.zeros(()) for _ in params]
    read = both([params, state], [pinned])
    assert read(params, None)[0] == 0
    before = pinned[1].data
    pinned[1].data = torch.zeros(())
    assert read(params, None)[0] is None
    pinned[1].data = before
    assert read(params, None)[0] == 0


def test_swapped_tensors_are_read_anew():
    params, state = rows()
    read = both([params, state])
    torch.utils.swap_tensors(params[0], Parameter(torch.ones(4, 3)))
    assert read(params, None)[1][0][0] == params[0].data_ptr()


def test_the_reader_minds_what_it_is_given():
    module = reader.compiled_reader()
    for wrong in ((), (1,) * 12, ([], None, [[]], [], 1, [], torch.device("cpu"), [], 1, None, [], [])):
        with pytest.raises(TypeError):
            module.read(*wrong)
    with pytest.raises(TypeError):
        module.bump([], 1)


def test_versions_of_rows_with_a_gradient_go_up():
    params, state = rows()
    read = both([params, state])
    for book in read.books:
        before = [t._version for t in (*params, *state)]
        assert book.read(params, [None, torch.zeros(4, 3), None]) == 1
        book.bump([1])
        assert [t._version for t in (*params, *state)] == [v + (i % 3 == 1) for i, v in enumerate(before)]


def test_nothing_is_kept_alive_by_reading():
    params, state = rows()
    read = both([params, state])
    before = [sys.getrefcount(t) for t in (*params, *state)]
    for p in params:
        p.grad = torch.zeros_like(p)
    del p
    grads = [p.grad for p in params]
    counts = [sys.getrefcount(g) for g in grads]
    for _ in range(5):
        read(params, None)
        read(params, grads)
    assert [sys.getrefcount(t) for t in (*params, *state)] == before
    assert [sys.getrefcount(g) for g in grads] == counts


def check_distributed(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    assert reader.wait_for_reader(LONG), reader.why_no_reader()
    mesh, other = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (world, 1))

    def cut(t, mesh=mesh, placements=None):
        return distribute_tensor(t, mesh, placements or [Shard(0)])

    wrappers = [Parameter(cut(torch.zeros(4, 3))) for _ in range(3)]
    shards = [w._local_tensor for w in wrappers]
    state = [torch.zeros_like(s) for s in shards]
    read = both([shards, state], wrappers=wrappers)
    assert read(wrappers, None)[0] == 0
    assert read(shards, None)[0] is None
    for _ in range(2):  # specifications that are new at each step
        grads = [cut(torch.zeros(4, 3)), None, cut(torch.zeros(4, 3))]
        for w, g in zip(wrappers, grads, strict=True):
            w.grad = g
        for given in (None, grads, grads):
            count, tables = read(wrappers, given)
            assert count == 2
            assert tables[1] == [0 if g is None else g._local_tensor.data_ptr() for g in grads]
            assert tables[0] == [s.data_ptr() for s in shards]
    for book in read.books:
        before = [t._version for t in (*shards, *state, *wrappers)]
        book.bump([0, 2])
        assert [t._version for t in (*shards, *state, *wrappers)] == [v + (i % 3 != 1) for i, v in enumerate(before)]
    odd = [
        torch.zeros(4, 3),
        torch.zeros(2, 3),
        cut(torch.zeros(4, 3), placements=(Replicate(),)),
        cut(torch.zeros(4, 3), placements=(Shard(1),)),
        cut(torch.zeros(4, 3), other, (Shard(0), Replicate())),
        cut(torch.zeros(4, 3, dtype=torch.float64)),
        1,
    ]
    wrapped = cut(torch.zeros(4, 3))
    wrapped._local_tensor = wrapped._local_tensor.as_subclass(Subclass)
    for g in (*odd, wrapped):
        assert read(wrappers, [grads[0], g, None])[0] is None, g
    for wrong in ([], grads[:2]):
        assert read(wrappers, wrong)[0] is None
    assert read(wrappers, grads)[0] == 2
    wrappers[0]._local_tensor = shards[0].clone()
    assert read(wrappers, grads)[0] is None
    wrappers[0]._local_tensor = shards[0]
    assert read(wrappers, grads)[0] == 2
    wrappers[0]._spec = cut(torch.zeros(4, 3))._spec
    assert read(wrappers, grads)[0] is None
    return True


@pytest.mark.ranks
def test_both_readers_agree_on_distributed_tensors():
    assert run_ranks(check_distributed, 2) == [True, True]


# Building it. The library that the tests use stands in for what a compiler makes, so that it takes no time.


class Fresh:
    """A reader as of a process that has just started, with a compiler and a cache of its own."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.prebuilt = reader._reader._build.library
        monkeypatch.setenv("OFFBEAT_CACHE_DIR", str(folder / "cache"))
        monkeypatch.setattr(reader, "SECONDS_BETWEEN", 0.02)

    def start(self, how=None):
        """Begin anew; ``how`` is what the compiler does, with ``$out`` for its result and ``$good`` for a good one."""
        if how is not None:
            path = self.folder / "c++"
            path.write_text(
                f"#!/bin/sh\n[ $1 = --version ] && echo fake && exit\necho run >>{self.folder}/runs\n"
                f'while [ "$1" != -o ]; do shift; done\nout=$2 good={self.prebuilt} runs=$(wc -l <{self.folder}/runs)\n'
                f"{how}\n"
            )
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
            self.monkeypatch.setenv("CXX", str(path))
        self.monkeypatch.setattr(reader, "_reader", reader._Reader())
        return reader._reader

    @property
    def runs(self):
        log = self.folder / "runs"
        return len(log.read_text().split()) if log.exists() else 0

    def files(self, end):
        return list((self.folder / "cache").glob(f"*.{end}"))


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    return Fresh(tmp_path, monkeypatch)


def test_a_book_takes_to_the_compiled_reader_when_it_is_there(fresh):
    go = fresh.folder / "go"
    fresh.start(f'while [ ! -e {go} ]; do sleep 0.02; done; cp $good "$out"')
    params, state = rows()
    book = AddressBook([params, state])
    assert book.read(params, None) == 0  # were it to wait for the compiler, the test would time out
    assert book._compiled is None
    assert reader.why_no_reader() == "it is being compiled"
    assert not reader.wait_for_reader(0.05)
    go.touch()
    assert reader.wait_for_reader(20)
    assert reader.why_no_reader() is None
    assert book.read(params, None) == 0
    assert book._compiled is not None
    fresh.start()
    assert AddressBook([params, state])._compiled is not None
    assert fresh.runs == 1
    # The compiler's own directory goes last.
    assert [f.suffix for f in (fresh.folder / "cache").iterdir() if f.is_file() and f.suffix != ".lock"] == [".so"]


def test_a_reader_in_a_cache_that_cannot_be_written_to(fresh, monkeypatch):
    fresh.start('cp $good "$out"')
    assert reader.wait_for_reader(20)
    (library,) = fresh.files("so")
    access, unlink = os.access, Path.unlink

    def refuse(path, missing_ok=False):
        if path == library:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    monkeypatch.setattr(Path, "unlink", refuse)
    one = fresh.start()
    assert reader.wait_for_reader(20)
    assert one._build.library == library
    assert fresh.runs == 1
    damaged = fresh.folder / "damaged"
    damaged.write_bytes(library.read_bytes()[:1000])
    damaged.replace(library)  # another is made elsewhere
    one = fresh.start()
    with pytest.warns(UserWarning, match="cannot be written to"):
        assert reader.wait_for_reader(20)
    assert one._build.library.parent != library.parent
    assert fresh.runs == 2


def test_a_compiler_that_fails_is_asked_once(fresh, recwarn):
    fresh.start("echo 'error: no such thing' >&2; exit 1")
    assert not reader.wait_for_reader(20)
    assert "failed on the address reader: error: no such thing" in reader.why_no_reader()
    params = [Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = offbeat.SGD(params, lr=0.5)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones(3)
        optimizer.step()
    assert params[0].tolist() == [-0.5] * 3
    assert fresh.runs == 1
    assert not recwarn.list
    # Another that was waiting meanwhile has the answer; one that starts later tries again.
    os.utime(fresh.files("failed")[0])  # now: the steps may have taken a while
    fresh.start()
    assert not reader.wait_for_reader(20)
    assert fresh.runs == 1
    os.utime(fresh.files("failed")[0], (1, 1))
    fresh.start('cp $good "$out"')
    assert reader.wait_for_reader(20)
    assert fresh.runs == 2


def test_without_compiler_or_headers_there_is_a_reason(fresh, monkeypatch):
    fresh.start()
    monkeypatch.setenv("CXX", "no-such-compiler --at-all")
    assert not reader.wait_for_reader(20)
    assert reader.why_no_reader() == "no C++ compiler (no-such-compiler --at-all) was found; set CXX"
    fresh.start('cp $good "$out"')
    with monkeypatch.context() as m:
        m.setattr(extension, "_torch_directory", lambda: fresh.folder)
        assert not reader.wait_for_reader(20)
        assert reader.why_no_reader().endswith("include/torch/csrc/autograd/python_variable.h is missing")
    fresh.start()
    with monkeypatch.context() as m:
        m.setattr(extension.sysconfig, "get_paths", lambda: {"include": "/no", "platinclude": "/no"})
        assert not reader.wait_for_reader(20)
        assert reader.why_no_reader() == "/no/Python.h is missing"
    assert fresh.runs == 0


@pytest.mark.parametrize(("variable", "value"), [("OFFBEAT_READER", "python"), ("OFFBEAT_NO_COMPILER", "1")])
def test_variables_that_ask_for_python(fresh, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    fresh.start('cp $good "$out"')
    params, state = rows()
    book = AddressBook([params, state])
    assert book.read(params, None) == 0
    assert not reader.wait_for_reader(1)
    assert book._compiled is None
    assert variable in reader.why_no_reader()
    assert fresh.runs == 0


def load(environment, results):
    os.environ.update(environment)
    params, state = rows()
    book = AddressBook([params, state])
    loaded = reader.wait_for_reader(60)
    results.put((loaded, reader.why_no_reader(), book.read(params, None), book._compiled is not None))


@pytest.mark.ranks
def test_many_processes_build_once(fresh):
    fresh.start('sleep 1; cp $good "$out"')
    context = rank_context()
    results = context.Queue()
    environment = {name: os.environ[name] for name in ("OFFBEAT_CACHE_DIR", "CXX")}
    processes = [context.Process(target=load, args=(environment, results), daemon=True) for _ in range(8)]
    for process in processes:
        process.start()
    assert [results.get(timeout=100) for _ in processes] == [(True, None, 0, True)] * 8
    for process in processes:
        process.join(60)
    assert fresh.runs == 1


def start_only(environment):
    os.environ.update(environment)
    assert reader.compiled_reader() is None


@pytest.mark.ranks
def test_the_compiler_outlives_a_short_program_and_does_not_delay_it(fresh):
    fresh.start('sleep 3; cp $good "$out"')
    environment = {name: os.environ[name] for name in ("OFFBEAT_CACHE_DIR", "CXX")}
    process = rank_context().Process(target=start_only, args=(environment,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert not fresh.files("so"), "it waited for the compiler"
    assert reader.wait_for_reader(60)
    assert fresh.runs == 1


def kill_compiler(one):
    while one._build is None or one._build._process is None:
        one.get()
    os.killpg(one._build._process.pid, signal.SIGKILL)


def wait_for_run(fresh, count):
    end = time.monotonic() + 20
    while fresh.runs < count and time.monotonic() < end:
        time.sleep(0.02)
    assert fresh.runs == count


def test_a_lock_nobody_holds_and_a_compiler_that_was_killed(fresh):
    one = fresh.start('[ $runs = 1 ] && sleep 600; cp $good "$out"')
    one.get()
    wait_for_run(fresh, 1)
    kill_compiler(one)
    assert len(fresh.files("lock")) == 1
    assert reader.wait_for_reader(20)
    assert fresh.runs == 2


def test_a_compiler_that_is_killed_every_time_is_given_up(fresh):
    one = fresh.start("sleep 600")
    for attempt in (1, 2):
        while fresh.runs < attempt:
            one.get()
        kill_compiler(one)
        one._build._process.wait()
    assert not reader.wait_for_reader(20)
    assert "was killed" in reader.why_no_reader()


def test_a_compiler_that_hangs_is_not_waited_for_for_ever(fresh, monkeypatch):
    monkeypatch.setattr(extension, "SECONDS", 0.5)
    one = fresh.start("sleep 600")
    one.get()
    builder, waiting = one._build._process, reader._Reader()
    waiting.get()
    assert waiting._build._process is None
    assert not reader.wait_for_reader(20)
    assert reader.why_no_reader() == "the compiler was not done after 0.5 s"
    assert builder.wait(20) == -signal.SIGKILL


@pytest.mark.parametrize("damage", ["garbage", "cut off", "empty"])
def test_a_damaged_library_is_built_anew(fresh, damage):
    fresh.start('cp $good "$out"')
    assert reader.wait_for_reader(20)
    (library,) = fresh.files("so")
    content = library.read_bytes()
    library.unlink()  # it is mapped
    library.write_bytes({"garbage": b"garbage" * 999, "cut off": content[: len(content) // 2], "empty": b""}[damage])
    fresh.start()
    assert reader.wait_for_reader(20)
    assert fresh.runs == 2
    assert library.read_bytes() == content


def test_a_compiler_that_makes_nonsense(fresh):
    fresh.start('echo nonsense >"$out"')
    assert not reader.wait_for_reader(20)
    assert "could not be loaded" in reader.why_no_reader()
    assert fresh.runs == 2


def test_a_reader_that_disagrees_with_python_is_not_used(fresh, monkeypatch):
    real = reader._load

    class Wrong:
        def __init__(self, path):
            self.bump, self._read = real(path).bump, real(path).read

        def read(self, params, *others):
            count = self._read(params, *others)
            others[2][0][0] += 4
            return count

    monkeypatch.setattr(reader, "_load", Wrong)
    fresh.start('cp $good "$out"')
    assert not reader.wait_for_reader(20)
    assert reader.why_no_reader() == "the compiled reader and Python disagree about some tensors"


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: default_dtype(torch.float64),
        lambda: default_dtype(torch.bfloat16),
        lambda: torch.device("meta"),
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: FlopCounterMode(display=False),
        FakeTensorMode,
    ],
)
def test_the_check_does_not_depend_on_what_the_program_has_set(fresh, setting):
    """The compiler may be done at any time, and the check is made then."""
    fresh.start('cp $good "$out"')
    with setting():
        reader.wait_for_reader(2)  # a dispatch mode puts it off
    assert reader.wait_for_reader(20), reader.why_no_reader()


def in_a_fork(function):
    pid = os.fork()
    if not pid:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_fork_goes_on_reading():
    params, state = rows()
    book = AddressBook([params, state])
    grads = [torch.zeros_like(p) for p in params]
    expected = book.read(params, grads), book.tables

    def child():
        with reader._reader._lock:  # one of its own
            pass
        return (book.read(params, grads), book.tables) == expected and AddressBook([params])._compiled is not None

    with reader._reader._lock:
        in_a_fork(child)


def test_a_fork_while_the_compiler_runs(fresh):
    fresh.start('sleep 0.7; cp $good "$out"')
    assert reader.compiled_reader() is None
    in_a_fork(lambda: reader.wait_for_reader(20))
    assert reader.wait_for_reader(20)
    assert fresh.runs == 1
