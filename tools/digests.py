"""Freeze the numbers that replicas compute, to compare them bit for bit after a change that must not change them.

Run random cases, or go on from checkpoints, with the offbeat that Python imports, and compare two such runs::

    python tools/digests.py oracle 0 2000 before.json       # seeds 0 to 1999
    python tools/digests.py checkpoints FOLDER write        # then, after the change: check
    python tools/digests.py compare before.json after.json --ignore bytes_sent --ignore message
    python tools/digests.py show 17                         # the case of a seed

The script uses only public names of offbeat and shares no code with the tests, so that the same script runs before and
after; ``digest_cases.py`` gives every option a value. A digest is the start of a SHA-256 of bits, dtypes and shapes.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import json
import os
import platform
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # threads of a simulation read them, too

import torch
from digest_cases import Case, draw, stopped_cases
from torch import Tensor, nn

import offbeat

AFTER = 3  # steps after finish()


class Net(nn.Module):
    """Parameters of many shapes and layouts, and buffers that every forward changes."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for i, (shape, layout, dtype) in enumerate(case.params):
            t = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
            if layout == "transposed":
                t = t.t().contiguous().t() if t.dim() == 2 else t
            elif layout == "gaps" and t.dim():
                t = torch.stack([t, t], dim=-1)[..., 0]
            layer = nn.Module()
            layer.register_parameter("weight", nn.Parameter(t))
            self.add_module(f"layer{i}", layer)
        if case.is_frozen:
            layer.weight.requires_grad_(False)
        self.norm = nn.BatchNorm1d(3, eps=1e-5, momentum=0.1, affine=False) if case.has_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x``, if there is something to do so."""
        return x if self.norm is None else self.norm(x)


def make_inner(case: Case, net: Net) -> torch.optim.Optimizer:
    """Make the inner optimizer, with one or two groups."""
    params, kind = list(net.parameters()), case.inner.rpartition(".")[2]
    library: Any = torch.optim if case.inner.startswith("torch.") else offbeat
    adam = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}
    if kind == "Chain":
        matrices = [p for p in params if p.dim() == 2 and p.numel()]
        muon = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "eps": 1e-7, "ns_steps": 3}
        chain = [offbeat.Muon(matrices, ns_coefficients=(3.4445, -4.775, 2.0315), **muon)] if matrices else []
        return offbeat.Chain([*chain, offbeat.AdamW([p for p in params if p.dim() != 2 or not p.numel()], **adam)])
    groups: Any = [{"params": params}]
    if case.groups == 2:
        groups = [{"params": params[:1], "lr": 0.02}, {"params": params[1:]}]
    if kind == "AdamW":
        return library.AdamW(groups, **adam)
    return library.SGD(groups, lr=0.05, momentum=0.5, dampening=0.0, weight_decay=0.0, nesterov=False)


def make_level(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``offbeat.Level``, with the outer optimizer and the codec made."""
    outer, codec = options["outer"], options["codec"]
    if outer is not None:
        numbers = dict(zip(("lr", "momentum", "nesterov"), outer, strict=True))
        outer = functools.partial(offbeat.SGD, dampening=0.0, weight_decay=0.0, **numbers)
    codec = offbeat.TopK(codec[1], bits=codec[2]) if isinstance(codec, tuple) else codec
    return {**options, "outer": outer, "codec": codec}


def build(case: Case, rank: int, peers: Any) -> tuple[Net, Any]:
    """A rank's module and its replica."""
    net = Net(case, 5 + rank if case.options["sync_init"] else 5)
    inner, common = make_inner(case, net), {**case.options, "warmup": case.warmup, "group": peers}
    first = make_level(case.levels[0])
    if case.kind == "Replica":
        return net, offbeat.Replica(inner, net, [offbeat.Level(**make_level(one)) for one in case.levels], **common)
    if case.kind == "LocalSGD":
        periods = {level["every"]: level["group"] for level in case.levels}
        every = first["every"] if len(periods) == 1 else periods
        shared = {name: first[name] for name in ("delay", "mixing", "deadline", "nonfinite")}
        return net, offbeat.LocalSGD(inner, net, every, **shared, **common)
    del first["outer"]
    given = {name: first.pop(name) for name in ("every", "deadline", "nonfinite")}
    if case.kind == "SlowMo":
        return net, offbeat.SlowMo(inner, net, slow_lr=0.9, slow_momentum=0.6, level=first, **given, **common)
    given.update({name: first.pop(name) for name in ("fragments", "delay", "codec", "error_feedback", "mixing")})
    return net, offbeat.DiLoCo(inner, net, outer_lr=0.7, outer_momentum=0.9, outer=None, level=first, **given, **common)


def advance(case: Case, net: Net, replica: Any, step: int, rank: int) -> None:
    """Make one step, with gradients that depend on the parameters, the step and the rank."""
    generator = torch.Generator().manual_seed(131 * step + rank)
    net(torch.randn(4, 3, generator=generator))
    for i, p in enumerate(net.parameters()):
        noise = torch.randn(p.shape, dtype=torch.float64, generator=generator)
        if p.requires_grad and not (i == 0 and case.no_gradient == rank):
            p.grad = (0.3 * p.detach().double() + noise).to(p.dtype)
            if case.infinite == (step, rank):
                p.grad.fill_(float("inf"))
    if step == case.halve_at:
        for group in replica.param_groups:
            group["lr"] *= 0.5
    if case.options["weighted"]:
        replica.seen(case.amounts[(7 * step + 3 * rank) % len(case.amounts)])
    replica.step()


def reload(case: Case, rank: int, peers: Any, saved: bytes) -> tuple[Net, Any]:
    """A new module and a new replica, with what was saved."""
    net, replica = build(case, rank, peers)
    model, state = torch.load(io.BytesIO(saved), weights_only=True)
    net.load_state_dict(model)
    replica.load_state_dict(state)
    return net, replica


def save(net: Net, replica: Any) -> bytes:
    """The bytes of a checkpoint."""
    file = io.BytesIO()
    torch.save((net.state_dict(), replica.state_dict()), file)
    return file.getvalue()


def digest(values: Any) -> str:
    """The start of the SHA-256 of tensors and numbers, in order."""
    hashed = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            hashed.update(f"{value.dtype}{tuple(value.shape)}".encode())
            hashed.update(
                value.detach()
                .reshape(-1)
                .clone(memory_format=torch.contiguous_format)
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
        else:
            hashed.update(repr(value).encode())
    return hashed.hexdigest()[:12]


def state_of(optimizer: Any) -> list[Any]:
    """An optimizer's state and options, in the order of its parameters."""
    values: list[Any] = []
    for group in optimizer.param_groups:
        values.append(group["lr"])
        for p in group["params"]:
            for key, value in sorted(optimizer.state.get(p, {}).items()):
                values += [key, value]
    return values


def final(case: Case, net: Net, replica: Any) -> dict[str, Any]:
    """What is recorded at the end of a rank."""
    return {
        "steps": replica.steps,
        "syncs": replica.syncs,
        "bytes_sent": replica.bytes_sent,
        "anchors": [digest(v for pair in replica.anchors(i).items() for v in pair) for i in range(len(case.levels))],
        "inner": digest(state_of(replica.optim)),
        "outers": [None if outer is None else digest(state_of(outer)) for outer in replica.outers],
        "buffers": digest(net.buffers()),
    }


def train(rank: int, peers: Any, case: Case, rows: list[str]) -> dict[str, Any]:
    """Train from the beginning; ``rows`` gets the digest of the parameters after every step."""
    net, replica = build(case, rank, peers)
    last = case.steps + case.more[rank]
    for step in range(last + AFTER):
        if step in case.saves:
            net, replica = reload(case, rank, peers, save(net, replica))
        if step in case.syncs:
            replica.sync()
            rows.append(digest(net.parameters()))
        if step == last:
            replica.finish()
            rows.append(digest(net.parameters()))
        advance(case, net, replica, step, rank)
        rows.append(digest(net.parameters()))
    replica.sync()
    rows.append(digest(net.parameters()))
    return final(case, net, replica)


def go_on(rank: int, peers: Any, case: Case, rows: list[str], saved: list[bytes]) -> dict[str, Any]:
    """Load what was saved after ``case.steps`` steps, make ten or more, and call ``finish()``."""
    net, replica = reload(case, rank, peers, saved[rank])
    for step in range(case.steps, case.steps + 10 + case.more[rank]):
        advance(case, net, replica, step, rank)
        rows.append(digest(net.parameters()))
    replica.finish()
    rows.append(digest(net.parameters()))
    return final(case, net, replica)


def stop(rank: int, peers: Any, case: Case) -> bytes:
    """Make ``case.steps`` steps and save."""
    net, replica = build(case, rank, peers)
    for step in range(case.steps):
        advance(case, net, replica, step, rank)
    return save(net, replica)


def record(function: Any, case: Case, *args: Any) -> dict[str, Any]:
    """Run a function on every rank, and collect what each has recorded until its end or its first error."""
    ranks: list[dict[str, Any]] = [{"parameters": []} for _ in range(case.ranks)]
    running, changed = set(range(case.ranks)), threading.Condition()

    def main(rank: int, peers: Any) -> None:
        error = None
        try:
            ranks[rank]["end"] = function(rank, peers, case, ranks[rank]["parameters"], *args)
        except Exception as raised:
            error = raised
            ranks[rank]["error"] = {"type": type(raised).__name__, "message": str(raised)}
        with changed:
            running.discard(rank)
            changed.notify_all()
            if error is not None:  # raising it ends the whole simulation: the others come to their own end first
                changed.wait_for(lambda: not running, 10)
                raise error

    try:
        offbeat.Simulation(case.ranks, bandwidth=None, latency=0.0, timeout=60.0).run(main)
    except Exception:
        if not any("error" in one for one in ranks):
            raise
    return {"case": hashlib.sha256(repr(case).encode()).hexdigest()[:12], "ranks": ranks}


def run_oracle(first: int, number: int, out: Path) -> None:
    """Run the cases of these seeds and write their digests."""
    found, began = {}, time.perf_counter()
    for seed in range(first, first + number):
        found[str(seed)] = record(train, draw(seed))
        if (seed - first + 1) % 100 == 0:
            print(seed - first + 1, f"{time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    write(out, found)


def run_checkpoints(folder: Path, ignored: list[str], *, check: bool) -> int:
    """Write checkpoints and how training goes on from them; or load those there are and compare."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, case in stopped_cases().items():
        files = [folder / f"{name}.{rank}.pt" for rank in range(case.ranks)]
        if not check:
            for file, saved in zip(files, offbeat.Simulation(case.ranks, timeout=60.0).run(stop, case), strict=True):
                file.write_bytes(saved)
        found[name] = record(go_on, case, [file.read_bytes() for file in files])
    write(folder / ("checked.json" if check else "written.json"), found)
    return compare(folder / "written.json", folder / "checked.json", ignored) if check else 0


def write(path: Path, found: dict[str, Any]) -> None:
    """Write digests, and what the numbers depend on beside offbeat."""
    cpu = torch.backends.cpu.get_cpu_capability()
    machine = {"torch": torch.__version__, "machine": platform.machine(), "cpu": cpu}
    errors = sum(any("error" in rank for rank in one["ranks"]) for one in found.values())
    path.write_text(json.dumps({"made with": machine, "digests": found}, indent=0) + "\n")
    print(f"{path}: {len(found)} cases, {errors} of them with an error")


def differences(a: Any, b: Any, where: str, ignored: list[str]) -> list[str]:
    """The first difference in each part of two records."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [key for key in dict.fromkeys([*a, *b]) if key not in ignored]
        return [d for key in keys for d in differences(a.get(key), b.get(key), f"{where} {key}", ignored)]
    if isinstance(a, list) and isinstance(b, list):
        parts = [differences(x, y, f"{where}[{i}]", ignored) for i, (x, y) in enumerate(zip(a, b, strict=False))]
        parts.append([] if len(a) == len(b) else [f"{where}: {len(a)} | {len(b)} entries"])
        return next((found for found in parts if found), [])
    return [] if a == b else [f"{where}: {str(a)[:300]} | {str(b)[:300]}"]


def compare(first: Path, second: Path, ignored: list[str]) -> int:
    """Print how many cases agree and the first 20 differences. Returns the exit code."""
    a, b = (json.loads(path.read_text()) for path in (first, second))
    if a["made with"] != b["made with"]:
        print(f"Not made with the same: {a['made with']} | {b['made with']}")
    a, b = a["digests"], b["digests"]
    found = {key: differences(a.get(key), b.get(key), key, ignored) for key in dict.fromkeys([*a, *b])}
    wrong = [lines for lines in found.values() if lines]
    print(f"{len(found) - len(wrong)} of {len(found)} cases agree")
    print(*[line for lines in wrong for line in lines][:20], sep="\n")
    return 1 if wrong or not found else 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    oracle = commands.add_parser("oracle")
    oracle.add_argument("first", type=int)
    oracle.add_argument("number", type=int)
    oracle.add_argument("out", type=Path)
    checkpoints = commands.add_parser("checkpoints")
    checkpoints.add_argument("folder", type=Path)
    checkpoints.add_argument("action", choices=["write", "check"])
    both = commands.add_parser("compare")
    both.add_argument("files", type=Path, nargs=2)
    for command in (checkpoints, both):
        command.add_argument("--ignore", action="append", default=[], help="a field that may differ")
    commands.add_parser("show").add_argument("seed", type=int)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.command == "oracle":
        run_oracle(args.first, args.number, args.out)
    elif args.command == "checkpoints":
        return run_checkpoints(args.folder, args.ignore, check=args.action == "check")
    elif args.command == "compare":
        return compare(*args.files, args.ignore)
    else:
        print(draw(args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
