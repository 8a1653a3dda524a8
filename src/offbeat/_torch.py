"""All private names of torch and Triton that this library uses.

Any release may remove such a name. Each has an entry in :data:`PRIVATE`, with its purpose and a probe that checks that
it exists in the expected form. If a feature needs a name, :func:`require` checks for it when the feature is used. The
others are needed by every step, and all supported releases have them. Names that a step needs are looked up here once,
so that they cost a step nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    # The public name is torch.distributed.GradBucket, but type checkers do not find it there.
    from torch._C._distributed_c10d import GradBucket as GradBucket

#: The first and the last release of Triton (major, minor) for which the form of a launch was verified.
TRITON = ((3, 6), (3, 9))

#: The features that need some of the names, as they are called in error messages.
FEATURES = {
    "overlap": "offbeat.overlap()",
    "ddp": "a DistributedDataParallel module with offbeat.overlap() or LocalSGD",
    "fsdp": "offbeat.overlap() of a fully_shard-ed module",
    "scaler": "a GradScaler with offbeat.overlap() or LocalSGD",
    "sync": "LocalSGD or PostLocalSGDOptimizer",
    "warmup": "post_local_sgd_hook",
    "uneven": "finish() before the second batch of a DistributedDataParallel module",
    "shards": "averaging DTensors",
    "mesh": "a group over several dimensions of a DeviceMesh",
    "subgroup": "a process group made by some of the ranks alone",
    "hooks": "state_dict() or load_state_dict()",
    "capture": "capturable=True or capturing a step in a graph",
    "compiled": "a module from torch.compile",
    "pure": "offbeat.as_pure()",
}


@dataclass(frozen=True)
class Private:
    """A private name, or a family of them.

    Args:
        name: the full name; several are separated by commas.
        purpose: what it is used for.
        find: the probe, which returns whether it exists in the expected form. If it raises, it does not.
        features: the :data:`FEATURES` that need it.
    """

    name: str
    purpose: str
    find: Callable[[], Any]
    features: tuple[str, ...] = ()

    @functools.cached_property
    def is_there(self) -> bool:
        """The result of the probe, which runs once."""
        try:
            return bool(self.find())
        except Exception:  # the probe itself may fail on another release
            return False


def report() -> list[tuple[str, bool]]:
    """The name of each entry, and whether it is there."""
    return [(one.name, one.is_there) for one in PRIVATE]


def require(feature: str) -> None:
    """Raise if a name that this feature needs is missing."""
    gone = [one for one in PRIVATE if feature in one.features and not one.is_there]
    if gone:
        raise _missing(feature, [f"{one.name} ({one.purpose})" for one in gone])


def _missing(feature: str, names: Iterable[str]) -> RuntimeError:
    return RuntimeError(
        f"{FEATURES[feature]} cannot be used with torch {torch.__version__}, which does not have "
        f"{' or '.join(names)} in the form that offbeat knows; use another version of torch or of offbeat, or leave "
        "the feature out"
    )


def _get(path: str) -> Any:
    """The object with this dotted name, or None if there is none. Imports nothing."""
    first, *parts = path.split(".")
    found: Any = sys.modules[first]
    for part in parts:
        first = f"{first}.{part}"
        found = getattr(found, part, sys.modules.get(first))  # torch hides some of its modules
    return found


def _module(name: str) -> Any:
    """The module with this name, or None if there is none."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _get_or_raise(path: str, feature: str) -> Any:
    """The object with this dotted name, or a function that raises if there is none."""
    found = _get(path)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise _missing(feature, [path])

    return missing if found is None else found


def _has(where: str, *names: str) -> bool:
    """Whether a class ``module:Class`` or its instances have these attributes.

    An instance counts as having an attribute if a method of the class uses its name.
    """
    module, _, name = where.partition(":")
    cls = getattr(importlib.import_module(module), name)
    return all(hasattr(cls, one) or _uses(cls, one) for one in names)


def _uses(cls: type, name: str) -> bool:
    """Whether a method of a class uses an attribute of this name, written out or in a string."""
    codes = [getattr(inspect.unwrap(f), "__code__", None) for f in vars(cls).values() if callable(f)]
    return any(name in code.co_names or name in code.co_consts for code in codes if code is not None)


# Operators.

_BOTH_FORMS = (
    *("add", "sub", "mul", "div", "maximum", "minimum", "neg", "abs", "sqrt", "sign", "reciprocal"),
    *("addcmul", "addcdiv", "lerp"),
)
_FOREACH = (*_BOTH_FORMS, *(f"{name}_" for name in _BOTH_FORMS), "copy_", "zero_", "norm")
_FUSED = ("adam", "adamw", "sgd", "adagrad")


#: torch's multi-tensor operators by the end of their names, such as ``add_``.
FOREACH: dict[str, Callable[..., Any]] = {name: getattr(torch, f"_foreach_{name}") for name in _FOREACH}
foreach_add, foreach_add_, foreach_copy_ = FOREACH["add"], FOREACH["add_"], FOREACH["copy_"]
foreach_mul_, foreach_div_, foreach_zero_ = FOREACH["mul_"], FOREACH["div_"], FOREACH["zero_"]
foreach_norm = FOREACH["norm"]


#: Copies tensors of one dtype into one flat tensor.
join_tensors: Callable[[Sequence[Tensor]], Tensor] = _get("torch._utils._flatten_dense_tensors")
#: Views of a flat tensor that have the shapes of the given tensors.
split_like: Callable[[Tensor, Sequence[Tensor]], Sequence[Tensor]] = _get("torch._utils._unflatten_dense_tensors")

#: torch's fused optimizers by name, such as ``adamw``.
FUSED: dict[str, Callable[..., Any]] = {name: getattr(torch, f"_fused_{name}_") for name in _FUSED}


@functools.cache
def fused_sgd_is_right(dtype: torch.dtype) -> bool:
    """Whether torch's fused SGD on the CPU is right for this dtype; tries it out.

    In half precision it left most elements unchanged (https://github.com/pytorch/pytorch/issues/191763).
    """
    p, g, momentum = (torch.full((67,), value, dtype=dtype, device="cpu") for value in (1.0, 1.0, 2.0))
    FUSED["sgd"](
        [p], [g], [momentum], weight_decay=0.0, momentum=0.5, lr=0.25, dampening=0.0, nesterov=False, maximize=False,
        is_first_step=False,
    )  # fmt: skip
    return bool((p == 0.5).all()) and bool((momentum == 2.0).all())


#: ``set_grad_enabled(mode)`` switches the recording of operations on or off, in less time than a context manager.
set_grad_enabled: Callable[[bool], Any] = _get("torch._C._set_grad_enabled")

#: Unscales tensors exactly as a GradScaler does, bit for bit.
unscale_tensors = _get_or_raise("torch._amp_foreach_non_finite_check_and_unscale_", "scaler")

#: The operators that set tensors to zero, as ``__torch_dispatch__`` sees them.
ZERO_OPERATORS = tuple(
    found for name in ("zero_", "_foreach_zero_") if (found := _get(f"torch.ops.aten.{name}.default")) is not None
)


# Tensors.

#: A number that is the same for tensors of one storage.
storage_id: Callable[[Any], int] = attrgetter("_cdata")
#: A tensor's version, which every change in place increments.
version_of: Callable[[Any], int] = attrgetter("_version")
#: The values of a sparse tensor that need not be coalesced.
sparse_values = _get_or_raise("torch.Tensor._values", "scaler")
#: ``__torch_function__`` of a class that has none.
no_torch_function: Any = _get("torch._C._disabled_torch_function_impl")
#: The attribute of a DTensor that holds this rank's shard.
LOCAL_TENSOR = "_local_tensor"
#: The attribute of a DTensor that says how it is split, which torch reads before any operator over several of them.
SPEC = "_spec"
#: Makes a negated view.
neg_view: Callable[[Tensor], Tensor] = _get("torch._neg_view")
#: Whether a tensor represents zeros without having memory.
is_zero_tensor: Callable[[Tensor], bool] = _get("torch.Tensor._is_zerotensor")


def shape_only(cls: Any, like: Tensor) -> Any:
    """An instance of a subclass of Tensor that has a shape, a dtype and a device but no memory."""
    return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)


@functools.lru_cache(maxsize=1024)
def order_by_kind(kinds: tuple[tuple[torch.device, torch.dtype], ...]) -> list[int]:
    """The positions of tensors of these devices and dtypes, in the order in which ``get_total_norm`` adds up norms."""
    if len(set(kinds)) < 2:
        return list(range(len(kinds)))
    group = _get("torch._C._group_tensors_by_device_and_dtype")
    found = group([[torch.empty(0, device=device, dtype=dtype) for device, dtype in kinds]], True)
    return [i for _, index in found.values() for i in index]


def is_fake(t: Any) -> bool:
    """Whether this is one of torch's fake tensors, which have no values. Imports nothing."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(t, module.FakeTensor)


def local_tensor(t: Any) -> Any:
    """This rank's shard of a DTensor, to which a collective may still be writing."""
    return t._local_tensor


def spec_of(t: Any) -> Any:
    """The specification of a DTensor, with ``placements`` and ``mesh``. It stays the same object."""
    return t._spec


def shard_place(t: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's shard of a DTensor, and its offset in the whole tensor."""
    require("shards")
    found = importlib.import_module("torch.distributed.tensor._utils").compute_local_shape_and_global_offset
    shape, offset = found(t.shape, t.device_mesh, t.placements)
    return tuple(shape), tuple(offset)


def weak_table() -> Any:
    """A dictionary that compares keys by identity and does not keep them alive."""
    return _module("torch.utils.weak").WeakIdKeyDictionary()


pytree: Any = _module("torch.utils._pytree")


# What is running now.


_dispatch_modes: Callable[[], int] = _get("torch._C._len_torch_dispatch_stack")
_dispatch_mode: Callable[[Any], Any] = _get("torch._C._get_dispatch_mode")
_TRACERS = [_get(f"torch._C._TorchDispatchModeKey.{name}") for name in ("FAKE", "PROXY", "FUNCTIONAL")]


def has_dispatch_mode() -> bool:
    """Whether a dispatch mode is active."""
    return _dispatch_modes() > 0


def is_traced() -> bool:
    """Whether a step is traced (``make_fx``, fake tensors), so that torch must see every operation."""
    return _dispatch_modes() > 0 and any(_dispatch_mode(key) for key in _TRACERS)


#: The number of the backward pass that runs in this thread, or -1 outside of backward.
current_pass: Callable[[], int] = _get_or_raise("torch._C._current_graph_task_id", "overlap")
#: The code of the function that runs a backward pass.
RUN_BACKWARD: CodeType | None = getattr(_get("torch.autograd.graph._engine_run_backward"), "__code__", None)


def is_creating_state() -> bool:
    """Whether torch.distributed.checkpoint makes a step now, with zeros as gradients and as learning rates.

    It does so when it saves or loads an optimizer without state, so that there is one. Such a step must not count:
    https://github.com/pytorch/pytorch/issues/164929.
    """
    found = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(found, "_init_optim_state", None), "__code__", None)
    frame = sys._getframe(1) if code is not None else None
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def queue_callback(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass that runs in this thread."""
    _get_or_raise("torch.autograd.Variable._execution_engine.queue_callback", "overlap")(function)


#: The current stream of a CUDA device as a number. (The name is there only if torch was built for CUDA.)
raw_stream: Callable[[int], int] = _get("torch._C._cuda_getCurrentRawStream")


# Modules.


def inner_module(module: Any) -> Any:
    """The module inside that of ``torch.compile``; any other itself."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # without it nothing has been compiled
    if dynamo is None or not isinstance(module, dynamo.OptimizedModule):
        return module
    if not hasattr(module, "_orig_mod"):
        raise _missing("compiled", ["OptimizedModule._orig_mod"])
    return module._orig_mod


def unwrapped_name(name: str) -> str:
    """The name of a parameter or buffer without what torch.compile, activation checkpointing and FSDP put into it."""
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def persistent_buffers(module: Any) -> list[tuple[str, Tensor]]:
    """A module's own buffers that are part of its state dict."""
    left_out = module._non_persistent_buffers_set
    return [(key, buffer) for key, buffer in module._buffers.items() if buffer is not None and key not in left_out]


def comm_hooks(ddp: Any) -> list[Any]:
    """The communication hooks of a DDP module, with their states; the list itself."""
    require("ddp")
    found: list[Any] = ddp._comm_hooks
    return found


def uses_python_reducer(ddp: Any) -> bool:
    """Whether a DDP module reduces gradients one by one, without buckets."""
    return bool(ddp._use_python_reducer)


def has_final_buckets(ddp: Any) -> bool:
    """Whether a DDP module has made its buckets anew, in the order in which gradients come, as it does once."""
    return bool(getattr(ddp, "_has_rebuilt_buckets", False))


def rebuilds_buckets(ddp: Any) -> bool:
    """Whether a DDP module will make its buckets anew, with its other ranks, at the beginning of a forward pass."""
    makes_once = ddp.static_graph or not ddp.find_unused_parameters
    return makes_once and not uses_python_reducer(ddp) and not has_final_buckets(ddp)


def rebuild_buckets(ddp: Any) -> None:
    """Make buckets anew, which other ranks do at the beginning of a forward pass: all take the first rank's order.

    A rank that has had no backward pass has no order of its own, and pushes its parameters as they come. Gradients and
    parameters stay as they are.
    """
    require("uneven")
    ddp.reducer._push_all_rebuilt_params()  # does nothing if there was a backward pass
    ddp.reducer._rebuild_buckets()
    ddp._has_rebuilt_buckets = True


def lacks_first_pass(ddp: Any) -> bool:
    """Whether a DDP module is in the first backward pass of ``static_graph=True``, or before it.

    In that pass ranks tell each other which parameters they use, and each learns its own graph.
    """
    return bool(ddp.static_graph and not getattr(ddp, "_static_graph_delay_allreduce_enqueued", True))


def divides_by_ranks_left(ddp: Any) -> bool:
    """Whether a DDP module divides by the number of ranks that still have data."""
    return bool(ddp._join_config.enable and not ddp._divide_by_initial_world_size)


def running_ddp() -> DistributedDataParallel | None:
    """The DDP module whose forward pass is running."""
    return DistributedDataParallel._active_ddp_module


def fsdp_groups(module: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers and reduces together for a module of its own."""
    require("fsdp")
    state: Any = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)  # one group, under another name, before torch 2.12
    if found is not None:
        return list(found)
    if not hasattr(state, "_fsdp_param_group"):
        raise _missing("fsdp", ["FSDPState._fsdp_param_groups"])
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


#: Whether FSDP2 waits for the copy of a gradient to the CPU before it calls the hooks on the parameter.
fsdp_waits_for_offload = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)


def fsdp_ends_by_hand(module: Any) -> bool:
    """Whether ``set_manual_backward_finalization(True)`` (new in torch 2.15) holds for a module of FSDP2's."""
    context = getattr(module._get_fsdp_state(), "_state_ctx", None)
    return bool(getattr(context, "manual_backward_finalization", False))


# Optimizers and GradScaler.

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Keep ``torch.compile`` out of a function. Imports torch's compiler only when the function is called."""
    lazy: Any = _get("torch._disable_dynamo")
    kept_out: Function = lazy(function)
    return kept_out


_AMP = "_step_supports_amp_scaling"


def lean_step(func: Callable[..., Any], watched: Callable[..., Any]) -> Callable[..., Any]:
    """A step that calls ``func``, or ``watched`` if there are hooks or a profiler is active."""
    is_compiling, is_profiled = torch.compiler.is_compiling, torch._C._autograd._profiler_enabled
    before, after = (
        _get("torch.optim.optimizer._global_optimizer_pre_hooks"),
        _get("torch.optim.optimizer._global_optimizer_post_hooks"),
    )

    @functools.wraps(func)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or before
            or after
            or is_profiled()
            or is_compiling()
        ):
            return watched(self, *args, **kwargs)
        return func(self, *args, **kwargs)

    return step


def step_pre_hooks(optimizer: Any) -> Any:
    """The OrderedDict of hooks that run before a step; None if the optimizer does not have one."""
    return getattr(optimizer, "_optimizer_step_pre_hooks", None)


def state_dict_hooks(optimizer: Any, when: str) -> list[Callable[..., Any]]:
    """An optimizer's hooks for ``when``: ``state_dict_pre``, ``load_state_dict_post`` and so on."""
    found = getattr(optimizer, f"_optimizer_{when}_hooks", None)
    if found is None:
        raise _missing("hooks", [f"Optimizer._optimizer_{when}_hooks"])
    return list(found.values())


def check_capture(optimizer: Any) -> None:
    """Run torch's own check that a step may be captured, if a graph is being captured."""
    _get_or_raise("torch.optim.Optimizer._accelerator_graph_capture_health_check", "capture")(optimizer)


def takes_scaled_gradients(optimizer: Any) -> bool:
    """Whether a GradScaler leaves unscaling and skipping to this optimizer's step."""
    return bool(getattr(optimizer, _AMP, False))


def own_mark(optimizer: Any) -> bool | None:
    """The value of :func:`takes_scaled_gradients` that is set on this object itself; None if its class decides."""
    found: bool | None = vars(optimizer).get(_AMP)
    return found


def mark_scaled(optimizer: Any, value: bool | None) -> None:
    """Set the value of :func:`takes_scaled_gradients` for an object or a class; None lets the object's class decide."""
    if value is not None:
        setattr(optimizer, _AMP, value)
    elif _AMP in vars(optimizer):
        delattr(optimizer, _AMP)


def mark_wrapper(cls: type, inner: Callable[[Any], Any]) -> None:
    """Make :func:`takes_scaled_gradients` return the same for a wrapper as for the optimizer inside.

    For GradScaler.step it is always True. The scaler then always calls the wrapper's step, and the wrapper skips it if
    necessary.
    """
    scaler_step = torch.amp.GradScaler.step.__code__

    def mark(self: Any) -> bool:
        frame = sys._getframe(1)
        for _ in range(3):  # the scaler, or something that forwards attributes in between
            if frame is None or frame.f_code is scaler_step:
                break
            frame = frame.f_back  # type: ignore[assignment]
        return (frame is not None and frame.f_code is scaler_step) or takes_scaled_gradients(inner(self))

    setattr(cls, _AMP, property(mark))


def scale_of(scaler: Any) -> Tensor | None:
    """A GradScaler's scale; None before it has scaled anything."""
    found: Tensor | None = scaler._scale
    return found


def scaler_states(scaler: Any) -> Any:
    """A GradScaler's state for each optimizer, by id. ``update()`` replaces the dictionary."""
    return scaler._per_optimizer_states


def check_scale(scaler: Any, where: str) -> None:
    """Run a GradScaler's own check that it has scaled something."""
    scaler._check_scale_growth_tracker(where)


def scaler_stage(name: str) -> Any:
    """The stage ``READY``, ``UNSCALED`` or ``STEPPED`` in a GradScaler's state for an optimizer."""
    return importlib.import_module("torch.amp.grad_scaler").OptState[name]


# Process groups.


def device_types(group: Any) -> list[str]:
    """The kinds of devices whose tensors a group can exchange; empty if that is unknown."""
    found = getattr(group, "_device_types", None)
    if found is not None:
        return [device.type for device in found]
    dist = torch.distributed
    return [part.split(":")[0] for part in dist.get_backend_config(group).split(",")] if dist.is_initialized() else []


def timeout_of(group: Any) -> Any:
    """How long a group waits; None if that is unknown."""
    for device in getattr(group, "_device_types", []):
        backend = group._get_backend(device) if hasattr(group, "_get_backend") else None
        found = getattr(getattr(backend, "options", None), "_timeout", None)
        if found is not None:
            return found
    return None


def count_groups() -> int:
    """The number of process groups in this process, as torch counts them; -1 if that is unknown."""
    names = getattr(_get("torch.distributed.distributed_c10d._world"), "pg_names", None)
    return -1 if names is None else len(names)


def has_store() -> bool:
    """Whether the store of the default process group can be used."""
    return _get("torch.distributed.distributed_c10d._get_default_store") is not None


def default_store() -> Any:
    """The store of the default process group."""
    return _get("torch.distributed.distributed_c10d._get_default_store")()


def flat_mesh(mesh: Any, name: str) -> Any:
    """All dimensions of a DeviceMesh as one."""
    require("mesh")
    return mesh._flatten(name)


# Triton.


class TritonLaunch(NamedTuple):
    """How to launch a kernel without calling hooks: see :func:`triton_launch`."""

    run: Callable[..., None]
    function: Any
    metadata: Any
    before: list[Any]
    after: list[Any]


def triton_launch_is_known(compiled: Any) -> bool:
    """Whether a compiled kernel can be launched by ``run(x, y, z, stream, function, metadata, None, None, None, ...)``.

    True only for releases for which this was verified, and if the launcher takes these arguments in this order.
    """
    try:
        triton = importlib.import_module("triton")
        version = tuple(int(number) for number in triton.__version__.split(".")[:2])
        if not TRITON[0] <= version <= TRITON[1] or compiled.function is None or compiled.packed_metadata is None:
            return False
        *named, rest = inspect.signature(compiled.run).parameters.values()
    except (ImportError, AttributeError, TypeError, ValueError):
        return False
    wanted = ["gridx", "gridy", "gridz", "stream", "function"]
    # Later releases name arguments that earlier ones take as the first of ``*args``.
    more = [["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"], []]
    found = [one.name.lower() for one in named]
    return (
        rest.kind is inspect.Parameter.VAR_POSITIONAL
        and all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in named)
        and found in [wanted + names for names in more]
    )


def triton_launch(compiled: Any) -> TritonLaunch | None:
    """The private way to launch a compiled kernel, or None if the documented way must be used."""
    if not triton_launch_is_known(compiled):
        return None
    runtime = getattr(importlib.import_module("triton.knobs"), "runtime", None)
    before = getattr(getattr(runtime, "launch_enter_hook", None), "calls", None)
    after = getattr(getattr(runtime, "launch_exit_hook", None), "calls", None)
    if not (isinstance(before, list) and isinstance(after, list)):
        return None
    return TritonLaunch(compiled.run, compiled.function, compiled.packed_metadata, before, after)


def _has_triton() -> bool:
    compiler = importlib.import_module("triton.compiler.compiler")
    runtime = importlib.import_module("triton.knobs").runtime
    return (
        _has("triton.compiler.compiler:CompiledKernel", "run", "function", "packed_metadata")
        and hasattr(compiler.CompiledKernel, "__getitem__")
        and all(isinstance(hook.calls, list) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))
    )


# The table.

_OPTIMIZER, _DDP, _TENSOR = "torch.optim:Optimizer", "torch.nn.parallel:DistributedDataParallel", "torch:Tensor"
_SCALER, _GROUP = "torch.amp.grad_scaler:GradScaler", "torch.distributed:ProcessGroup"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState"
_EVERY_STATE_HOOK = [f"_optimizer_{load}state_dict_{when}_hooks" for load in ("", "load_") for when in ("pre", "post")]

_TWO_KINDS = ((torch.device("cpu"), torch.float32), (torch.device("cpu"), torch.float64))
PRIVATE: tuple[Private, ...] = (
    Private(
        "torch._C._autograd._profiler_enabled", "whether a step must be marked for a profiler",
        lambda: torch._C._autograd._profiler_enabled() in (True, False),
    ),
    Private(
        "Optimizer._optimizer_step_pre_hooks, Optimizer._optimizer_step_post_hooks, "
        "torch.optim.optimizer._global_optimizer_pre_hooks, torch.optim.optimizer._global_optimizer_post_hooks",
        "whether anybody listens to steps, and the order of those who do",
        lambda: _has(_OPTIMIZER, "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        and all(isinstance(_get(f"torch.optim.optimizer._global_optimizer_{x}_hooks"), dict) for x in ("pre", "post")),
        ("overlap",),
    ),
    Private(
        "torch._foreach_*", "operators over lists of tensors",
        lambda: all(_get(f"torch._foreach_{name}") for name in _FOREACH),
    ),
    Private(
        "torch._utils._flatten_dense_tensors, torch._utils._unflatten_dense_tensors", "many small tensors as one",
        lambda: callable(join_tensors) and callable(split_like),
    ),
    Private(
        "torch._fused_*_", "torch's own fused optimizers, where there is no kernel of ours",
        lambda: all(_get(f"torch._fused_{name}_") for name in _FUSED),
    ),
    Private(
        "torch._amp_foreach_non_finite_check_and_unscale_", "unscaling gradients as GradScaler does, to the bit",
        lambda: _get("torch._amp_foreach_non_finite_check_and_unscale_"), ("scaler",),
    ),
    Private(
        "torch.ops.aten._foreach_zero_", "recognising zero_grad(set_to_none=False) on freed gradients",
        lambda: len(ZERO_OPERATORS) == 2, ("overlap",),
    ),
    Private(
        "torch._C._group_tensors_by_device_and_dtype", "the order in which norms of several dtypes are added up",
        lambda: len(order_by_kind(_TWO_KINDS)) == 2,
    ),
    Private(
        "torch._C._set_grad_enabled", "running a step without recording it",
        lambda: callable(torch._C._set_grad_enabled),
    ),
    Private(
        "torch._neg_view", "a tensor that the compiled reader must refuse",
        lambda: torch._neg_view(torch.ones(1)).is_neg(),
    ),
    Private(
        "torch._disable_dynamo", "keeping torch.compile out of a step",
        lambda: callable(_get("torch._disable_dynamo")),
    ),
    Private(
        "torch._C._len_torch_dispatch_stack, _get_dispatch_mode, _TorchDispatchModeKey, torch._subclasses.fake_tensor",
        "whether make_fx or FakeTensorMode traces a step",
        lambda: torch._C._len_torch_dispatch_stack() >= 0 and all(_dispatch_mode(k) in (None, False) for k in _TRACERS),
    ),
    Private(
        "torch._C._disabled_torch_function_impl, Tensor._make_wrapper_subclass",
        "the placeholder for a gradient that has been freed",
        lambda: _get("torch._C._disabled_torch_function_impl") and _has(_TENSOR, "_make_wrapper_subclass"),
        ("overlap",),
    ),
    Private(
        "torch._C._cuda_getCurrentRawStream", "the current stream as a number",
        lambda: _get("torch._C._cuda_getCurrentRawStream") or torch.version.cuda is None,
    ),
    Private(
        "torch._C._current_graph_task_id", "which backward pass is running",
        lambda: torch._C._current_graph_task_id() == -1, ("overlap", "ddp"),
    ),
    Private(
        "torch.autograd.Variable._execution_engine", "something to do when a backward pass is over",
        lambda: callable(_get("torch.autograd.Variable._execution_engine.queue_callback")), ("overlap", "ddp"),
    ),
    Private(
        "torch.autograd.graph._engine_run_backward", "whether a backward pass runs inside another",
        lambda: RUN_BACKWARD is not None, ("overlap",),
    ),
    Private(
        "Tensor._version", "whether a gradient was changed in between",
        lambda: isinstance(torch.ones(1)._version, int), ("overlap",),
    ),
    Private(
        "UntypedStorage._cdata", "whether tensors share a storage",
        lambda: isinstance(torch.ones(1).untyped_storage()._cdata, int),
    ),
    Private(
        "Tensor._is_zerotensor", "gradients without memory", lambda: torch.ones(1)._is_zerotensor() is False,
    ),
    Private(
        "Tensor._values", "unscaling a sparse gradient in place", lambda: callable(Tensor._values), ("scaler",),
    ),
    Private(
        "torch._subclasses.fake_tensor", "tensors without values",
        lambda: importlib.import_module("torch._subclasses.fake_tensor").FakeTensor,
    ),
    Private(
        "torch.utils._pytree", "nested parameters, and nested outputs of modules",
        lambda: all(hasattr(pytree, f"tree_{word}") for word in ("leaves", "map", "flatten", "unflatten"))
        and hasattr(pytree.TreeSpec, "flatten_up_to"),
        ("pure", "overlap"),
    ),
    Private(
        "torch.utils.weak.WeakIdKeyDictionary", "tables by parameter",
        lambda: hasattr(_module("torch.utils.weak"), "WeakIdKeyDictionary"), ("overlap", "sync", "warmup"),
    ),
    Private(
        ", ".join(f"Optimizer.{name}" for name in _EVERY_STATE_HOOK), "the user's hooks on state dicts",
        lambda: _has(_OPTIMIZER, *_EVERY_STATE_HOOK), ("hooks", "sync"),
    ),
    Private(
        "Optimizer._accelerator_graph_capture_health_check", "torch's check that a step may be captured",
        lambda: _has(_OPTIMIZER, "_accelerator_graph_capture_health_check"), ("capture",),
    ),
    Private(
        "Optimizer._step_supports_amp_scaling", "having a GradScaler leave unscaling and skipping to the step",
        lambda: _uses(torch.amp.GradScaler, _AMP), ("sync", "scaler"),
    ),
    Private(
        "GradScaler._scale, GradScaler._per_optimizer_states, GradScaler._check_scale_growth_tracker",
        "unscaling bucket by bucket, and telling the scaler",
        lambda: _has(_SCALER, "_scale", "_per_optimizer_states", "_check_scale_growth_tracker"), ("scaler",),
    ),
    Private(
        "torch.amp.grad_scaler.OptState", "how far a GradScaler is with an optimizer",
        lambda: scaler_stage("READY") is not scaler_stage("UNSCALED"), ("scaler",),
    ),
    Private(
        "OptimizedModule._orig_mod", "the module inside that of torch.compile",
        lambda: _has("torch._dynamo.eval_frame:OptimizedModule", "_orig_mod"), ("compiled",),
    ),
    Private(
        "Module._buffers, Module._non_persistent_buffers_set", "which buffers are part of a state dict",
        lambda: _has("torch.nn:Module", "_buffers", "_non_persistent_buffers_set"), ("sync",),
    ),
    Private(
        "DistributedDataParallel._has_rebuilt_buckets", "whether gradients still move to other buckets",
        lambda: _has(_DDP, "_has_rebuilt_buckets"),
    ),
    Private(
        "Reducer._push_all_rebuilt_params, Reducer._rebuild_buckets",
        "taking part in what DDP does once, on a rank that has no second batch",
        lambda: _has("torch.distributed:Reducer", "_push_all_rebuilt_params", "_rebuild_buckets"), ("uneven",),
    ),
    Private(
        "DistributedDataParallel._static_graph_delay_allreduce_enqueued",
        "whether a rank has had the first batch of static_graph=True",
        lambda: _has(_DDP, "_static_graph_delay_allreduce_enqueued"),
    ),
    Private(
        "DistributedDataParallel._comm_hooks, DistributedDataParallel._use_python_reducer, "
        "DistributedDataParallel._divide_by_initial_world_size",
        "what a DDP module does with gradients",
        lambda: _has(_DDP, "_comm_hooks", "_use_python_reducer", "_divide_by_initial_world_size"), ("ddp",),
    ),
    Private(
        "DistributedDataParallel._active_ddp_module", "whether a module runs inside a DDP module",
        lambda: hasattr(DistributedDataParallel, "_active_ddp_module"), ("overlap", "sync"),
    ),
    Private(
        "Joinable._join_config", "whether ranks may run out of data",
        lambda: _has("torch.distributed.algorithms.join:Joinable", "_join_config"), ("ddp",),
    ),
    Private(
        "FSDPModule._get_fsdp_state", "which parameters FSDP2 reduces together",
        lambda: _has("torch.distributed.fsdp:FSDPModule", "_get_fsdp_state"), ("fsdp",),
    ),
    Private(
        "FSDPState._fsdp_param_group, FSDPState._fsdp_param_groups", "the same",
        lambda: _has(_FSDP, "_fsdp_param_groups") or _has(_FSDP, "_fsdp_param_group"),
    ),
    Private(
        "FSDPStateContext.manual_backward_finalization", "whether the user ends FSDP2's backward, from torch 2.15 on",
        lambda: (
            not _has("torch.distributed.fsdp:FSDPModule", "set_manual_backward_finalization")
            or _has(f"{_FSDP}Context", "manual_backward_finalization")
        ),
    ),
    Private(
        "DTensor._local_tensor, DTensor._spec", "a shard and how it is cut, without dispatch",
        lambda: {"_local_tensor", "_spec"} <= {*importlib.import_module("torch.distributed.tensor").DTensor.__slots__},
    ),
    Private(
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        "which shard this is, for ranks to compare",
        lambda: _module("torch.distributed.tensor._utils").compute_local_shape_and_global_offset,
        ("shards",),
    ),
    Private(
        "torch.distributed.checkpoint.state_dict._init_optim_state",
        "whether a step is made to create state for a checkpoint",
        lambda: _has("torch.distributed.checkpoint.state_dict:_init_optim_state", "__code__"),
    ),
    Private(
        "ProcessGroup._device_types", "devices whose tensors a group can exchange",
        lambda: _has(_GROUP, "_device_types"),
    ),
    Private(
        "ProcessGroup._get_backend, Backend.Options._timeout", "how long a group waits",
        lambda: _has(_GROUP, "_get_backend"),
    ),
    Private(
        "torch.distributed.distributed_c10d._get_default_store",
        "connections of our own between ranks, which can be made anew after a failure", has_store,
    ),
    Private(
        "torch.distributed.distributed_c10d._world", "how many groups there are, which goes into their names",
        lambda: count_groups() >= 0, ("subgroup",),
    ),
    Private(
        "DeviceMesh._flatten", "one group from several dimensions",
        lambda: _has("torch.distributed.device_mesh:DeviceMesh", "_flatten"), ("mesh",),
    ),
    Private(
        "CompiledKernel.packed_metadata, triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook",
        "launching a kernel without what is for listeners; see triton_launch_is_known", _has_triton,
    ),
)  # fmt: skip
