"""What the demo shows: live progress, tables of at most 80 columns, and one line made from the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from offbeat.cli.sites import LONGER

__all__ = ["Screen", "backward_table", "sites_table", "summary"]

NAME_WIDTH = 38


class Screen:
    """Shows the progress of process 0: bars on a terminal, else a line now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.bars: dict[str, TaskID] = {}
        columns = (
            TextColumn("{task.description}"),
            BarColumn(None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
        )
        self.live = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)

    def __enter__(self) -> Screen:
        self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.live.stop()

    def say(self, text: str) -> None:
        """Show a line."""
        self.console.print(escape(text), style="dim")

    def hear(self, number: int, message: dict[str, Any]) -> None:
        """Show what a process has said."""
        if number != 0:
            return
        if "arm" not in message:
            self.say(f"{message['doing']} ...")
            return
        arm, step, of = message["arm"], message["step"], message["of"]
        loss = f"loss {message['loss']:.2f}" if "loss" in message else ""
        if self.console.is_terminal:
            if arm not in self.bars:
                self.bars[arm] = self.live.add_task(escape(f"{arm:{NAME_WIDTH}}"), loss="")
            self.live.update(self.bars[arm], completed=step, total=of, loss=loss)
        elif step * 4 // of > (step - 1) * 4 // of:
            self.console.print(escape(f"{arm:{NAME_WIDTH}}  step {step:>4} of {of:<4}  {loss}".rstrip()))


def sites_table(found: dict[str, Any]) -> str:
    """The figures of part 1."""
    rows = [("", "steps", "steps/s", "MB/step", "worst ms", "loss")]
    for name, arm in found["arms"].items():
        mb = "-" if arm["mb_per_step"] is None else f"{arm['mb_per_step']:.3f}"
        speed = f"{arm['steps'] / arm['seconds']:.1f}"
        rows.append((name, str(arm["steps"]), speed, mb, f"{arm['worst_ms']:.0f}", f"{arm['held_out_loss']:.3f}"))
    note = (
        f"{found['parameters']:,} parameters; AdamW where it does not say Muon. MB: sent by\n"
        "one site. Loss: of held-out text, in nats per byte, the same at both sites."
    )
    return _table(rows, (7, 9, 9, 10, 7), note)


def backward_table(found: dict[str, Any]) -> str:
    """The figures of part 2."""
    rows = [("", "ms/step", "MB of gradients at most")]
    rows += [(name, f"{arm['ms']:.1f}", f"{arm['gradient_mb']:.1f}") for name, arm in found["arms"].items()]
    note = (
        f"{found['parameters']:,} parameters in {found['tensors']} tensors, one thread; lower quartile of "
        f"{found['steps']} steps\neach, in turns. Overlapped, the parameters are the same to the last bit."
    )
    return _table(rows, (10, 26), note)


def _table(rows: Sequence[Sequence[str]], widths: Sequence[int], note: str) -> str:
    lines = [
        f"{name:{NAME_WIDTH}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, *cells in rows
    ]
    return escape("\n".join(["", *(line.rstrip() for line in lines), note, ""]))


def summary(mbit: float, sites: dict[str, Any], backward: dict[str, Any]) -> str:
    """What was measured, in words that are true for any numbers."""
    ddp, ours = (sites["arms"][name] for name in ("DDP", LONGER))
    _, fused, _, overlapped = backward["arms"].values()
    bytes_a_step = ours["mb_per_step"] and f", with {ours['mb_per_step'] / ddp['mb_per_step']:.1%} of the bytes a step"
    return (
        f"While DDP made {ddp['steps']} steps over {mbit:g} Mbit/s, to a loss of {ddp['held_out_loss']:.2f}, "
        f"Muon inside DiLoCo with int4 made {ours['steps']}, to {ours['held_out_loss']:.2f}{bytes_a_step or ''}. "
        f"Overlapped with backward, a step with AdamW took {overlapped['ms'] / fused['ms']:.0%} of the time of torch's "
        f"fused one, and gradients {overlapped['gradient_mb'] / fused['gradient_mb']:.0%} of the memory."
    )
