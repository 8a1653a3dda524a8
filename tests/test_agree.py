"""Things compared on all ranks: the same answer, or the same error, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.engine.agree import Difference, check_same, check_same_bits
from offbeat.wire.peers import GroupPeers
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def explain(difference: Difference) -> Exception:
    return ValueError(f"{difference.name}: {difference}")


def said(values: dict[str, Any], peers: Any, error: Exception | None = None) -> str:
    try:
        check_same(values, peers, CPU, explain, error=error)
    except (RuntimeError, ValueError, KeyError) as raised:
        return f"{type(raised).__name__}: {raised}"
    return "same"


def compare(rank: int, world: int) -> dict[str, Any]:
    subgroup = dist.new_group([0, 1])
    half = [dist.new_group([0, 1]), dist.new_group([2])][rank // 2]
    everyone: list[Any] = [None, dist.group.WORLD, GroupPeers(dist.group.WORLD, range(world))]
    long = "x" * 300
    found: dict[str, Any] = {
        "kinds of peers": [said({"a": 1, "b": rank == 2, "c": rank}, peers) for peers in everyone],
        "same": [said({"a": 1, "b": [1.5, None], "c": "text"}, peers) for peers in everyone],
        "nothing": said({}, None),
        "missing": said({"a": 1} if rank == 1 else {"a": 1, "b": 2}, None),
        "order": said({"a": 1, "b": 2} if rank else {"b": 2, "a": 1}, None),
        "long": said({"a": long + str(rank)}, None),
        "unlike lengths": said({"a": "ü" * 500 * rank}, None),
        "an error": said({"a": rank}, None, KeyError("no gradient") if rank == 1 else None),
        "errors": said({}, None, KeyError(f"problem {rank}") if rank else None),
        "half": said({"a": rank // 2}, half),
    }
    t = torch.arange(6.0).view(2, 3)
    try:
        check_same_bits([t, t.t()], None, lambda: ValueError("differ"))
        if rank == 1:
            t[1, 2] = -0.0
        t[0, 0] = 0.0
        check_same_bits([t], None, lambda: ValueError("differ"))
        found["bits"] = "same"
    except ValueError as raised:
        found["bits"] = str(raised)
    dist.destroy_process_group(subgroup) if rank < 2 else None
    return found


@pytest.mark.ranks
def test_every_rank_raises_the_same():
    ranks = run_ranks(compare, 3)
    first, failed, third = ranks
    for name in first:
        if "error" not in name:
            assert first[name] == failed[name] == third[name], name
    assert first["kinds of peers"] == ["ValueError: b: False on rank 0, 1, True on rank 2"] * 3
    assert first["same"] == ["same"] * 3
    assert first["nothing"] == first["half"] == "same"
    assert first["missing"] == "ValueError: b: 2 on rank 0, 2, nothing on rank 1"
    assert first["order"] == "ValueError: the order of names: b, a on rank 0, a, b on rank 1, 2"
    assert first["long"].startswith("ValueError: a: 'xxx")
    assert len(first["long"]) < 3 * 230
    assert first["unlike lengths"].startswith("ValueError: a: '' on rank 0")
    assert first["an error"] == third["an error"]
    assert first["an error"].startswith("RuntimeError: another rank cannot go on")
    assert "rank 1: KeyError: 'no gradient'" in first["an error"]
    assert failed["an error"] == "KeyError: 'no gradient'"
    assert "rank 1: KeyError: 'problem 1'; rank 2: KeyError: 'problem 2'" in first["errors"]
    assert third["errors"] == "KeyError: 'problem 2'"
    assert first["bits"] == "differ"


class Counted:
    """Peers that count collectives; there is one rank."""

    size = 1

    def __init__(self) -> None:
        self.calls: list[str] = []

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Any:
        self.calls.append(f"{op} of {tensor.numel()}")
        return self

    def all_gather(self, out: Tensor, mine: Tensor) -> Any:
        self.calls.append("gather")
        out.copy_(mine)
        return self

    def wait(self) -> None:
        pass


def test_two_numbers_travel_while_all_is_the_same():
    peers = Counted()
    check_same({f"option {i}": i for i in range(100)}, peers, CPU, explain)
    assert peers.calls == ["max of 2"]
    with pytest.raises(KeyError, match="mine"):
        check_same({}, peers, CPU, explain, error=KeyError("mine"))
    assert peers.calls[1:] == ["max of 2", "max of 1", "gather"]
