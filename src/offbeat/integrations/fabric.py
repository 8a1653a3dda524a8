"""offbeat with Lightning Fabric: one call in place of ``fabric.setup``."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from offbeat.integrations.attached import Attached, Living, gather_parts, rank_to_load
from offbeat.integrations.clipping import answer_clip, attached_with, overlapped_among
from offbeat.integrations.features import Features, Options

try:
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
    from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
except ImportError as error:
    raise ImportError(
        'offbeat.integrations.fabric needs Lightning; install it with pip install "lightning>=2.6.6,<2.7"'
    ) from error

__all__ = ["EveryRank", "setup"]


def setup(
    fabric: Any,
    module: torch.nn.Module,
    *optimizers: Optimizer,
    overlap: Options = None,
    local_sgd: Options = None,
    slowmo: Options = None,
    diloco: Options = None,
    replica: Options = None,
) -> Any:
    """Set up a module and its optimizers with Fabric, and turn on features of offbeat for them.

    Args:
        fabric: a launched ``Fabric``.
        module: the module, or what ``fabric.setup_module`` returned (with FSDP2 optimizers are made after it).
        optimizers: its optimizers, not set up yet.
        overlap: see :class:`offbeat.integrations.lightning.Offbeat`, as for the other features.

    Returns:
        What ``fabric.setup(module, *optimizers)`` returns. The optimizers have the methods of what was turned on, such
        as ``finish()``, to be called at the end of training.

    Example::

        model, optimizer = offbeat.integrations.fabric.setup(fabric, model, optimizer, local_sgd={"every": 8})

    ``fabric.no_backward_sync`` announces accumulation under DDP and FSDP2; on a single device use
    ``offbeat.integrations.handle_of(optimizer).accumulate()``. ``fabric.clip_gradients(max_norm=)`` needs the same
    value as overlap's ``clip_norm``.

    Limits: strategies ``ddp``, ``ModelParallelStrategy`` (FSDP2) and a single device.
    """
    features = Features(overlap=overlap, local_sgd=local_sgd, slowmo=slowmo, diloco=diloco, replica=replica)
    for optimizer in optimizers:
        if isinstance(optimizer, _FabricOptimizer):
            raise ValueError("an optimizer was set up with Fabric already; pass it as it was before")
    if not isinstance(fabric.strategy, (SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy)):
        raise ValueError(
            f"offbeat does not know {type(fabric.strategy).__name__}, which wraps optimizers or gradients in its own "
            "way; use 'ddp', ModelParallelStrategy or a single device"
        )
    model = module if isinstance(module, _FabricModule) else fabric.setup_module(module)
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    attached = [features.attach(optimizer, model._forward_module, scaler=scaler) for optimizer in optimizers]
    _answer_clipping(fabric, Living(attached))
    made = [fabric.setup_optimizers(one.optimizer) for one in attached]
    for one, optimizer in zip(attached, made, strict=True):
        vars(optimizer)["_offbeat"] = one
    return (model, *made) if made else model


class EveryRank:
    """Every rank's part of a checkpoint: all that is needed to go on exactly, with as many ranks.

    Put it into the dictionary that ``fabric.save`` and ``fabric.load`` are called with, on every rank. It holds the
    module, the optimizers and the loss scale, so that they need not be in the dictionary themselves.

    Args:
        optimizers: what :func:`setup` returned.

    With ``ModelParallelStrategy`` (FSDP2) pass ``save_distributed_checkpoint=False`` to the strategy, and put the
    module into the dictionary as well, which Fabric asks for.

    Example::

        state = {"offbeat": EveryRank(optimizer), "step": step}
        fabric.save("checkpoint.ckpt", state)
    """

    def __init__(self, *optimizers: Any) -> None:
        self._attached: list[Attached] = []
        for optimizer in optimizers:
            found = vars(optimizer).get("_offbeat")
            if found is None:
                raise ValueError("EveryRank takes optimizers that offbeat.integrations.fabric.setup has returned")
            if found.is_sharded and optimizer._strategy._save_distributed_checkpoint:
                raise ValueError(
                    "Fabric does not give objects what it has loaded from a distributed checkpoint, so that EveryRank "
                    "would be saved and never loaded; pass ModelParallelStrategy(save_distributed_checkpoint=False)"
                )
            self._attached.append(found)

    def state_dict(self) -> dict[str, Any]:
        """The parts of all ranks on the first rank, and nothing on the others. Call it on every rank."""
        parts = gather_parts([one.part(whole=True) for one in self._attached])
        return {} if parts is None else {"ranks": parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from this rank's part."""
        ranks = state_dict["ranks"]
        for one, part in zip(self._attached, ranks[rank_to_load(len(ranks))], strict=True):
            one.load_part(part)


def _answer_clipping(fabric: Any, attached: Living) -> None:
    """Have ``fabric.clip_gradients`` return the norm of gradients that overlap clips: Fabric cannot clip them.

    Gradients that replicas average in their step are averaged before they are clipped.
    """
    original = fabric.clip_gradients

    @functools.wraps(original)
    def clip_gradients(
        module: torch.nn.Module,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Any:
        parameters = _parameters(optimizer)
        one = overlapped_among(attached, parameters)
        if one is None:
            for other in attached_with(attached, parameters):
                other.average_gradients()
            return original(module, optimizer, clip_val, max_norm, norm_type, error_if_nonfinite)
        if clip_val is not None or max_norm is None:
            raise ValueError(
                "fabric.clip_gradients(clip_val=) cannot clip gradients that overlap has used; clip by norm, with "
                "clip_norm= in the options of overlap"
            )
        fabric.strategy.precision.unscale_gradients(one.optimizer)
        norm = answer_clip(one, parameters, max_norm, norm_type, call="fabric.clip_gradients()")
        if error_if_nonfinite and norm is not None and not bool(torch.isfinite(norm)):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}, and error_if_nonfinite is True")
        return norm

    fabric.clip_gradients = clip_gradients


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    groups: Iterable[dict[str, Any]] = optimizer.param_groups
    return [p for group in groups for p in group["params"]]
