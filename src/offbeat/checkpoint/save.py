"""Saving: into a temporary folder, synced, then renamed, so that a checkpoint is there completely or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from offbeat.checkpoint import files
from offbeat.checkpoint.errors import CheckpointError
from offbeat.checkpoint.generators import generator_states
from offbeat.checkpoint.manifest import CheckpointInfo, Manifest, folder_name, list_checkpoints
from offbeat.checkpoint.ranks import Ranks, distinct, sites
from offbeat.checkpoint.snapshot import Snapshot, check_extra

__all__ = ["SavedCheckpoint", "save_checkpoint"]

#: The newest save of this process.
_newest: SavedCheckpoint | None = None


def save_checkpoint(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Any = None,
    extra: dict[str, Any] | None = None,
    step: int | None = None,
    keep: int | None = None,
    background: bool = False,
    generators: bool = True,
) -> SavedCheckpoint:
    """Save a model, an optimizer and more, so that a crash at any moment leaves the new checkpoint or the one before.

    With several ranks, each of them must make this call. What is equal on several ranks is stored once, shards of
    sharded tensors are stored as they are, and what differs, such as replicas between two rounds, is stored for each
    rank. Nothing is pickled: tensors are in safetensors files, everything else in JSON.

    Args:
        folder: where checkpoints go. Each one is a folder of its own in it. Ranks may have it on different disks.
        model: the model: plain, DistributedDataParallel or ``fully_shard``-ed.
        optimizer: any optimizer, or one of the replicas.
        extra: further values of the user's: nested dicts, lists, tuples, numbers, strings, and tensors.
        step: the number of steps made. By default ``optimizer.steps``, or the largest ``step`` in the optimizer's
            state, or one more than that of the newest checkpoint.
        keep: how many checkpoints to keep. Older ones are removed when the new one is complete, but none of a later
            step. By default all are kept.
        background: whether to return once everything is copied to memory, and write in a thread. A save that is called
            meanwhile waits for the one before.
        generators: whether to save the states of the random generators of torch, Python and NumPy.

    Returns:
        A handle. With ``background=True``, its ``wait()`` raises what went wrong.

    Raises:
        CheckpointError: it could not be saved. Older checkpoints are as they were, and nothing of the new one is left.

    Example:
        >>> import tempfile, torch, offbeat
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = offbeat.AdamW(model.parameters())
        >>> folder = tempfile.mkdtemp()
        >>> saved = offbeat.save_checkpoint(folder, model=model, optimizer=optimizer, extra={"epoch": 3}, keep=2)
        >>> offbeat.load_checkpoint(folder, model=model, optimizer=optimizer)["epoch"]
        3
    """
    global _newest
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1, but got {keep}; leave it out to keep all checkpoints")
    if step is not None and step < 0:
        raise ValueError(f"step must not be negative, but got {step}")
    if _newest is not None:
        _newest._finish()
    ranks = Ranks()
    save = _Save(Path(os.path.abspath(folder)), keep, ranks)
    try:
        others = {"extra": check_extra(extra), **({"random": generator_states()} if generators else {})}
        save.snapshot = Snapshot(model, optimizer, others, copy=background)
        save.step = step if step is not None else _steps(optimizer)
    except Exception as error:
        if ranks.size == 1:
            raise
        save.error = error  # the other ranks must hear of it
    saved = SavedCheckpoint(save.run, background=background)
    _newest = saved
    if not background:
        saved.wait()
    return saved


class SavedCheckpoint:
    """A save that is done or under way."""

    def __init__(self, run: Callable[[], Path], *, background: bool) -> None:
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._is_told = not background
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, args=(run,), name="offbeat-checkpoint")
            self._thread.start()
        else:
            self._run(run)

    def _run(self, run: Callable[[], Path]) -> None:
        try:
            self._path = run()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until everything is on the disk. Returns the checkpoint's own folder, and raises if the save failed.

        Args:
            timeout: after how many seconds to raise TimeoutError; by default never.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the checkpoint is not written after {timeout} s; the save goes on")
        self._is_told = True
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def _finish(self) -> None:
        """Wait, and warn of an error that nobody has asked for."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and not self._is_told:
            self._is_told = True
            warnings.warn(f"the save before this one failed: {self._error}", RuntimeWarning, stacklevel=3)


class _Save:
    """One save, on one rank.

    Args:
        folder: where checkpoints go.
        keep: how many to keep.
        ranks: who saves.
    """

    def __init__(self, folder: Path, keep: int | None, ranks: Ranks) -> None:
        self.folder, self.keep, self.ranks = folder, keep, ranks
        self.snapshot: Snapshot | None = None
        self.step: int | None = None
        self.error: Exception | None = None

    def run(self) -> Path:
        """Write everything. Either all ranks return, or all raise."""
        try:
            return self._write()
        except OSError as error:
            raise CheckpointError(
                f"no checkpoint was saved in {self.folder}: {error}; those before are as they were"
            ) from error

    def _write(self) -> Path:
        about = self.ranks.together(self._begin)
        step = max(one["step"] for one in about)
        name, token = folder_name(max(one["sequence"] for one in about) + 1, step), about[0]["token"]
        (site,) = [site for site in sites(self.ranks, self.folder) if self.ranks.rank in site]
        leads = self.ranks.rank == site[0]
        temporary, final = self.folder / f".{name}-{token}.tmp", self.folder / name

        def on_leader(work: Callable[[], None]) -> None:
            self.ranks.together(work if leads else lambda: None)

        def prepare() -> None:
            self._remove_leftovers()
            os.mkdir(temporary)

        def write() -> Any:
            assert self.snapshot is not None
            return self.snapshot.write(temporary, self.ranks.rank, site, [one["digests"] for one in about])

        def list_files() -> None:
            replicas = distinct(one["replica"] for one in about)
            sections = {rank: written[rank][0] for rank in site}
            stamps = {name: stamp for rank in site for name, stamp in written[rank][1].items()}
            Manifest(token, step, self.ranks.size, replicas, sections, stamps).write(temporary)
            files.sync_folder(temporary)

        def publish() -> None:
            os.rename(temporary, final)
            files.sync_folder(self.folder)

        try:
            on_leader(prepare)
            written = self.ranks.together(write)
            on_leader(list_files)
            on_leader(publish)
        except BaseException:
            if leads:
                _discard(temporary)
                _discard(final)
            raise
        if leads:
            self._remove_old(step)
        return final

    def _begin(self) -> dict[str, Any]:
        """What the other ranks must know before anything is written."""
        if self.error is not None:
            raise self.error
        assert self.snapshot is not None
        files.make_folder(self.folder)
        there = list_checkpoints(self.folder)
        step = self.step if self.step is not None else (there[-1].step + 1 if there else 0)
        if there and there[-1].step > step and self.ranks.rank == 0:
            warnings.warn(
                f"the newest checkpoint in {self.folder} is of step {there[-1].step}, and this one is of step {step}. "
                "From now on this one is the newest; those of later steps are kept. Give each run a folder of its own",
                stacklevel=2,
            )
        return {
            "step": step,
            "sequence": max((one.sequence for one in there), default=0),
            "token": uuid.uuid4().hex,
            "digests": self.snapshot.digests() if self.ranks.size > 1 else {},
            "replica": self.snapshot.replica(self.ranks.rank),
        }

    def _remove_leftovers(self) -> None:
        """Remove what saves that were killed have left."""
        for name in os.listdir(self.folder):
            if name.startswith(".") and name.endswith(".tmp"):
                _discard(self.folder / name)

    def _remove_old(self, step: int) -> None:
        """Remove what is older than the newest ``keep`` checkpoints, but nothing of a later step."""
        if self.keep is None:
            return
        kept = 0
        for one in reversed([one for one in list_checkpoints(self.folder) if one.step <= step]):
            if kept >= self.keep:
                self._remove(one)
            kept += one.complete

    def _remove(self, old: CheckpointInfo) -> None:
        hidden = self.folder / f".{old.path.name}-old.tmp"
        try:
            os.rename(old.path, hidden)  # never there in parts
            files.sync_folder(self.folder)
            files.remove_folder(hidden)
        except OSError as error:
            warnings.warn(f"an older checkpoint could not be removed: {error}", RuntimeWarning, stacklevel=2)


def _discard(folder: Path) -> None:
    """Remove a folder that must not be there, as far as that is possible."""
    with contextlib.suppress(OSError):
        if not folder.name.startswith("."):
            hidden = folder.parent / f".{folder.name}-failed.tmp"
            os.rename(folder, hidden)
            folder = hidden
        files.remove_folder(folder)


def _steps(optimizer: Any) -> int | None:
    """The number of steps that an optimizer has made, as far as it knows."""
    steps = getattr(optimizer, "steps", None)
    if isinstance(steps, int):
        return steps
    counts = [
        int(entry["step"])
        for entry in getattr(optimizer, "state", {}).values()
        if isinstance(entry, dict) and isinstance(entry.get("step"), (int, float, Tensor))
    ]
    return max(counts, default=None)
