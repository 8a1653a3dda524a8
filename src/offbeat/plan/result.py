"""The result of ``offbeat bench`` as a file: written by ``bench``, read by ``plan``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offbeat.plan.cost import Machine, Setting

__all__ = ["FORMAT", "BenchResult", "ResultError", "load_result", "save_result"]

#: Raised by one whenever the meaning of a key changes.
FORMAT = 1


class ResultError(ValueError):
    """A file is not a result of ``offbeat bench`` that this version can read; the message says why."""


@dataclass(frozen=True)
class BenchResult:
    """What ``offbeat bench`` has measured.

    Attributes:
        params: parameters of the model.
        step_seconds: the median time of a training step without communication.
        replicas: how many processes took part.
        bandwidth: bytes a second of an all-reduce, as a replica's link carries them; None with one process.
        latency: seconds of an all-reduce of 8 bytes; None with one process.
        machine: what a round costs beside its bytes.
        link: rates by collective and size.
        strategies: what each strategy cost.
        environment: versions, hardware and the command.
    """

    params: int
    step_seconds: float
    replicas: int
    bandwidth: float | None
    latency: float | None
    machine: Machine
    link: list[dict[str, Any]] = field(default_factory=list)
    strategies: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)

    def setting(self, **changes: Any) -> Setting:
        """What to plan for: the numbers of this result, or others in their place.

        Args:
            changes: fields of ``Setting`` that are not to be the measured ones; None changes nothing.
        """
        found = {name: getattr(self, name) for name in ("params", "step_seconds", "replicas", "bandwidth", "latency")}
        found.update({name: value for name, value in changes.items() if value is not None})
        if found["bandwidth"] is None:
            raise ResultError(
                "this result was measured with one process, so it says nothing of a link; measure again with "
                "torchrun --nproc-per-node=2 -m offbeat bench, or give --mbit"
            )
        return Setting(**{**found, "latency": found["latency"] or 0.0}, machine=self.machine)


def save_result(result: BenchResult, path: Path) -> None:
    """Write a result as JSON."""
    path.write_text(json.dumps({"offbeat_bench": FORMAT, **asdict(result)}, indent=1) + "\n")


def load_result(path: Path) -> BenchResult:
    """Read a result.

    Args:
        path: the file.

    Raises:
        ResultError: it is not a result, or one of another version.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{path} cannot be read: {error}; make it with offbeat bench --json {path}") from error
    except json.JSONDecodeError as error:
        raise ResultError(f"{path} is not JSON ({error}); make it with offbeat bench --json {path}") from error
    if not isinstance(data, dict) or "offbeat_bench" not in data:
        raise ResultError(f"{path} is not a result of offbeat bench; make one with offbeat bench --json {path}")
    if data["offbeat_bench"] != FORMAT:
        raise ResultError(
            f"{path} has version {data['offbeat_bench']!r} of the format and this offbeat reads version {FORMAT}; "
            f"measure again with offbeat bench --json {path}"
        )
    try:
        machine = Machine(**data.pop("machine"))
        del data["offbeat_bench"]
        result = BenchResult(**data, machine=machine)
        result.setting(bandwidth=result.bandwidth or 1.0)  # checks the numbers
    except (KeyError, TypeError, ValueError) as error:
        raise ResultError(f"{path} is damaged: {error}; measure again with offbeat bench --json {path}") from error
    costs = [machine.busy, machine.round or 0.0, *machine.local.values()]
    if not all(isinstance(cost, (int, float)) and math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ResultError(f"{path} is damaged: {costs} must be seconds; measure again with offbeat bench --json {path}")
    return result
