"""Writes the compatibility table of docs/overlap.md from the names of the tests. A test holds that it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "overlap.md"
BEGIN, END = "<!-- made by docs/make_overlap.py from tests/test_overlap_cells.py -->", "<!-- end -->"

PLACES = {"plain": "plain module", "ddp": "DDP", "fsdp2": "FSDP2"}
MUON = {"shared": "DDP, `share_matrices`"}
FEATURES = {
    "step": "a step during backward",
    "accumulate": "`accumulate=N`",
    "accumulate_block": "`with handle.accumulate():`",
    "accumulate_no_sync": "DDP's `no_sync()`, FSDP2's `set_requires_gradient_sync(False)`",
    "clip_exact": '`clip="exact"`',
    "clip_previous": '`clip="previous"`',
    "clip_bucket": '`clip="bucket"`',
    "scaler": "`scaler=GradScaler()`, with overflows",
    "scaler_clip_exact": "scaler and exact clipping",
    "scaler_clip_bucket": "scaler and clipping by bucket",
    "scheduler": "learning-rate schedulers",
    "reload": "state dicts saved and loaded in the middle",
    "two_optimizers": "two optimizers on one module",
    "closure": "`step(closure)`",
    "accumulate_closure": "`accumulate=N`, the last pass in `step(closure)`",
    "bucket_view": "`gradient_as_bucket_view=True`",
    "find_unused": "`find_unused_parameters=True`",
    "find_unused_clip_exact": "`find_unused_parameters=True` and exact clipping",
    "find_unused_clip_bucket": "`find_unused_parameters=True` and clipping by bucket",
    "static_graph": "`static_graph=True`",
    "mixed_precision": "`MixedPrecisionPolicy`",
    "keep_unsharded": "`reshard_after_forward=False`",
    "hook_allreduce": "communication hook: all-reduce",
    "hook_fp16": "communication hook: float16",
    "hook_bf16": "communication hook: bfloat16",
    "hook_powersgd": "communication hook: PowerSGD",
    "hook_post_local_sgd": "communication hook: post-local SGD",
    "hook_own": "communication hook: the user's own",
}


def table() -> str:
    """Rows are features, columns places, and shared matrices; a mark for each cell that has tests."""
    sys.path.insert(0, str(ROOT))
    from tests.test_overlap_cells import PAIRS, inexact

    cells = {
        (optimizer if optimizer in MUON else cell.where, cell.feature): "≈" if inexact(cell) else "="
        for cell, optimizer in PAIRS
    }
    unknown = {feature for _, feature in cells} - set(FEATURES)
    assert not unknown, f"docs/make_overlap.py has no words for {unknown}"
    columns = PLACES | MUON
    lines = ["| feature | " + " | ".join(columns.values()) + " |", "|---" * (1 + len(columns)) + "|"]
    for feature, words in FEATURES.items():
        marks = [cells.get((column, feature), "") for column in columns]
        lines.append(f"| {words} | {' | '.join(marks)} |")
    return "\n".join(lines)


def page() -> str:
    """The page with a fresh table."""
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + "\n\n" + table() + "\n\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
