"""``offbeat bench``: the link, a training step and every strategy, measured here and now."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from offbeat.cli.bench_model import ModelError, load_model, make_gpt
from offbeat.cli.bench_probe import Plan
from offbeat.cli.bench_run import bench
from offbeat.cli.bench_show import show_result
from offbeat.cli.output import fail, make_console
from offbeat.plan.result import BenchResult, save_result

__all__ = ["bench_command"]

QUICK = Plan(sizes=(1 << 12, 1 << 16, 1 << 20, 1 << 23), seconds=0.7, every=8)
FULL = Plan(sizes=(1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26), seconds=4.0, every=16)
#: Parameters of the GPT that is trained if no model is named.
QUICK_PARAMS, FULL_PARAMS = 1e6, 1e7
TIMEOUT = timedelta(minutes=3)
EPILOG = """Examples:

\b
    torchrun --nproc-per-node=2 -m offbeat bench --quick --json bench.json
    offbeat bench --model train:make_model --min-utilisation 0.9

On several machines, start one process at each site, so that what is measured is the link between them:

\b
    torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 -m offbeat bench
"""


def bench_command(
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Measure less, in under a minute.")] = False,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="It returns (module, loss); loss(module) is a loss."),
    ] = None,
    params: Annotated[
        float | None, typer.Option(min=1e4, help="Without --model: parameters of a GPT. [default: 1e7, quick 1e6]")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", dir_okay=False, help="Also write the result to a file.")
    ] = None,
    min_mbit: Annotated[float, typer.Option(min=0, help="Fail if the link is slower, in Mbit/s.")] = 0,
    max_latency_ms: Annotated[float | None, typer.Option(min=0, help="Fail if a collective takes longer.")] = None,
    min_utilisation: Annotated[
        float, typer.Option(min=0, max=1, help="Fail if no strategy reaches this part of the time.")
    ] = 0,
) -> None:
    """Measure the link, a training step and every strategy, each briefly.

    Started by torchrun, every process is a replica. Started alone, it runs two processes on this machine.
    The exit code is 1 if a limit is not kept.
    """
    if json_path is not None and not os.access(json_path.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"{json_path} cannot be written; name a file in a folder that can")
    if "RANK" not in os.environ:
        raise typer.Exit(_launch())
    first = os.environ["RANK"] == "0"
    console = make_console(quiet=not first)
    try:
        module, loss = load_model(model) if model else make_gpt(params or (QUICK_PARAMS if quick else FULL_PARAMS))
    except ModelError as error:
        fail(f"--model: {error}", code=2, quiet=not first)
    device = _connect(first)
    try:
        plan = QUICK if quick else FULL
        result = bench(module.to(device), loss, plan, lambda text: console.print(f"measuring {text} ...", style="dim"))
    finally:
        dist.destroy_process_group()
    if not first:
        return
    show_result(console, result)
    if json_path is not None:
        save_result(result, json_path)
        console.print(f"Written to {json_path}; now run: offbeat plan {json_path}", soft_wrap=True)
    if broken := _broken_limits(result, min_mbit, max_latency_ms, min_utilisation):
        fail("; ".join(broken))


def _launch() -> int:
    """Run the same command in two processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2)), **os.environ}
    try:
        return subprocess.run([*launcher, "-m", "offbeat", *sys.argv[1:]], env=environment).returncode
    except KeyboardInterrupt:
        return 130


def _connect(first: bool) -> torch.device:
    """Join the process group. Returns the device to train on."""
    local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    enough = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if enough:
        torch.cuda.set_device(local)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if enough else "gloo", timeout=TIMEOUT)
    except (dist.DistError, RuntimeError, ValueError) as error:
        address = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        fail(
            f"no process group at {address}: {str(error).splitlines()[0]}. If the port is in use, choose another one "
            "with torchrun --master-port; if the address cannot be reached, see offbeat doctor",
            quiet=not first,
        )
    return torch.device("cuda", local) if enough else torch.device("cpu")


def _broken_limits(
    result: BenchResult, min_mbit: float, max_latency_ms: float | None, min_utilisation: float
) -> list[str]:
    broken = []
    if min_mbit and (result.bandwidth is None or result.bandwidth * 8e-6 < min_mbit):
        got = "no link was measured" if result.bandwidth is None else f"the link has {result.bandwidth * 8e-6:.0f}"
        broken.append(f"{got}, and --min-mbit is {min_mbit:g}")
    if max_latency_ms is not None and result.latency is not None and 1e3 * result.latency > max_latency_ms:
        broken.append(f"a collective takes {1e3 * result.latency:.2f} ms, and --max-latency-ms is {max_latency_ms:g}")
    best = max((row["utilisation"] for row in result.strategies), default=1.0)
    if best < min_utilisation:
        broken.append(f"the best utilisation is {best:.2f}, and --min-utilisation is {min_utilisation:g}")
    return broken
