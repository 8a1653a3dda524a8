"""Private names of torch and Triton: where they are, that they are there, and what happens if they are not."""

import ast
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import offbeat
from offbeat import _torch
from offbeat.engine.cuda import kernel
from offbeat.replicas.wrapper import OptimizerWrapper

SOURCE = Path(offbeat.__file__).parent
ROOTS = {"torch", "dist", "triton", "knobs", "F", "nn"}
#: Names of our own that torch happens to use as well.
OURS = {"_scale", "_buffers", "_timeout"}
#: Names without an underscore that are just as private.
UNMARKED = {"WeakIdKeyDictionary", "OptState", "packed_metadata", "launch_enter_hook", "launch_exit_hook", "knobs"}


def entries(feature=None):
    return [one for one in _torch.PRIVATE if feature is None or feature in one.features]


def known():
    """The private attributes of torch's objects, from the table."""
    words = {word for one in entries() for word in re.findall(r"\b_[A-Za-z]\w*", one.name)}
    return (words | UNMARKED) - {"_C", "_utils", "_autograd"}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def chain(node):
    """``a.b.c`` as a list, or what of it can be read from its end."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else ["", *parts]


def private_names(source, names):
    for node in ast.walk(ast.parse(source)):
        found = []
        if isinstance(node, ast.Attribute):
            root, *rest = chain(node)
            own = root in ("self", "cls") and len(rest) == 1 and node.attr in OURS
            if root == "_torch":
                continue
            if (root in ROOTS and is_private(node.attr)) or (node.attr in names and not own):
                found = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "triton"):
            parts = [*node.module.split("."), *(one.name for one in node.names)]
            found = [part for part in parts if is_private(part) or part in names]
        elif isinstance(node, ast.Import):
            parts = [part for one in node.names for part in one.name.split(".") if one.name[:5] in ("torch", "trito")]
            found = [part for part in parts if is_private(part) or part in names]
        elif isinstance(node, ast.ClassDef):  # what torch would find on an object of ours
            found = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
            found += [x.id for one in node.body if isinstance(one, ast.Assign) for x in one.targets if hasattr(x, "id")]
            found = [name for name in found if name in names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # getattr(x, "_name") and import_module("torch._name"), but not prose.
            parts = node.value.split(".")
            if node.value in names - OURS or (parts[0] in ROOTS and all(map(str.isidentifier, parts))):
                found = [part for part in parts if is_private(part) or part in names]
            elif node.value.startswith(("_foreach_", "_fused_")):
                found = [node.value]
        yield from ((node.lineno, name) for name in found)


def test_private_names_are_in_one_place():
    names = known()
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name != "_torch.py":
            found += [
                f"{path.relative_to(SOURCE)}:{line}: {name}" for line, name in private_names(path.read_text(), names)
            ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._len_torch_dispatch_stack()",
        "torch._foreach_add_(a, b)",
        "getattr(torch, f'_foreach_{name}')",
        "from torch.optim.optimizer import _global_optimizer_pre_hooks",
        "from torch.utils import _pytree",
        "import torch.utils._pytree as pytree",
        "dist.distributed_c10d._world",
        "tensor._version",
        "self.scaler._scale",
        "getattr(module, '_orig_mod', module)",
        "importlib.import_module('triton.knobs')",
        "sys.modules.get('torch._subclasses.fake_tensor')",
        "self._optimizer_step_pre_hooks",
        "class A:\n    def _accelerator_graph_capture_health_check(self): pass",
        "class A:\n    _step_supports_amp_scaling = True",
    ],
)
def test_the_search_finds(line):
    assert list(private_names(line, known()))


def test_all_are_there():
    pytest.importorskip("triton")
    assert [name for name, is_there in _torch.report() if not is_there] == []


def test_every_entry_says_what_it_is():
    assert all(one.name and one.purpose for one in entries())
    assert {feature for one in entries() for feature in one.features} == set(_torch.FEATURES)


def hide(monkeypatch, one):
    monkeypatch.setitem(vars(one), "is_there", False)


def name_of(one):
    return one.name.split(",")[0]


def step_plainly():
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = offbeat.AdamW([w], lr=0.1)
    w.grad = torch.ones(3)
    optimizer.step()
    assert not torch.equal(w, torch.ones(3))
    return w, optimizer


@pytest.mark.parametrize("one", entries("overlap"), ids=name_of)
def test_overlap_raises_by_name(one, monkeypatch):
    hide(monkeypatch, one)
    model = torch.nn.Linear(2, 2)
    optimizer = offbeat.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match=re.escape(one.name)) as raised:
        offbeat.overlap(optimizer, model)
    assert "offbeat.overlap()" in str(raised.value)
    assert torch.__version__ in str(raised.value)
    step_plainly()


@pytest.mark.parametrize("one", entries("scaler"), ids=name_of)
def test_overlap_with_a_scaler_raises_by_name(one, monkeypatch):
    hide(monkeypatch, one)
    model = torch.nn.Linear(2, 2)
    optimizer = offbeat.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match=re.escape(one.name)):
        offbeat.overlap(optimizer, model, scaler=torch.amp.GradScaler("cpu"))
    offbeat.overlap(optimizer, model).remove()


@pytest.mark.parametrize("one", entries("sync"), ids=name_of)
def test_sync_raises_by_name(one, monkeypatch):
    hide(monkeypatch, one)
    model = torch.nn.Linear(2, 2)
    optimizer = offbeat.AdamW(model.parameters())
    with pytest.raises(RuntimeError, match=re.escape(one.name)) as raised:
        offbeat.LocalSGD(optimizer, model)
    assert "LocalSGD" in str(raised.value)
    with pytest.raises(RuntimeError, match=re.escape(one.name)):
        OptimizerWrapper(optimizer)  # PostLocalSGDOptimizer is one
    step_plainly()


def compiled_without(name):
    class Renamed(type(torch.compile(torch.nn.Linear(2, 2)))):
        def __getattr__(self, attribute):
            raise AttributeError(attribute)

    module = object.__new__(Renamed)
    assert not hasattr(module, name)
    return module


@pytest.mark.parametrize(
    ("feature", "use"),
    [
        ("ddp", lambda: _torch.comm_hooks(None)),
        ("fsdp", lambda: _torch.fsdp_groups(None)),
        ("join", lambda: _torch.is_joining(None)),
        ("uneven", lambda: _torch.rebuild_buckets(None)),
        ("mesh", lambda: _torch.flat_mesh(None, "")),
        ("shards", lambda: _torch.shard_place(None)),
        ("compiled", lambda: _torch.inner_module(compiled_without("_orig_mod"))),
    ],
)
def test_other_features_raise_by_name(feature, use, monkeypatch):
    for one in entries(feature):
        with monkeypatch.context() as patch:
            hide(patch, one)
            with pytest.raises(RuntimeError, match=re.escape(one.name)):
                use()


# Triton: kernels that note how they are launched.


class Launcher:
    """As that of Triton 3.6."""

    def __init__(self):
        self.calls = []

    def __call__(self, gridX, gridY, gridZ, stream, function, *args):
        self.calls.append((gridX, gridY, gridZ, stream, function, *args))


class NamedLauncher(Launcher):
    """As that of Triton 3.9."""

    def __call__(
        self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, launch_enter_hook,
        launch_exit_hook, *args,
    ):  # fmt: skip
        more = (kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook)
        self.calls.append((gridX, gridY, gridZ, stream, function, *more, *args))


class Swapped(Launcher):
    def __call__(self, gridX, gridY, gridZ, function, stream, *args):
        raise AssertionError("its arguments are in another order")


class Longer(Launcher):
    def __call__(self, gridX, gridY, gridZ, stream, function, cluster, *args):
        raise AssertionError("it takes one more")


class NoRest(Launcher):
    def __call__(self, gridX, gridY, gridZ, stream, function, args):
        raise AssertionError("it takes them as a tuple")


class Kernel:
    def __init__(self, run, function=77, packed_metadata="packed"):
        self.run, self.function, self.packed_metadata = run, function, packed_metadata
        self.documented = []

    def __getitem__(self, grid):
        return lambda *args, stream: self.documented.append((grid, stream, args))


@pytest.fixture
def triton(monkeypatch):
    """Stands for Triton, with nobody who listens to launches."""
    hooks = {f"launch_{when}_hook": SimpleNamespace(calls=[]) for when in ("enter", "exit")}
    module = SimpleNamespace(__version__="3.6.0", knobs=SimpleNamespace(runtime=SimpleNamespace(**hooks)))
    monkeypatch.setitem(sys.modules, "triton", module)
    monkeypatch.setitem(sys.modules, "triton.knobs", module.knobs)
    return module


def launched(compiled):
    kernel.launcher(compiled)(5, 9, "a", "b")
    return compiled.documented, getattr(compiled.run, "calls", [])


DOCUMENTED = [((5, 1, 1), 9, ("a", "b"))]
DIRECT = [(5, 1, 1, 9, 77, "packed", None, None, None, "a", "b")]


@pytest.mark.parametrize(("version", "launcher"), [("3.6.0", Launcher), ("3.9.1+git1234", NamedLauncher)])
def test_a_known_launch(triton, version, launcher):
    triton.__version__ = version
    assert launched(Kernel(launcher())) == ([], DIRECT)


def test_listeners_are_told(triton):
    compiled = Kernel(Launcher())
    launch = kernel.launcher(compiled)
    triton.knobs.runtime.launch_exit_hook.calls.append(print)
    launch(5, 9, "a", "b")
    assert (compiled.documented, compiled.run.calls) == (DOCUMENTED, [])


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0", "unknown"])
def test_a_version_nobody_has_looked_at(triton, version):
    triton.__version__ = version
    assert launched(Kernel(Launcher())) == (DOCUMENTED, [])


@pytest.mark.parametrize("launcher", [Swapped, Longer, NoRest])
def test_a_launcher_of_another_form(triton, launcher):
    assert launched(Kernel(launcher())) == (DOCUMENTED, [])


@pytest.mark.parametrize("compiled", [Kernel(print), Kernel(Launcher(), function=None), Kernel(7)])
def test_what_cannot_be_looked_at(triton, compiled):
    assert launched(compiled) == (DOCUMENTED, [])


def test_attributes_that_are_gone(triton):
    for name in ("run", "function", "packed_metadata"):
        compiled = Kernel(Launcher())
        delattr(compiled, name)
        assert not _torch.triton_launch_is_known(compiled)
        kernel.launcher(compiled)(5, 9, "a", "b")
        assert compiled.documented == DOCUMENTED


def test_listeners_that_cannot_be_seen(triton):
    triton.knobs.runtime.launch_enter_hook = None
    assert launched(Kernel(Launcher())) == (DOCUMENTED, [])


def test_the_installed_launchers_are_known():
    pytest.importorskip("triton")
    for backend, name in [("nvidia", "CudaLauncher"), ("amd", "HIPLauncher")]:
        module = pytest.importorskip(f"triton.backends.{backend}.driver")
        launcher = getattr(module, name)
        assert _torch.triton_launch_is_known(Kernel(launcher.__new__(launcher)))
