"""offbeat with Accelerate: one call in place of ``accelerator.prepare``."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from offbeat.integrations.attached import Attached, rank_and_world, rank_to_load, warn_of_plain_checkpoint
from offbeat.integrations.clipping import answer_clip, overlapped_among
from offbeat.integrations.features import Features, Options
from offbeat.integrations.handles import is_replica

try:
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError(
        'offbeat.integrations.accelerate needs Accelerate; install it with pip install "offbeat[integrations]"'
    ) from error

__all__ = ["attach_prepared", "finish", "prepare"]


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

    Limits: DDP and a single process.
    """
    features = Features(overlap=overlap, local_sgd=local_sgd, slowmo=slowmo, diloco=diloco, replica=replica)
    _check_type(accelerator)
    for one in objects:
        if isinstance(one, Optimizer) and is_replica(one):
            raise ValueError(
                f"an optimizer is wrapped in {type(one).__name__} already, with the model as it is before "
                f"accelerator.prepare(); pass the plain optimizer, and the options of {type(one).__name__} here"
            )
    prepared = accelerator.prepare(*objects, device_placement=device_placement)
    found = prepared if isinstance(prepared, tuple) else (prepared,)
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
        one = features.attach(
            accelerated.optimizer,
            model,
            scaler=accelerated.scaler,
            accumulate=None if features.overlap is None else lambda: not accelerator.sync_gradients,
        )
        if one.replica is not None:
            _wrap_inside(accelerated, one)
        attached.append(one)
    if features.overlap is not None:
        _answer_clipping(accelerator, attached)
    if checkpoints and any(one.has_part for one in attached):
        _Files(accelerator, attached)
    return attached


def _check_type(accelerator: Any) -> None:
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ValueError(
            f"offbeat does not support Accelerate with {kind.value}, which changes parameters, gradients or optimizers "
            "in its own way; use DDP, or fully_shard without Accelerate"
        )


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


def _answer_clipping(accelerator: Any, attached: Sequence[Attached]) -> None:
    """Have ``accelerator.clip_grad_norm_`` return the norm of gradients that overlap clips: Accelerate cannot."""
    original = accelerator.clip_grad_norm_

    @functools.wraps(original)
    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        one = overlapped_among(attached, parameters)
        if one is None:
            return original(parameters, max_norm, norm_type)
        if not accelerator.sync_gradients:
            raise RuntimeError(
                "clip_grad_norm_() was called before the last backward pass of a step; call it only if "
                "accelerator.sync_gradients"
            )
        accelerator.unscale_gradients()
        return answer_clip(one, parameters, max_norm, norm_type, call="accelerator.clip_grad_norm_()")

    accelerator.clip_grad_norm_ = clip_grad_norm_


class _Files:
    """Saves and loads every rank's part with ``accelerator.save_state`` and ``load_state``.

    The hooks know the folder but run before anything is loaded, and the object registered for checkpointing is loaded
    after everything but does not know the folder.
    """

    def __init__(self, accelerator: Any, attached: Sequence[Attached]) -> None:
        self._attached = attached
        self._folder: str | None = None
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._note_folder)
        accelerator.register_for_checkpointing(self)

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        save_parts(folder, self._attached)

    def _note_folder(self, models: Any, folder: str) -> None:
        self._folder = folder

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": rank_and_world()[1]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert self._folder is not None
        load_parts(self._folder, self._attached, ranks=state_dict["ranks"])


def save_parts(folder: str, attached: Sequence[Attached]) -> None:
    """Write this rank's part into the folder of a checkpoint."""
    rank, world = rank_and_world()
    torch.save({"ranks": world, "parts": [one.part() for one in attached]}, _file(folder, rank))


def load_parts(folder: str, attached: Sequence[Attached], *, ranks: int | None = None) -> None:
    """Go on from this rank's part in the folder of a checkpoint.

    Args:
        ranks: how many ranks saved it, if that is known.
    """
    if ranks is None:
        ranks = sum(name.startswith("offbeat_") and name.endswith(".pt") for name in os.listdir(folder))
    if ranks == 0:
        warn_of_plain_checkpoint()
        return
    file = _file(folder, rank_to_load(ranks))
    if not os.path.exists(file):
        raise FileNotFoundError(
            f"{file} does not exist; each rank writes its own file, so bring those of all nodes into one folder, or "
            "load on the nodes that saved"
        )
    found = torch.load(file, map_location="cpu", weights_only=True)
    for one, part in zip(attached, found["parts"], strict=True):
        one.load_part(part)


def _file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"offbeat_{rank}.pt")
