"""offbeat with Accelerate: one call in place of ``accelerator.prepare``."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from offbeat.integrations.attached import Attached, Living, rank_and_world, rank_to_load, warn_of_plain_checkpoint
from offbeat.integrations.clipping import answer_clip, attached_with, overlapped_among
from offbeat.integrations.features import Features, Options
from offbeat.integrations.handles import is_replica
from offbeat.integrations.shards import meshes_of

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        'offbeat.integrations.accelerate needs Accelerate; install it with pip install "accelerate>=1.15,<2"'
    ) from error

__all__ = [
    "attach_prepared",
    "check_saves_one_file",
    "check_type",
    "finish",
    "load_parts",
    "prepare",
    "save_parts",
    "sharded_inside_replicas",
]


def prepare(
    accelerator: Any,
    *objects: Any,
    device_placement: list[bool] | None = None,
    overlap: Options = None,
    local_sgd: Options = None,
    slowmo: Options = None,
    diloco: Options = None,
    replica: Options = None,
) -> Any:
    """``accelerator.prepare(*objects)``, and features of offbeat turned on for the optimizers among the objects.

    Args:
        accelerator: the ``Accelerator``.
        objects: what ``accelerator.prepare`` takes, in any order, with the model of each optimizer among them. Objects
            that have been prepared stay as they are.
        device_placement: as for ``accelerator.prepare``.
        overlap: step during backward; True, or options of :func:`offbeat.overlap`. Accumulation and loss scaling are
            taken from the accelerator. To clip, give ``clip_norm`` here, and call ``accelerator.clip_grad_norm_`` with
            the same value or not at all.
        local_sgd: average replicas every few steps; True, or options of :class:`offbeat.LocalSGD`.
        slowmo: options of :class:`offbeat.SlowMo`.
        diloco: True, or options of :class:`offbeat.DiLoCo`.
        replica: options of :class:`offbeat.Replica`, for several levels.

    Returns:
        What ``accelerator.prepare`` returns, in the same order.

    Example::

        model, optimizer, data = offbeat.integrations.accelerate.prepare(
            accelerator, model, optimizer, data, local_sgd={"every": 8}
        )
        ...  # the loop stays as it is
        offbeat.integrations.accelerate.finish(optimizer)

    ``accelerator.save_state`` saves every rank's part beside the rest (``offbeat_0.pt``, ``offbeat_1.pt``, ...), and
    ``load_state`` goes on exactly. ``optimizer.bin`` is that of the plain optimizer of the first rank.

    With FSDP2 and ``ParallelismConfig(dp_replicate_size=R, dp_shard_size=S)`` there are R replicas, each sharded over S
    ranks: replicas agree now and then, instead of averaging gradients at every step.

    Limits: DDP, FSDP2 and a single process.
    """
    features = Features(overlap=overlap, local_sgd=local_sgd, slowmo=slowmo, diloco=diloco, replica=replica)
    check_type(accelerator)
    for one in objects:
        if isinstance(one, Optimizer) and is_replica(one):
            raise ValueError(
                f"an optimizer is wrapped in {type(one).__name__} already, with the model as it is before "
                f"accelerator.prepare(); pass the plain optimizer, and the options of {type(one).__name__} here"
            )
    with sharded_inside_replicas(accelerator, features):
        prepared = accelerator.prepare(*objects, device_placement=device_placement)
    found = prepared if isinstance(prepared, (tuple, list)) else (prepared,)
    models = [one for one in found if isinstance(one, torch.nn.Module)]
    optimizers = [one for one in found if isinstance(one, AcceleratedOptimizer)]
    if not optimizers:
        raise ValueError("there is no optimizer among the objects; pass it together with its model")
    attach_prepared(accelerator, [(one, _model_of(one, models)) for one in optimizers], features)
    return prepared


def finish(*optimizers: Any) -> None:
    """Let replicas agree one last time, at the end of training. Call it on every rank, before the model is saved.

    Args:
        optimizers: what :func:`prepare` returned.
    """
    for accelerated in optimizers:
        if is_replica(accelerated):
            accelerated.optimizer.finish()


def attach_prepared(
    accelerator: Any, pairs: Sequence[tuple[Any, torch.nn.Module]], features: Features, *, checkpoints: bool = True
) -> list[Attached]:
    """Turn features on for optimizers that have been prepared.

    Args:
        pairs: each optimizer with the model that it trains, both prepared.
        checkpoints: whether ``save_state`` and ``load_state`` are to include every rank's part.
    """
    attached = []
    for accelerated, model in pairs:
        if features.replicates and any("dp_replicate" in (mesh.mesh_dim_names or ()) for mesh in meshes_of(model)):
            raise ValueError(
                "accelerator.prepare() has prepared the model for an average of gradients over dp_replicate at every "
                "step; pass model and optimizer as they were before"
            )
        one = features.attach(
            accelerated.optimizer,
            model,
            scaler=accelerated.scaler,
            accumulate=None if features.overlap is None else lambda: not accelerator.sync_gradients,
        )
        if one.replica is not None:
            _wrap_inside(accelerated, one)
        accelerated._offbeat = one
        attached.append(one)
    _answer_clipping(accelerator, Living(attached))
    if checkpoints and any(one.has_part for one in attached):
        _files_of(accelerator).attached.add(attached)
    return attached


def check_type(accelerator: Any) -> None:
    """Raise if Accelerate trains in a way that offbeat does not support."""
    kind = accelerator.distributed_type
    is_fsdp1 = kind == DistributedType.FSDP and not accelerator.is_fsdp2
    if is_fsdp1 or kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ValueError(
            f"offbeat does not support Accelerate with {'FSDP1' if is_fsdp1 else kind.value}, which changes "
            "parameters, gradients or optimizers in its own way; use DDP or FSDP2 (fsdp_version=2)"
        )


@contextlib.contextmanager
def sharded_inside_replicas(accelerator: Any, features: Features) -> Iterator[None]:
    """Have Accelerate shard modules over ``dp_shard`` alone if there are to be replicas.

    Over ``dp_replicate`` FSDP2 would average gradients at every step.
    """
    config = accelerator.parallelism_config
    if not (features.replicates and accelerator.is_fsdp2) or config is None or not config.dp_replicate_enabled:
        yield
        return
    names = ["dp_shard_cp"] if config.cp_enabled else ["dp_shard"]
    inside = copy.copy(config)
    inside.__class__ = type(type(config).__name__, (type(config),), {"fsdp_dim_names": names})
    accelerator.state.parallelism_config = inside
    try:
        yield
    finally:
        accelerator.state.parallelism_config = config


def _model_of(accelerated: Any, models: Sequence[torch.nn.Module]) -> torch.nn.Module:
    params = {id(p) for group in accelerated.param_groups for p in group["params"]}
    for model in models:
        if any(id(p) in params for p in model.parameters()):
            return model
    raise ValueError("the model of an optimizer is not among the objects; pass them in one call")


def _wrap_inside(accelerated: Any, one: Attached) -> None:
    """Put what averages replicas between Accelerate's wrapper and the optimizer."""
    accelerated.__setstate__({"optimizer": one.optimizer})  # and what Accelerate puts around its step
    # What Accelerate saves is the first rank's, and every rank would load it: that must not be all of a replica's
    # state. Its own part is saved beside it.
    accelerated.state_dict, accelerated.load_state_dict = one.inner.state_dict, one.inner.load_state_dict


def _answer_clipping(accelerator: Any, attached: Living) -> None:
    """Have ``accelerator.clip_grad_norm_`` return the norm of gradients that overlap clips: Accelerate cannot.

    Gradients that replicas average in their step are averaged before they are clipped.
    """
    by_norm, by_value = accelerator.clip_grad_norm_, accelerator.clip_grad_value_

    @functools.wraps(by_norm)
    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        parameters = _list(parameters)
        one = overlapped_among(attached, parameters)
        if one is None:
            for other in attached_with(attached, parameters):
                other.average_gradients()
            return by_norm(parameters, max_norm, norm_type)
        if not accelerator.sync_gradients:
            raise RuntimeError(
                "clip_grad_norm_() was called before the last backward pass of a step; call it only if "
                "accelerator.sync_gradients"
            )
        accelerator.unscale_gradients()
        return answer_clip(one, parameters, max_norm, norm_type, call="accelerator.clip_grad_norm_()")

    @functools.wraps(by_value)
    def clip_grad_value_(parameters: Any, clip_value: float) -> Any:
        parameters = _list(parameters)
        for other in attached_with(attached, parameters):
            other.average_gradients()
        return by_value(parameters, clip_value)

    accelerator.clip_grad_norm_, accelerator.clip_grad_value_ = clip_grad_norm_, clip_grad_value_


def _list(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


class _Files:
    """Saves and loads every rank's part with ``accelerator.save_state`` and ``load_state``.

    A hook knows the folder, but that for loading runs before anything is loaded.

    Attributes:
        attached: in the order in which they were prepared. ``accelerator.free_memory()`` lets go of them.
    """

    def __init__(self, accelerator: Any) -> None:
        self.attached = Living()
        self._folder: str | None = None
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._note_folder)
        save, load = accelerator.save_state, accelerator.load_state

        @functools.wraps(save)
        def save_state(*args: Any, **kwargs: Any) -> Any:
            check_saves_one_file(accelerator, list(self.attached))
            return save(*args, **kwargs)

        @functools.wraps(load)
        def load_state(*args: Any, **kwargs: Any) -> Any:
            result = load(*args, **kwargs)
            assert self._folder is not None
            load_parts(self._folder, list(self.attached))
            return result

        accelerator.save_state, accelerator.load_state = save_state, load_state

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        save_parts(folder, list(self.attached))

    def _note_folder(self, models: Any, folder: str) -> None:
        self._folder = folder


def _files_of(accelerator: Any) -> _Files:
    """Those of this accelerator: one for all optimizers, however many calls have prepared them."""
    found: _Files | None = vars(accelerator).get("_offbeat_files")
    if found is None:
        found = accelerator._offbeat_files = _Files(accelerator)
    return found


def check_saves_one_file(accelerator: Any, attached: Sequence[Attached]) -> None:
    """Raise if a checkpoint of sharded replicas would be a mixture of them."""
    kind = accelerator.state.fsdp_plugin.state_dict_type.name if accelerator.is_fsdp2 else "FULL_STATE_DICT"
    if kind != "FULL_STATE_DICT" and any(one.replica is not None for one in attached):
        raise ValueError(
            f"state_dict_type is {kind}, which saves each tensor from whichever replica, so that the checkpoint would "
            "be a mixture of replicas; pass FullyShardedDataParallelPlugin(state_dict_type='FULL_STATE_DICT')"
        )


def save_parts(folder: str, attached: Sequence[Attached]) -> None:
    """Write this rank's part into the folder of a checkpoint."""
    rank, world = rank_and_world()
    torch.save({"ranks": world, "parts": [one.part() for one in attached]}, _file(folder, rank))
    if rank == 0:  # of an earlier checkpoint in this folder, by more ranks
        for number in (number for number in _numbers(folder) if number >= world):
            os.remove(_file(folder, number))


def _numbers(folder: str) -> list[int]:
    """The ranks whose parts are in a folder."""
    found = (re.fullmatch(r"offbeat_(\d+)\.pt", name) for name in os.listdir(folder))
    return sorted(int(one[1]) for one in found if one is not None)


def load_parts(folder: str, attached: Sequence[Attached]) -> None:
    """Go on from this rank's part in the folder of a checkpoint."""
    numbers = _numbers(folder)
    if not numbers:
        if any(one.replica is not None for one in attached):
            warn_of_plain_checkpoint()
        return
    # One file says for all ranks how many there were. On another node it is the first of those that are there.
    file = _file(folder, rank_to_load(_load(_file(folder, numbers[0]))["ranks"]))
    if not os.path.exists(file):
        raise FileNotFoundError(
            f"{file} does not exist; each rank writes its own file, so bring those of all nodes into one folder, or "
            "load on the nodes that saved"
        )
    parts = _load(file)["parts"]
    if len(parts) != len(attached):
        raise ValueError(
            f"{file} has parts of {len(parts)} optimizers, but offbeat has prepared {len(attached)}; prepare as many, "
            "in the same order"
        )
    for one, part in zip(attached, parts, strict=True):
        one.load_part(part)


def _load(file: str) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"offbeat_{rank}.pt")
