"""A training run that is killed (SIGKILL) at random moments of its saves: the newest complete checkpoint must go on.

    python -m benchmarks.chaos_checkpoint [--kills 20] [--seed 0]

A process trains and saves after every step, every other time in the background. It is killed at a random moment of a
save. Then the newest checkpoint is loaded, without any warning, and must have the bits of a run that was never killed;
a save that had returned must not be lost. A new process goes on from there. In the end the last parameters must be
those of the run that was never killed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offbeat

STEPS = 60


def make() -> tuple[nn.Module, offbeat.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))
    return model, offbeat.AdamW(model.parameters(), lr=1e-3)


def train_step(model: nn.Module, optimizer: offbeat.AdamW, step: int) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)) + 0.01 * torch.randn(16, 32)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits_of(model: nn.Module, optimizer: offbeat.AdamW) -> list[torch.Tensor]:
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [value.detach().clone() for value in (*model.parameters(), *state)]


def run(folder: str, steps: int, pipe: Any) -> None:
    """The process that is killed."""
    torch.set_num_threads(1)
    model, optimizer = make()
    step = 0
    if offbeat.list_checkpoints(folder):
        step = offbeat.load_checkpoint(folder, model=model, optimizer=optimizer).step
    while step < steps:
        train_step(model, optimizer, step)
        step += 1
        pipe.send(("begin", step))
        saved = offbeat.save_checkpoint(
            folder, model=model, optimizer=optimizer, keep=2, background=step % 2 == 1, extra={"step": step}
        )
        saved.wait()
        pipe.send(("end", step))


def kill_saves(kills: int, seed: int = 0, folder: str | os.PathLike[str] | None = None) -> dict[str, int]:
    """Kill a training run during ``kills`` of its saves.

    Args:
        kills: how often.
        seed: of the moments.
        folder: where it saves; by default a temporary folder.

    Returns:
        How often it was killed, how often the interrupted save left a temporary folder, how often it left nothing, and
        how often its checkpoint was there.

    Raises:
        AssertionError: something was lost.
    """
    steps = max(STEPS, 3 * kills)
    torch.set_num_threads(1)
    expected = _never_killed(steps)
    draw = random.Random(seed)
    result = {"kills": 0, "temporary": 0, "nothing": 0, "complete": 0}
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["offbeat"])
    with tempfile.TemporaryDirectory() as own:
        place = Path(folder or own) / "checkpoints"
        while True:
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(str(place), steps, theirs), daemon=True)
            process.start()
            theirs.close()
            interrupted = _kill_in_a_save(process, ours, draw) if result["kills"] < kills else _finish(process)
            done = _last_end(ours)
            _check(place, expected, done)
            if interrupted is None:
                assert offbeat.list_checkpoints(place)[-1].step == steps
                return result
            result["kills"] += 1
            complete = offbeat.list_checkpoints(place)[-1].step == interrupted if place.is_dir() else False
            left = place.is_dir() and any(name.endswith(".tmp") for name in os.listdir(place))
            result["complete" if complete else "temporary" if left else "nothing"] += 1


def _never_killed(steps: int) -> list[list[torch.Tensor]]:
    model, optimizer = make()
    expected = []
    for step in range(steps):
        expected.append(bits_of(model, optimizer) if step else [])
        train_step(model, optimizer, step)
    return [*expected, bits_of(model, optimizer)]


def _kill_in_a_save(process: Any, pipe: Any, draw: random.Random) -> int:
    """Let a process make one or two saves, and kill it in the next one. Returns the step of that save."""
    whole, duration = draw.choice([1, 1, 2]), 0.05
    while True:
        assert pipe.poll(120), "the process says nothing"
        kind, step = pipe.recv()
        if kind == "begin":
            began = time.perf_counter()
            if whole == 0:
                time.sleep(draw.uniform(0, 1.1) * duration)
                os.kill(process.pid, signal.SIGKILL)
                process.join(30)
                return int(step)
        else:
            duration, whole = time.perf_counter() - began, whole - 1


def _finish(process: Any) -> None:
    process.join(300)
    assert process.exitcode == 0, f"the process ended with {process.exitcode}"


def _last_end(pipe: Any) -> int:
    """The step of the last save that returned."""
    done = 0
    try:
        while pipe.poll(0):
            kind, step = pipe.recv()
            done = step if kind == "end" else done
    except EOFError:
        pass
    return done


def _check(place: Path, expected: list[list[torch.Tensor]], done: int) -> None:
    model, optimizer = make()
    if not offbeat.list_checkpoints(place):
        assert done == 0, f"the checkpoint of step {done} is lost"
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = offbeat.load_checkpoint(place, model=model, optimizer=optimizer, generators=False).step
    assert step >= done, f"the checkpoint of step {done} is lost, and that of step {step} was loaded"
    same = all(map(torch.equal, bits_of(model, optimizer), expected[step]))
    assert same, f"the checkpoint of step {step} does not have the bits of a run that was never killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = kill_saves(options.kills, options.seed)
    print(
        f"{result['kills']} kills during a save: {result['complete']} times the new checkpoint was complete, "
        f"{result['temporary']} times it was still a temporary folder, {result['nothing']} times nothing of it was "
        "there. Nothing was lost, and training went on with the same bits."
    )


if __name__ == "__main__":
    main()
