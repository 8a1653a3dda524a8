"""Nested values as JSON: what JSON lacks has a tag, and a tensor is a reference to where its bytes are."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from offbeat.checkpoint.errors import CheckpointError
from offbeat.checkpoint.tensors import DTYPES

__all__ = ["Place", "decode", "encode", "place_name"]

#: The keys that lead to a value.
Place: TypeAlias = tuple[Any, ...]

#: The key that marks a tagged value.
_TAG = "$"
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


def encode(value: Any, put: Callable[[Place, Tensor], str], place: Place = ()) -> Any:
    """A value as JSON can hold it.

    Args:
        value: nested dictionaries, lists, tuples, numbers, strings, None, dtypes, sizes, devices, and tensors.
        put: called with each tensor; returns the name that it has in the checkpoint.
        place: where the value is.

    Raises:
        CheckpointError: a value is of another kind. The message names its place.
    """
    if value is None or (isinstance(value, (bool, str)) and type(value) in (bool, str)):
        return value
    if type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
    if isinstance(value, complex):
        return {_TAG: "complex", "value": [encode(part, put, place) for part in (value.real, value.imag)]}
    if isinstance(value, Tensor):
        return {_TAG: "tensor", "value": put(place, value)}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_TAG: "device", "value": str(value)}
    if type(value) in (list, tuple, torch.Size):
        items = [encode(item, put, (*place, i)) for i, item in enumerate(value)]
        return items if type(value) is list else {_TAG: "tuple" if type(value) is tuple else "size", "value": items}
    kind = _MAPPINGS.get(type(value))
    if kind == "dict" and _TAG not in value and all(type(key) is str for key in value):
        return {key: encode(item, put, (*place, key)) for key, item in value.items()}
    if kind is not None:
        items = [[encode(key, put, place), encode(item, put, (*place, key))] for key, item in value.items()]
        return {_TAG: kind, "value": items}
    raise CheckpointError(
        f"{place_name(place)} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
        "hold; it holds dicts, lists, tuples, numbers, strings, None, dtypes, devices and tensors. Convert it "
        "(.item(), .tolist(), torch.as_tensor), or leave it out"
    )


def decode(value: Any, take: Callable[[Place, str], Any], place: Place = ()) -> Any:
    """The value that :func:`encode` was given.

    Args:
        value: what it returned.
        take: called with the place and the name of each tensor; returns what is to be there.
        place: where the value is.

    Raises:
        ValueError, TypeError, KeyError: this was not made by :func:`encode`.
    """
    if isinstance(value, list):
        return [decode(item, take, (*place, i)) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(item, take, (*place, key)) for key, item in value.items()}
    kind, content = value[_TAG], value["value"]
    if kind == "tensor":
        return take(place, content)
    if kind == "float":
        return float({"inf": "inf", "-inf": "-inf", "nan": "nan"}[content])
    if kind == "complex":
        real, imaginary = content
        return complex(decode(real, take), decode(imaginary, take))
    if kind == "dtype":
        return DTYPES[content] if content in DTYPES else _other_dtype(content)
    if kind == "device":
        return torch.device(content)
    if kind == "tuple":
        return tuple(decode(item, take, (*place, i)) for i, item in enumerate(content))
    if kind == "size":
        return torch.Size(content)
    cls = {name: cls for cls, name in _MAPPINGS.items()}[kind]
    result = cls()
    for key, item in content:
        key = decode(key, take, place)
        result[key] = decode(item, take, (*place, key))
    return result


def _other_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}")
    return dtype


def place_name(place: Place) -> str:
    """A place in words, such as ``optimizer/state/0.weight/exp_avg``."""
    return "/".join(str(key).replace("%", "%25").replace("/", "%2F") for key in place)
