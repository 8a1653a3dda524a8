"""What Accelerate has on GPUs only, put in by hand on the CPU: FSDP2, and a scaler of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

__all__ = ["fsdp2", "scaled", "scaler"]


@contextmanager
def fsdp2(parallelism: Any = None, **options: Any) -> Iterator[None]:
    """Accelerators made in this block shard modules, each layer by itself.

    Args:
        parallelism: a ``ParallelismConfig``, or None to shard over all ranks.
        options: of the plugin.
    """
    given: dict[str, Any] = {
        "auto_wrap_policy": "size_based_wrap",
        "min_num_params": 1,
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "FULL_STATE_DICT",
        **options,
    }
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **given)
            if parallelism is not None:
                self.parallelism_config, self.device_mesh = parallelism, parallelism.build_device_mesh("cpu")

    AcceleratorState._reset_state(reset_partial_state=True)
    AcceleratorState.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        AcceleratorState.__init__ = original  # type: ignore[method-assign]
        AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def scaled(accelerator: Any, scaler: Any) -> Iterator[None]:
    """Train with float16 autocast and this scaler in this block."""
    state = AcceleratorState._shared_state
    before = state["_mixed_precision"]
    state["_mixed_precision"] = "fp16"
    accelerator.scaler, accelerator.native_amp = scaler, True
    try:
        yield
    finally:
        state["_mixed_precision"] = before


def scaler(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)
