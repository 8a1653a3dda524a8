"""The memory addresses of many tensors, read and checked in one call.

A compiled kernel works on addresses. An address is valid only while the tensor has the same dtype, shape, strides and
device, enough memory, and is plain, so that its memory holds its values. ``cpu/reader.cpp`` checks all of it for every
tensor at every step. Until it is compiled Python does, and saves time: a parameter or state tensor that has not moved
since it was checked is not checked again, except for the dtype, shape and strides of parameters. Gradients always are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import add, attrgetter, is_, le, mul
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from offbeat._torch import is_zero_tensor, local_tensor, spec_of
from offbeat.engine.cpu.reader import compiled_reader, shapes_of
from offbeat.engine.tensors import PLAIN

#: The compiled reader returns this for a distributed gradient whose specification it has not seen before.
UNKNOWN = -2

_PLAIN_TYPES = frozenset(PLAIN)
_kind_of = attrgetter("dtype", "device", "layout")
_dtype_of = attrgetter("dtype")
_shape_of = attrgetter("shape")
#: What is true of a tensor whose memory does not simply hold its values.
_IS_ODD = (Tensor.is_neg, is_zero_tensor, Tensor.is_inference)


class AddressBook:
    """The addresses of columns of tensors: parameters first, then their state. The tensor objects stay the same.

    All tensors are plain, dense and on one device. Tensors in one column have the same dtype; tensors in one row have
    the same shape and strides. ``pinned`` are further tensors that must keep their addresses. ``wrappers`` are DTensors
    whose local tensors are the parameters; their gradients are then DTensors with the same placements.
    """

    def __init__(
        self,
        columns: Sequence[Sequence[Tensor]],
        pinned: Sequence[Sequence[Tensor]] = (),
        wrappers: Sequence[Any] | None = None,
    ) -> None:
        self.columns = [list(column) for column in columns]
        self.wrappers = None if wrappers is None else list(wrappers)
        self.pinned = [t for column in pinned for t in column]
        params = self.columns[0]
        #: The addresses of parameters, of gradients (0: no gradient), then of each column of state.
        self.tables = [array("q", bytes(8 * len(params))) for _ in range(len(columns) + 1)]
        self._pinned_addresses = [t.data_ptr() for t in self.pinned]
        self._device = params[0].device
        self._dtypes = [column[0].dtype for column in self.columns]
        self._shapes, self._strides = [p.shape for p in params], [p.stride() for p in params]
        # The addresses at which Python has checked the tensors of each column.
        self._checked: list[list[int]] = [[] for _ in columns]
        # Specifications are compared by identity. Those of gradients are learnt from the first gradients.
        self._specs: list[Any] = [spec_of(w) for w in self.wrappers or []]
        self._gradient_specs: list[Any] = [None] * len(self._specs)
        self._request = (
            self.columns, self.tables, shapes_of(params), self._dtypes, self._device,
            self.pinned, array("q", self._pinned_addresses), self.wrappers, self._specs, self._gradient_specs,
        )  # fmt: skip
        self._compiled = compiled_reader(self._device)

    def fill(self, grads: Sequence[Tensor | None]) -> None:
        """Set :attr:`tables` for gradients that have already been checked, like the columns."""
        # An empty gradient has no address, but 0 would mean that there is none.
        self.tables[1][:] = array("q", [0 if g is None else g.data_ptr() or 1 for g in grads])
        for column, table in self._column_tables():
            table[:] = array("q", [t.data_ptr() for t in column])

    def _column_tables(self) -> Iterator[tuple[list[Tensor], array[int]]]:
        return zip(self.columns, [self.tables[0], *self.tables[2:]], strict=True)

    def read(self, params: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> int | None:
        """Update :attr:`tables`.

        Args:
            params: must be this book's parameters, in its order.
            grads: their gradients; None reads them from ``.grad``.

        Returns:
            The number of gradients, or None if a tensor has changed; the tables are invalid then.
        """
        self._compiled = self._compiled or compiled_reader(self._device)
        if self._compiled is None:
            return self._read_in_python(params, grads)
        params = params if type(params) is list else list(params)
        grads = grads if grads is None or type(grads) is list else list(grads)
        count: int = self._compiled.read(params, grads, *self._request)
        if count == UNKNOWN and self._local_gradients(params, grads) is not None:
            count = self._compiled.read(params, grads, *self._request)
        return None if count < 0 else count

    def bump(self, active: Sequence[int] | None) -> None:
        """Tell autograd that the tensors of these rows were written; None for all rows."""
        if self._compiled is not None:
            self._compiled.bump(self.columns, self.tables[1], self.wrappers)
            return
        for column in self.columns if self.wrappers is None else [*self.columns, self.wrappers]:
            increment_version(column if active is None else [column[i] for i in active])

    # Reading in Python.

    def _read_in_python(self, params: Sequence[Any], grads: Sequence[Any] | None) -> int | None:
        owners = self.columns[0] if self.wrappers is None else self.wrappers
        if len(params) != len(owners) or not all(map(is_, params, owners)):
            return None
        try:
            if self.wrappers is not None:
                gradients = self._local_gradients(params, grads)
            else:
                gradients = [p.grad for p in params] if grads is None else list(grads)
            if gradients is None or len(gradients) != len(params) or not self._read_columns():
                return None
            return self._read_gradients(gradients)
        except RuntimeError:  # a tensor has no address
            return None

    def _read_columns(self) -> bool:
        """Update the tables of the columns. False if a tensor has changed, or a pinned one has moved."""
        if not _are_plain(self.pinned) or list(map(Tensor.data_ptr, self.pinned)) != self._pinned_addresses:
            return False
        params = self.columns[0]
        if {self._dtypes[0]} != set(map(_dtype_of, params)) or list(map(_shape_of, params)) != self._shapes:
            return False
        if not _have_strides(params, self._strides):
            return False
        for c, (column, table) in enumerate(self._column_tables()):
            addresses = list(map(Tensor.data_ptr, column))
            if addresses != self._checked[c]:
                if not self._fit(column, addresses, self._dtypes[c], self._shapes, self._strides):
                    return False
                self._checked[c] = addresses
            table[:] = array("q", addresses)
        return True

    def _read_gradients(self, gradients: Sequence[Any]) -> int | None:
        """Update the table of the gradients, and return how many there are. None if one does not fit."""
        rows = [i for i, g in enumerate(gradients) if g is not None]
        shapes, strides = self._shapes, self._strides
        if len(rows) < len(shapes):
            gradients = [gradients[i] for i in rows]
            shapes, strides = [shapes[i] for i in rows], [strides[i] for i in rows]
        if not _are_plain(gradients):  # the rest can be asked only of tensors
            return None
        addresses = list(map(Tensor.data_ptr, gradients))
        if not self._fit(gradients, addresses, self._dtypes[0], shapes, strides):
            return None
        if 0 in addresses:  # an empty gradient has no address, and 0 would mean that there is none
            addresses = [address or 1 for address in addresses]
        table = self.tables[1]
        if len(rows) < len(table):
            table[:] = array("q", bytes(8 * len(table)))
            for i, address in zip(rows, addresses, strict=True):
                table[i] = address
        else:
            table[:] = array("q", addresses)
        return len(rows)

    def _fit(
        self,
        tensors: Sequence[Any],
        addresses: list[int],
        dtype: torch.dtype,
        shapes: list[torch.Size],
        strides: list[tuple[int, ...]],
    ) -> bool:
        """Return whether the memory of these tensors simply holds their values, in this dtype, shape and order."""
        if not _are_plain(tensors) or list(map(_shape_of, tensors)) != shapes or not _have_strides(tensors, strides):
            return False
        if not {(dtype, self._device, torch.strided)}.issuperset(map(_kind_of, tensors)):
            return False
        if any(True in map(is_odd, tensors) for is_odd in (*_IS_ODD, *([Tensor.is_conj] if dtype.is_complex else []))):
            return False
        # Somebody may have freed or shrunk the memory without the tensor's knowledge.
        ends = map(
            mul, map(add, map(Tensor.numel, tensors), map(Tensor.storage_offset, tensors)), repeat(dtype.itemsize)
        )
        sizes = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, tensors))
        return all(map(le, ends, sizes)) and (0 not in addresses or not any(map(_is_freed, tensors)))

    def _local_gradients(self, params: Sequence[Any], grads: Sequence[Any] | None) -> list[Any] | None:
        """The local tensors of the gradients; None if one does not have the placements of its parameter.

        Remembers the specifications of these gradients.
        """
        gradients: list[Any] = []
        for i, (p, g) in enumerate(zip(params, [p.grad for p in params] if grads is None else grads, strict=False)):
            if local_tensor(p) is not self.columns[0][i] or spec_of(p) is not self._specs[i]:
                return None
            if g is None:
                gradients.append(None)
                continue
            if type(g) is not type(p):
                return None
            spec = spec_of(g)
            if spec is not self._gradient_specs[i]:
                if not (spec.placements == self._specs[i].placements and spec.mesh == self._specs[i].mesh):
                    return None
                self._gradient_specs[i] = spec
            gradients.append(local_tensor(g))
        return gradients


def _is_freed(t: Tensor) -> bool:
    return t.numel() > 0 and t.data_ptr() == 0


def _are_plain(tensors: Sequence[Any]) -> bool:
    return _PLAIN_TYPES.issuperset(map(type, tensors))


def _have_strides(tensors: Sequence[Tensor], strides: list[tuple[int, ...]]) -> bool:
    """Return whether tensors of the right shapes have these strides. Those of dimensions of size 1 do not matter."""
    return list(map(Tensor.stride, tensors)) == strides or all(
        x == y
        for t, there in zip(tensors, strides, strict=True)
        for size, x, y in zip(t.shape, t.stride(), there, strict=True)
        if size != 1
    )
