"""``split_parameters``: the hidden matrices of a module, and all other parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from torch import Tensor

__all__ = ["Split", "split_parameters"]

#: Names that models give to their embeddings and to their last layer.
_EMBEDDINGS = ("*embed*", "*wte*", "*wpe*", "*pos_emb*", "*cls_token*")
_HEADS = (
    "*head*",
    "*classifier*",
    "*output_layer*",
    "output.*",
    "*.output.*",
    "*unembed*",
    "score.*",
    "*.score.*",
    "fc.*",
)

_REASONS = {
    "matrix": "a hidden matrix",
    "stack": "a stack of matrices",
    "vector": "a vector or a number",
    "many": "more than three dimensions",
    "embedding": "an embedding",
    "head": "a head",
    "asked": "asked for",
}


@dataclass(frozen=True)
class Split:
    """The result of :func:`split_parameters`.

    Attributes:
        matrices: the parameters for Muon.
        rest: all other parameters.
        reasons: for each parameter name, what the parameter was classified as.
    """

    matrices: list[Tensor]
    rest: list[Tensor]
    reasons: dict[str, str]
    _shapes: dict[str, tuple[int, ...]]
    _matrix_names: frozenset[str]

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter((self.matrices, self.rest))

    @property
    def report(self) -> str:
        """A table of all parameters, with the reason for each."""
        width = max([len(name) for name in self.reasons], default=0)
        sizes = {name: "x".join(map(str, shape)) or "1" for name, shape in self._shapes.items()}
        across = max([len(size) for size in sizes.values()], default=0)
        lines = []
        for title, inside in (("matrices", True), ("rest", False)):
            names = [name for name in self.reasons if (name in self._matrix_names) is inside]
            count = sum(torch.Size(self._shapes[name]).numel() for name in names)
            lines.append(f"{title}: {len(names)} tensors, {count:,} numbers")
            lines += [f"  {name:<{width}}  {sizes[name]:>{across}}  {self.reasons[name]}" for name in names]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.report


def split_parameters(module: torch.nn.Module, *, heads: Sequence[str] | None = None, rest: Sequence[str] = ()) -> Split:
    """Split a module's parameters for Muon: hidden matrices, and everything else.

    Hidden matrices are parameters with two dimensions, or three (stacked experts), that are neither embeddings nor
    heads. A parameter is an embedding if it belongs to ``nn.Embedding`` or ``nn.EmbeddingBag`` (even if another layer
    shares it), or if its name matches a known pattern. It is a head if its name matches a known pattern. If no name
    does and no layer shares an embedding, the last ``nn.Linear`` is the head. Check ``report``: it lists how each
    parameter was classified.

    Args:
        module: the module.
        heads: a list of patterns (as in :mod:`fnmatch`) of the names of heads; they are guessed if it is None.
        rest: a list of patterns of names of further parameters that are not hidden matrices.

    Example:
        >>> import torch, offbeat
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))
        >>> split = offbeat.split_parameters(model)
        >>> print(split.report)
        matrices: 1 tensors, 16 numbers
          1.weight  4x4  a hidden matrix
        rest: 4 tensors, 85 numbers
          0.weight  9x4  an embedding
          1.bias      4  a vector or a number
          2.weight  9x4  a head
          2.bias      9  a vector or a number
        >>> optimizer = offbeat.Chain([offbeat.Muon(split.matrices), offbeat.AdamW(split.rest)])

    Limits: parameters that do not require gradients are left out. Convolutions have four dimensions and go to the rest.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"split_parameters takes a module, but got {type(module).__name__}; pass the model itself")
    embeddings = {
        id(p)
        for part in module.modules()
        if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        for p in part.parameters(recurse=False)
    }
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    for argument, patterns in (("heads", heads), ("rest", rest)):
        _check_patterns(argument, patterns, [name for name, _ in named])
    last = None if heads is not None else _last_linear(module, named, embeddings)
    reasons: dict[str, str] = {}
    for name, p in named:
        if _matches(name, rest):
            kind = "asked"
        elif p.dim() < 2:
            kind = "vector"
        elif id(p) in embeddings or _matches(name, _EMBEDDINGS):
            kind = "embedding"
        elif _matches(name, _HEADS if heads is None else heads) or (p is last):
            kind = "head"
        elif p.dim() > 3:
            kind = "many"
        else:
            kind = "matrix" if p.dim() == 2 else "stack"
        reasons[name] = _REASONS[kind]
    hidden = frozenset(name for name, why in reasons.items() if why in (_REASONS["matrix"], _REASONS["stack"]))
    return Split(
        [p for name, p in named if name in hidden],
        [p for name, p in named if name not in hidden],
        reasons,
        {name: tuple(p.shape) for name, p in named},
        hidden,
    )


def _check_patterns(argument: str, patterns: Sequence[str] | None, names: Sequence[str]) -> None:
    if isinstance(patterns, str):
        raise TypeError(f"{argument} must be a list of patterns, but got {patterns!r}; pass [{patterns!r}]")
    for pattern in patterns or ():
        if not any(fnmatch(name, pattern) for name in names):
            raise ValueError(
                f"{argument}: no parameter that requires gradients has a name like {pattern!r}; names are such as "
                f"{', '.join(map(repr, names[:3]))}"
            )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _last_linear(module: torch.nn.Module, named: Sequence[tuple[str, Tensor]], embeddings: set[int]) -> Tensor | None:
    """The weight of the last linear layer, unless a head is known by its name or shares an embedding."""
    if any(_matches(name, _HEADS) for name, p in named if p.dim() == 2):
        return None
    linear = [part.weight for part in module.modules() if isinstance(part, torch.nn.Linear)]
    if not linear or any(id(weight) in embeddings for weight in linear):
        return None
    return linear[-1]
