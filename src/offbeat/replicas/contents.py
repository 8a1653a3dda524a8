"""The tensors of an optimizer and its module that replicas exchange: parameters, buffers, optimizer state."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from offbeat import _torch
from offbeat._torch import persistent_buffers, shard_place
from offbeat.engine.tensors import is_dtensor, is_plain, local
from offbeat.replicas.options import Buffers
from offbeat.replicas.state_policy import keys_of_state, reset_state, tensors_to_average
from offbeat.wire.peers import Peers, gather

__all__ = ["FIRST", "MEAN", "Contents", "Item", "check_buffers", "describe", "digest", "local_part"]

#: Every rank gets the weighted mean.
MEAN = "mean"
#: Every rank gets the value of the first rank with a weight: for tensors that cannot be averaged.
FIRST = "first"

BUFFERS: tuple[str, ...] = get_args(Buffers)


class Item(NamedTuple):
    """One tensor to exchange.

    Attributes:
        name: used in errors and checkpoints; the same on every rank.
        tensor: the tensor; of a DTensor, the local shard is exchanged.
        how: :data:`MEAN` or :data:`FIRST`.
        late: whether a delayed round adds the difference (True) or replaces the value (False). Adding a difference
            could make a running variance negative.
    """

    name: str
    tensor: Tensor
    how: str = MEAN
    late: bool = True


def local_part(tensor: Tensor) -> Tensor:
    """The local shard of a tensor, in a dtype that a collective can reduce."""
    part = local(tensor.detach())
    if part.is_complex():
        part = torch.view_as_real(part)
    return part.view(torch.uint8) if part.dtype == torch.bool else part


class Contents:
    """The items of one optimizer and its module, the same on every rank.

    Parameters are included if they have ``requires_grad``, whether this rank has a gradient for them or not. A
    parameter that replicas have trained by themselves stays included: if it were frozen before the next average, ranks
    would keep different values.

    Args:
        state: policy for optimizer state.
        buffers: policy for the module's buffers.
    """

    def __init__(
        self, optimizer: Optimizer, module: torch.nn.Module, state: str | Mapping[str, str], buffers: str
    ) -> None:
        self.optimizer = optimizer
        self._module = module
        self._ignored: Any = ()
        if isinstance(module, DistributedDataParallel):
            self._module, self._ignored = module.module, module.parameters_to_ignore
        self._state, self._buffers = state, buffers
        self._ever: Any = _torch.weak_table()
        self._digest, self._state_digest = CachedDigest(), CachedDigest()
        self._names: dict[int, tuple[Tensor, str]] = {}
        self._trained: list[int] = []
        #: Names of buffers that may have infinite numbers.
        self.masks: set[str] = set()

    def params(self) -> dict[str, Tensor]:
        """Parameters by their name in the module, or by their position in the optimizer's groups."""
        return {name: p for name, p in self._by_name().items() if p.requires_grad or p in self._ever}

    def frozen(self) -> set[str]:
        """The names of parameters that are not averaged now, but would be if they had ``requires_grad``."""
        return {name for name, p in self._by_name().items() if not (p.requires_grad or p in self._ever)}

    def _by_name(self) -> dict[str, Tensor]:
        nobody = (None, "")
        if any(self._names.get(id(p), nobody)[0] is not p for p in self._all()):
            named = self._module.named_parameters(remove_duplicate=False)
            self._names = {id(p): (p, "") for p in self._all()}
            for name, p in reversed(list(named)):  # of tied weights the first name, as named_parameters() has it
                self._names[id(p)] = (p, name)
        names, found = self._names, {}
        for i, group in enumerate(self.optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                found[names[id(p)][1] or f"parameter {j} of group {i}"] = p
        return found

    def all_items(self) -> list[Item]:
        """Every parameter of the module and of the optimizer, trained or not, but for frozen ones of special kinds."""
        named = self._module.named_parameters()
        found: dict[str, Tensor] = {name: p for name, p in named if name not in self._ignored}
        known = {id(p) for p in found.values()}
        found |= {name: p for name, p in self._by_name().items() if id(p) not in known}
        return [Item(name, p) for name, p in found.items() if not self._is_frozen(p) or _has_plain_values(p)]

    def frozen_items(self) -> list[Item]:
        """Parameters that nobody trains, and that are never averaged."""
        return [item for item in self.all_items() if self._is_frozen(item.tensor)]

    def _is_frozen(self, p: Tensor) -> bool:
        return not (p.requires_grad or p in self._ever)

    def note_masks(self, peers: Peers) -> None:
        """Take note of buffers with infinite numbers before training, such as masks: these are as they should be.

        Only if these are in the same places on every rank: otherwise something has gone wrong on one of them. All ranks
        call it together.
        """
        places = {item.name: _infinite_places(item.tensor) for item in self.buffers()}
        mine = {name: list(place) for name, place in places.items() if place is not None}
        rows = gather(peers, mine)
        self.masks = {name for name, places in mine.items() if all(row.get(name) == places for row in rows)}

    def buffers(self) -> list[Item]:
        """Buffers to average."""
        return _buffer_items(self._module, self._buffers, self._ignored)

    def groups(self) -> list[tuple[list[str], Any]]:
        """The optimizer's groups: the names of their parameters, and their learning rates."""
        names = {id(p): name for name, p in self.params().items()}
        return [
            ([names[id(p)] for p in group["params"] if id(p) in names], group.get("lr"))
            for group in self.optimizer.param_groups
        ]

    def inner_options(self) -> dict[str, str]:
        """The options of the optimizer's groups that should be the same on every rank, in words."""
        defaults = self.optimizer.defaults
        return {
            f"{key!r} of group {i}": _in_words(group[key])
            for i, group in enumerate(self.optimizer.param_groups)
            for key in defaults
            if isinstance(group.get(key), (bool, int, float, str, tuple, Tensor))
        }

    def state_items(self) -> list[Item]:
        """Optimizer state to average."""
        return [Item(*pair) for pair in tensors_to_average(self.optimizer, self._state, self.params())]

    def keys_of_state(self) -> dict[str, Any]:
        """Which keys of the state policy the optimizer's state has; see :func:`keys_of_state`."""
        return keys_of_state(self.optimizer, self._state)

    def digest(self, items: list[Item]) -> str:
        """A string that is equal on two ranks if their items are."""
        return self._digest.of(items)

    def digest_of_state(self, items: list[Item]) -> str:
        """The same for :meth:`state_items`."""
        return self._state_digest.of(items)

    def mark_trained(self) -> None:
        """Include the parameters that have ``requires_grad`` now in all averages from now on."""
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        now = list(map(id, trained))
        if now != self._trained:
            self._trained = now
            for p in trained:
                self._ever[p] = True

    def reset_state(self) -> None:
        """After an average: reset state where the policy says so."""
        reset_state(self.optimizer, self._state)

    @torch.no_grad()
    def mend_state(self) -> None:
        """Set numbers of the optimizer's state that are not finite to zero, after parameters were taken over."""
        for entry in self.optimizer.state.values():
            for value in entry.values() if isinstance(entry, dict) else ():
                if isinstance(value, Tensor) and value.is_floating_point():
                    part = local(value)
                    part.copy_(part.nan_to_num(0.0, 0.0, 0.0))

    def averaged(self) -> list[int]:
        """The positions of parameters that have been averaged, for a checkpoint."""
        return [i for i, p in enumerate(self._all()) if p in self._ever]

    def load_averaged(self, places: list[int]) -> None:
        """Load what :meth:`averaged` returned, in place of what there is."""
        params = self._all()
        self._ever, self._trained = _torch.weak_table(), []
        for i in places:
            if i < len(params):
                self._ever[params[i]] = True

    def _all(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def check_buffers(buffers: str) -> None:
    """Raise if this is not a policy for buffers."""
    if buffers not in BUFFERS:
        raise ValueError(f"buffers must be one of {', '.join(map(repr, BUFFERS))}, but got {buffers!r}")


def describe(items: Sequence[Item]) -> list[tuple[str, str]]:
    """For each item its name and a description, which must be the same on every rank."""
    return [(item.name, _form(item)) for item in items]


def digest(items: Sequence[Item]) -> str:
    """A hash of the names and descriptions of items."""
    hashed: Any = hashlib.sha256()
    for name, form in describe(items):
        hashed.update(f"{name}\0{form}\0".encode())
    return str(hashed.hexdigest()[:32])


class CachedDigest:
    """The :func:`digest` of items, made again only if they have changed."""

    def __init__(self) -> None:
        self._key: Any = None
        self._digest = ""

    def of(self, items: Sequence[Item]) -> str:
        """The digest of these items."""
        key = [
            (item.name, item.how, item.tensor.shape, item.tensor.dtype, item.tensor.device, item.tensor.stride())
            for item in items
        ]
        if key != self._key:
            self._key, self._digest = key, digest(items)
        return self._digest


def _form(item: Item) -> str:
    tensor = item.tensor
    words = f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
    if tensor.device.type != "cpu":
        words += f" on {tensor.device.type}"
    if is_dtensor(tensor):
        shape, offset = shard_place(tensor)
        words += f", shard {shape} at {offset}"
    strides = local_part(tensor).stride()
    if strides != _row_major(local_part(tensor)):
        words += f" with strides {tuple(strides)}"
    return words if item.how == MEAN else f"{words} ({item.how})"


def _row_major(tensor: Tensor) -> tuple[int, ...]:
    strides, size = [], 1
    for length in reversed(tensor.shape):
        strides.append(size)
        size *= max(length, 1)
    return tuple(reversed(strides))


def _buffer_items(module: torch.nn.Module, policy: str, skip: Any = ()) -> list[Item]:
    """The module's persistent buffers to exchange. Integer buffers take the first rank's value."""
    if policy == "keep":
        return []
    items, seen = [], set()
    for prefix, part in module.named_modules():
        for key, buffer in persistent_buffers(part):
            name = f"{prefix}.{key}" if prefix else key
            if name in skip or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            number = buffer.is_floating_point() or buffer.is_complex()
            how = MEAN if policy == "average" and number else FIRST
            # num_batches_tracked keeps counting during a delayed round, so the difference is added to it.
            items.append(Item(f"buffer {name!r}", buffer, how, late=key == "num_batches_tracked"))
    return items


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(float(value)) if value.numel() == 1 else f"a tensor of {value.numel()} elements"
    return str(value)


def _has_plain_values(p: Tensor) -> bool:
    """Whether a frozen parameter can be compared: quantized, sparse and meta tensors, and other subclasses, cannot."""
    plain = p.layout is torch.strided and not p.is_quantized and p.device.type != "meta"
    return plain and (is_plain(p) or is_dtensor(p))


def _infinite_places(buffer: Tensor) -> tuple[int, int] | None:
    """The number of infinite numbers and a sum over their places; None if there are none."""
    part = local(buffer)
    if not part.is_floating_point() or not bool(part.isinf().any()):
        return None
    places = part.isinf().flatten().nonzero().flatten() + 1
    return len(places), int((places * part.flatten()[places - 1].sign().long()).sum())
