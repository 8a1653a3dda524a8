"""Which features of offbeat to turn on: the arguments that all integrations share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from offbeat.integrations.attached import Attached
from offbeat.integrations.handles import is_replica
from offbeat.overlap import overlap as overlap_optimizer
from offbeat.overlap.clipping import WAITS
from offbeat.replicas import DiLoCo, LocalSGD, Replica, SlowMo

__all__ = ["Features", "Options"]

#: False or None: off. True: on. A mapping: on, with these options.
Options = bool | Mapping[str, Any] | None

_REPLICAS: dict[str, Callable[..., Replica]] = {
    "local_sgd": LocalSGD,
    "slowmo": SlowMo,
    "diloco": DiLoCo,
    "replica": Replica,
}


class Features:
    """What a user asked for.

    Args:
        overlap: whether to step during backward; or options of :func:`offbeat.overlap`.
        local_sgd: whether to average replicas now and then; or options of :class:`offbeat.LocalSGD`.
        slowmo: options of :class:`offbeat.SlowMo`.
        diloco: whether to use DiLoCo; or options of :class:`offbeat.DiLoCo`.
        replica: options of :class:`offbeat.Replica`, for several levels.
    """

    def __init__(
        self,
        *,
        overlap: Options = None,
        local_sgd: Options = None,
        slowmo: Options = None,
        diloco: Options = None,
        replica: Options = None,
    ) -> None:
        self.overlap = _options("overlap", overlap)
        wanted = {"local_sgd": local_sgd, "slowmo": slowmo, "diloco": diloco, "replica": replica}
        found = {name: options for name, value in wanted.items() if (options := _options(name, value)) is not None}
        if len(found) > 1:
            raise ValueError(
                f"{' and '.join(found)} cannot be used together: each decides when replicas agree; choose one, or "
                "combine levels with replica="
            )
        if self.overlap is None and not found:
            raise ValueError(
                "no feature is turned on; give overlap=True, or one of local_sgd=, slowmo=, diloco= and replica=, each "
                "True or a dictionary of options"
            )
        #: Whether exact clipping, for which all updates of overlap wait, is still to be warned of.
        self.warns_of_clipping = self.overlap is not None and "clip" not in self.overlap
        self.kind: str | None = next(iter(found), None)
        self.options: dict[str, Any] = {} if self.kind is None else found[self.kind]

    @property
    def replicates(self) -> bool:
        """Whether replicas agree only now and then."""
        return self.kind is not None

    def clip_by_overlap(self, limit: float | None, name: str) -> None:
        """Let overlap clip where a framework was asked to: it could not, because gradients have been used by then.

        Args:
            limit: the largest norm that the framework was asked for, or None.
            name: what the framework calls it.
        """
        if self.overlap is None or limit is None:
            return
        asked = self.overlap.get("clip_norm")
        if asked is not None and asked != limit:
            raise ValueError(
                f"{name} is {limit}, but overlap was given clip_norm={asked}, and gradients would be clipped twice; "
                f"give one of them, or the same value"
            )
        self.overlap["clip_norm"] = limit

    def attach(
        self,
        optimizer: Optimizer,
        module: torch.nn.Module,
        *,
        scaler: Any = None,
        accumulate: Callable[[], bool] | None = None,
    ) -> Attached:
        """Turn the features on for an optimizer and the module that it trains.

        Args:
            module: as the framework calls it, in ``DistributedDataParallel`` or sharded where it does that.
            scaler: the framework's ``GradScaler``, or None.
            accumulate: returns whether more backward passes follow the one that is running.
        """
        if is_replica(optimizer):
            raise ValueError(
                f"the optimizer averages replicas already ({type(optimizer).__name__}), and it was made before the "
                "framework wrapped the module; give the framework the plain optimizer, and the options of "
                f"{type(optimizer).__name__} here"
            )
        handle = None
        if self.overlap is not None:
            ours: dict[str, Any] = {} if accumulate is None else {"accumulate": accumulate}
            if scaler is not None and scaler.is_enabled():
                ours["scaler"] = scaler
            for name in ours:
                if name in self.overlap:
                    raise ValueError(
                        f"{name} is set by the framework; leave it out of the options of overlap, and set it there"
                    )
            with warnings.catch_warnings():
                if not self.warns_of_clipping:
                    warnings.filterwarnings("ignore", message=WAITS)
                handle = overlap_optimizer(optimizer, module, **self.overlap, **ours)
        try:
            wrapped = optimizer if self.kind is None else _REPLICAS[self.kind](optimizer, module, **self.options)
        except BaseException:
            if handle is not None:
                handle.remove()
            raise
        keeps_norm = handle is not None and (self.overlap or {}).get("clip") == "previous"
        return Attached(wrapped, optimizer, module, handle, scaler, keeps_norm=keeps_norm)


def _options(name: str, value: Options) -> dict[str, Any] | None:
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be True, False or a dictionary of options, but got {value!r}")
    return dict(value)
