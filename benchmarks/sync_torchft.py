"""torchft's DiLoCo over gloo on the CPU, as an arm of ``benchmarks.sync link``. Needs ``pip install torchft``.

Each rank is a replica group of one rank, with a manager and a store of its own; rank 0 runs the lighthouse.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["TorchftDiLoCo", "is_installed"]

PORT = 29517
#: Seldom, so that managers of arms that wait for their turn do not disturb the others.
HEARTBEAT = timedelta(seconds=5)

_lighthouse: Any = None


def is_installed() -> bool:
    """Whether torchft can be imported."""
    return importlib.util.find_spec("torchft") is not None


class TorchftDiLoCo:
    """Wraps an optimizer, as the other arms do.

    Args:
        address: of rank 0.
        fragments: how many parts the layers are cut into.
        delay: ``fragment_sync_delay``.
    """

    def __init__(
        self, opt: Any, model: nn.Module, every: int, address: str, *, fragments: int = 1, delay: int = 0
    ) -> None:
        logging.disable(logging.INFO)
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        _start_lighthouse()
        name = f"{dist.get_rank()}-{fragments}-{delay}"
        self._store = dist.TCPStore(_own_address(address), 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=60)), min_replica_size=dist.get_world_size(),
            use_async_quorum=False, load_state_dict=None, state_dict=None, rank=0, world_size=1,
            store_addr=_own_address(address), store_port=self._store.port, replica_id=name, init_sync=False,
            lighthouse_addr=f"http://{address}:{PORT + (fragments > 1)}", hostname=_own_address(address),
            heartbeat_interval=HEARTBEAT,
        )  # fmt: skip
        layers = [layer for layer in model.children() if any(True for _ in layer.parameters())]
        size = -(-len(layers) // fragments)
        parts = [nn.Sequential(*layers[start : start + size]) for start in range(0, len(layers), size)]
        outers = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
        self.optim, self.rounds_due, self._steps = opt, 0, 0
        self._every, self._parts = every, len(parts)
        self._diloco: Any = DiLoCo(
            self.manager, parts, opt, outers, sync_every=every, fragment_sync_delay=delay, fragment_update_alpha=0.0
        )
        self._diloco.__enter__()

    def step(self) -> None:
        self.optim.step()  # DiLoCo is a hook of it

    def zero_grad(self) -> None:
        self.optim.zero_grad()

    def check(self, steps: int) -> None:
        """Raise unless every round of so many steps was committed: torchft goes on without when one fails."""
        due = steps // self._every * self._parts
        if self.manager.current_step() < due:
            raise RuntimeError(f"torchft committed {self.manager.current_step()} rounds of {due}")

    def close(self) -> None:
        self.manager.shutdown(wait=False)


def _start_lighthouse() -> None:
    """One for each number of fragments, on rank 0: their replicas are different ones."""
    global _lighthouse
    if _lighthouse is None and dist.get_rank() == 0:
        from torchft.coordination import LighthouseServer

        made = {"min_replicas": dist.get_world_size(), "join_timeout_ms": 200, "heartbeat_timeout_ms": 60_000}
        _lighthouse = [LighthouseServer(bind=f"0.0.0.0:{PORT + more}", **made) for more in range(2)]
    _lighthouse = _lighthouse or []
    dist.barrier()


def _own_address(of_rank_0: str) -> str:
    """The address of this host on the link."""
    if dist.get_rank() == 0:
        return of_rank_0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((of_rank_0, 1))
        return str(probe.getsockname()[0])
