"""Loading: everything is read and checked first, on all ranks, and only then is anything changed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offbeat._torch import unwrapped_name
from offbeat.checkpoint import foreign
from offbeat.checkpoint.contents import Contents, Target, as_before, beside
from offbeat.checkpoint.errors import CheckpointMismatch, DamagedCheckpoint
from offbeat.checkpoint.generators import check_generators, restore_generators
from offbeat.checkpoint.manifest import SECTIONS, Manifest, describe, list_checkpoints, parse_name
from offbeat.checkpoint.names import Names, inner_module
from offbeat.checkpoint.pieces import Entry, ranks_of, region_of, sharded
from offbeat.checkpoint.ranks import Ranks, distinct
from offbeat.checkpoint.snapshot import check_extra, param_of
from offbeat.checkpoint.tree import Place
from offbeat.engine.tensors import is_dtensor

__all__ = ["LoadedCheckpoint", "load_checkpoint"]


class LoadedCheckpoint(dict[str, Any]):
    """The ``extra`` of a checkpoint.

    Attributes:
        step: the number of steps after which it was saved.
        path: its own folder.
        missing: with ``strict=False``, what the model or the optimizer has and the checkpoint lacks.
        unexpected: with ``strict=False``, what the checkpoint has and the model or the optimizer lacks.
    """

    step: int
    path: Path
    missing: list[str]
    unexpected: list[str]


def load_checkpoint(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Any = None,
    step: int | None = None,
    strict: bool = True,
    generators: bool = True,
) -> LoadedCheckpoint:
    """Load the newest complete checkpoint into a model and an optimizer, after every file has been checked.

    With several ranks, each of them must make this call, and all load the same checkpoint: the newest one that is whole
    on all of them. If a file is damaged, a warning names it, and the checkpoint before is loaded.

    The number of ranks and the sharding may be others than when it was saved. Replicas then continue from the saved
    ones in turn, and random generators stay as they are.

    Args:
        folder: where checkpoints were saved; or the own folder of one, which is loaded or raises.
        model: the model to load into, or None. Wrap and shard it first.
        optimizer: the optimizer to load into, or None.
        step: load the newest checkpoint of this step, or raise.
        strict: whether to raise if the checkpoint is of other parameters. If False, what has the same name is loaded,
            and a warning lists the rest.
        generators: whether to restore random generators.

    Returns:
        The ``extra`` that was saved, as a dict, with the attributes ``step``, ``path``, ``missing``, ``unexpected``.

    Raises:
        FileNotFoundError: there is no checkpoint.
        DamagedCheckpoint: the one that was asked for is damaged, or all are.
        CheckpointMismatch: it is of another model or optimizer.

    Example:
        >>> import tempfile, torch, offbeat
        >>> model, folder = torch.nn.Linear(2, 2), tempfile.mkdtemp()
        >>> optimizer = offbeat.SGD(model.parameters(), momentum=0.9)
        >>> saved = offbeat.save_checkpoint(folder, model=model, optimizer=optimizer, step=7, extra={"epoch": 1})
        >>> extra = offbeat.load_checkpoint(folder, model=model, optimizer=optimizer)
        >>> extra["epoch"], extra.step
        (1, 7)
    """
    ranks, folder = Ranks(), Path(os.path.abspath(folder))
    replicas = distinct(ranks.gather(_replica(ranks.rank, model)))
    is_named = step is not None or parse_name(folder.name)[0] >= 0
    problems: list[str] = []
    for path, problem in _candidates(ranks, folder, step):
        load = _Load(path, ranks, model, optimizer, strict=strict)
        try:
            if problem:
                raise DamagedCheckpoint(problem)
            ranks.together(lambda load=load: load.read(replicas))  # type: ignore[misc]
        except DamagedCheckpoint as error:
            if is_named:
                raise
            problems.append(str(error))
            continue
        for problem in problems:
            warnings.warn(f"{problem}; the checkpoint {path.name} is loaded instead", stacklevel=2)
        load.apply()
        if generators and load.has_generators:
            restore_generators(load.random)
        if load.missing or load.unexpected:
            warnings.warn(_difference(load.missing, load.unexpected) + "; the rest was loaded", stacklevel=2)
        return load.result()
    raise DamagedCheckpoint(f"no checkpoint in {folder} can be loaded: {'; '.join(problems)}")


def _candidates(ranks: Ranks, folder: Path, step: int | None) -> list[tuple[Path, str]]:
    """The checkpoints that any rank has, the newest first, each with what is wrong with it.

    Args:
        ranks: who looks.
        folder: the folder of checkpoints, or one of them.
        step: only those of this step.
    """

    def look() -> dict[str, Any]:
        there = [describe(folder)] if is_own and folder.is_dir() else list_checkpoints(folder)
        if not there:
            foreign.refuse(folder)
        return {one.path.name: [one.step, one.damage, one.id] for one in there}

    is_own = parse_name(folder.name)[0] >= 0
    answers = ranks.together(look)
    steps = {name: about[0] for answer in answers for name, about in answer.items()}
    names = [name for name in steps if step is None or steps[name] == step]
    if not names:
        asked = "" if step is None else f"of step {step} "
        there = f"; there are those of steps {sorted(set(steps.values()))}" if steps else ""
        raise FileNotFoundError(f"there is no checkpoint {asked}in {folder}{there}")
    result = []
    for name in sorted(names, key=parse_name, reverse=True):
        about = [answer.get(name) for answer in answers]
        absent = [rank for rank, one in enumerate(about) if one is None]
        damage = sorted({one[1] for one in about if one is not None and one[1]})
        problem = "; ".join(damage)
        if absent:
            problem = f"{folder / name}: is not there on ranks {absent}"
        elif not damage and len({one[2] for one in about if one is not None}) > 1:
            problem = f"{folder / name}: is another checkpoint on some ranks"
        result.append((folder if is_own else folder / name, problem))
    return result


class _Load:
    """One checkpoint on its way into a model and an optimizer.

    Attributes:
        missing: what the checkpoint lacks.
        unexpected: what only the checkpoint has.
        random: the states of random generators.
        has_generators: whether there were as many ranks, so that the generators of this rank were saved.
    """

    def __init__(self, path: Path, ranks: Ranks, model: nn.Module | None, optimizer: Any, *, strict: bool) -> None:
        self._path, self._ranks, self._strict = path, ranks, strict
        self._module, self._optimizer, self._names = inner_module(model), optimizer, Names(model)
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.random: dict[str, Any] = {}
        self.has_generators = False
        self._step = 0
        self._model_state: dict[str, Any] | None = None
        self._optimizer_state: dict[str, Any] | None = None
        self._extra: dict[str, Any] | None = None

    def read(self, replicas: list[list[int]]) -> None:
        """Read and check everything; changes nothing.

        Args:
            replicas: which ranks together have a whole model.
        """
        manifest, rank = Manifest.read(self._path), self._ranks.rank
        self._step = manifest.step
        source = _source(manifest, replicas, rank)
        self.has_generators = manifest.ranks == self._ranks.size and rank in manifest.sections
        own = rank if self.has_generators else source
        contents = Contents(self._path, manifest, {"model": source, "optimizer": source, "extra": own, "random": own})
        trees = {name: contents.tree(name) for name in SECTIONS}
        if self._module is not None:
            trees["model"] = self._plan_model(contents, trees["model"])
        if self._optimizer is not None:
            self._plan_optimizer(contents, trees["optimizer"])
        if self._strict and (self.missing or self.unexpected):
            raise CheckpointMismatch(
                f"{self._path} is of another model or optimizer: {_difference(self.missing, self.unexpected)}. Nothing "
                "was changed. strict=False loads what has the same name",
                self.missing,
                self.unexpected,
            )
        for section in ("extra", "random"):
            contents.plan(section, trees[section], lambda _, entry: as_before(entry))
        contents.read()
        if self._module is not None:
            self._model_state = contents.values("model", trees["model"])
        if self._optimizer is not None:
            saved = contents.values("optimizer", trees["optimizer"])
            self._optimizer_state = self._names.to_numbers(saved, self._optimizer)[0]
        self._extra = contents.values("extra", trees["extra"])
        self.random = contents.values("random", trees["random"]) or {}
        try:
            check_extra(self._extra)
            check_generators(self.random)
        except Exception as error:
            raise DamagedCheckpoint(f"{self._path}: a section is malformed ({error!r})") from error

    def _plan_model(self, contents: Contents, tree: Any) -> dict[str, Any]:
        assert self._module is not None
        here = {unwrapped_name(key): value for key, value in self._module.state_dict().items()}
        if tree is None:
            raise CheckpointMismatch(f"{self._path} has no model; leave model= out to load the rest")
        if not isinstance(tree, dict):
            raise DamagedCheckpoint(f"{self._path}: its model is malformed")
        self.missing += [f"model: {name}" for name in here if name not in tree]
        self.unexpected += [f"model: {name}" for name in tree if name not in here]
        known = {name: value for name, value in tree.items() if name in here}

        def target(place: Place, entry: Entry) -> Target:
            value = here[place[0]]
            if not isinstance(value, Tensor):
                return as_before(entry)
            if tuple(value.shape) != entry.shape:
                raise CheckpointMismatch(
                    f"{self._path} has {place[0]!r} in shape {entry.shape}, and the model in {tuple(value.shape)}; "
                    "nothing was changed"
                )
            return Target(region_of(value), _placed_as(value))

        contents.plan("model", known, target)
        return known

    def _plan_optimizer(self, contents: Contents, tree: Any) -> None:
        if tree is None:
            raise CheckpointMismatch(f"{self._path} has no optimizer; leave optimizer= out to load the rest")

        def target(place: Place, entry: Entry) -> Target:
            return beside(entry, param_of(place, self._names), is_state=place[0] == "state")

        saved = contents.plan("optimizer", tree, target)
        try:
            _, missing, unexpected = self._names.to_numbers(saved, self._optimizer)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DamagedCheckpoint(f"{self._path}: its optimizer is malformed ({error!r})") from error
        self.missing += missing
        self.unexpected += unexpected

    def apply(self) -> None:
        """Write what was read to the model and the optimizer; on all ranks, or on none."""
        undo: list[Callable[[], Any]] = []

        def write() -> None:
            if self._module is not None and self._model_state is not None:
                module = self._module
                actual = {unwrapped_name(key): key for key in module.state_dict()}
                before = {key: _copied(value) for key, value in module.state_dict().items()}
                undo.append(lambda: module.load_state_dict(before))
                state = {actual[name]: value for name, value in self._model_state.items()}
                module.load_state_dict(state, strict=self._strict)
            if self._optimizer is not None:
                # An optimizer that raises has changed nothing. But another rank's may raise.
                old = _copied(self._optimizer.state_dict()) if self._ranks.size > 1 else {}
                self._optimizer.load_state_dict(self._optimizer_state)
                undo.append(lambda: self._optimizer.load_state_dict(old))

        try:
            self._ranks.together(write)
        except Exception as error:
            for back in reversed(undo):
                back()
            raise CheckpointMismatch(f"{self._path} could not be loaded: {error}; nothing was changed") from error

    def result(self) -> LoadedCheckpoint:
        """What the caller gets."""
        loaded = LoadedCheckpoint(self._extra or {})
        loaded.step, loaded.path = self._step, self._path
        loaded.missing, loaded.unexpected = self.missing, self.unexpected
        return loaded


def _replica(rank: int, model: nn.Module | None) -> list[int]:
    """The ranks that together have the whole model of this one."""
    sharding = [ranks_of(p) for p in (() if model is None else model.parameters()) if is_dtensor(p)]
    return sorted({rank, *(rank for ranks in sharding for rank in ranks)})


def _source(manifest: Manifest, replicas: list[list[int]], rank: int) -> int:
    """The rank that saved what this rank reads: itself if all is as it was, else replicas and shards in turn."""
    if rank in manifest.sections and manifest.replicas == replicas:
        return rank
    own = next(i for i, ranks in enumerate(replicas) if rank in ranks)
    usable = [[r for r in ranks if r in manifest.sections] for ranks in manifest.replicas]
    usable = [ranks for ranks in usable if ranks] or [sorted(manifest.sections)]
    ranks = usable[own % len(usable)]
    return ranks[replicas[own].index(rank) % len(ranks)]


def _placed_as(value: Tensor) -> Callable[[Tensor], Tensor]:
    return (lambda part: sharded(value, part)) if is_dtensor(value) else (lambda part: part)


def _copied(value: Any) -> Any:
    """A copy of nested tensors."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return [_copied(item) for item in value] if type(value) is list else tuple(_copied(item) for item in value)
    return value


def _difference(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    def some(names: Sequence[str]) -> str:
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

    parts = [f"it lacks {some(missing)}"] if missing else []
    return " and ".join(parts + ([f"it has, and they are not here, {some(unexpected)}"] if unexpected else []))
