"""The memory addresses of many tensors, read and checked in one call.

A compiled kernel works on addresses. An address is valid only while the tensor has the same dtype, shape, strides and
device, enough memory, and is plain, so that its memory holds its values. Python needs about a microsecond to check a
tensor; the compiled reader needs a few hundredths of a microsecond.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from offbeat._torch import is_zero_tensor, local_tensor, spec_of
from offbeat.engine.reader import compiled_reader, shapes_of
from offbeat.engine.tensors import PLAIN

#: The compiled reader returns this for a distributed gradient whose specification it has not seen before.
UNKNOWN = -2


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
        #: The addresses of parameters, of gradients (0: no gradient), then of each column of state.
        self.tables = [array("q", bytes(8 * len(self.columns[0]))) for _ in range(len(columns) + 1)]
        self._pinned_places = [t.data_ptr() for t in self.pinned]
        self._device = self.columns[0][0].device
        self._dtypes = [column[0].dtype for column in self.columns]
        self._shapes = [(p.shape, p.stride(), p.numel()) for p in self.columns[0]]
        # Specifications are compared by identity. Those of gradients are learnt from the first gradients.
        self._specs: list[Any] = [spec_of(w) for w in self.wrappers or []]
        self._gradient_specs: list[Any] = [None] * len(self._specs)
        self._request = (
            self.columns, self.tables, shapes_of(self.columns[0]), self._dtypes, self._device,
            self.pinned, array("q", self._pinned_places), self.wrappers, self._specs, self._gradient_specs,
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
        else:
            columns = [*self.columns, *([] if self.wrappers is None else [self.wrappers])]
            rows = range(len(self.columns[0])) if active is None else active
            increment_version([column[i] for column in columns for i in rows])

    def _checked_gradients(self, params: Sequence[Any], grads: Sequence[Any] | None) -> Sequence[Any] | None:
        """The gradients or their local tensors. None if the parameters are not the book's, or a pinned tensor moved."""
        mine = self.columns[0] if self.wrappers is None else self.wrappers
        if len(params) != len(mine) or not all(map(is_, params, mine)) or not self._pinned_stayed():
            return None
        gradients: Sequence[Any] | None = [p.grad for p in params] if grads is None else grads
        gradients = gradients if self.wrappers is None else self._local_gradients(params, grads)
        return None if gradients is None or len(gradients) != len(params) else gradients

    def _pinned_stayed(self) -> bool:
        try:
            for t, place in zip(self.pinned, self._pinned_places, strict=True):
                if t.data_ptr() != place or type(t) not in PLAIN:
                    return False
        except RuntimeError:  # a tensor has no address
            return False
        return True

    def _read_in_python(self, params: Sequence[Any], grads: Sequence[Any] | None) -> int | None:
        gradients = self._checked_gradients(params, grads)
        if gradients is None:
            return None
        for (column, table), dtype in zip(self._column_tables(), self._dtypes, strict=True):
            if not self._fill(table, column, dtype):
                return None
        table = self.tables[1]
        if not self._fill(table, gradients, self._dtypes[0]):
            return None
        count = 0
        for i, g in enumerate(gradients):
            if g is not None:
                count += 1
                table[i] = table[i] or 1  # an empty gradient has no address, and 0 would mean that there is none
        return count

    def _fill(self, table: array[int], tensors: Sequence[Any], dtype: torch.dtype) -> bool:
        """Write the addresses of tensors into a table (0 for empty ones and for None). False if one has changed."""
        device, itemsize, may_be_conjugate = self._device, dtype.itemsize, dtype.is_complex
        i = -1
        try:
            for t, (shape, strides, numel) in zip(tensors, self._shapes, strict=True):
                i += 1
                table[i] = 0
                if t is None:
                    continue
                if type(t) not in PLAIN or t.dtype is not dtype or t.shape != shape or t.device != device:
                    return False
                if t.layout is not torch.strided or not (
                    t.stride() == strides or _same_strides(shape, t.stride(), strides)
                ):
                    return False
                if t.is_neg() or is_zero_tensor(t) or t.is_inference() or (may_be_conjugate and t.is_conj()):
                    return False
                if numel:
                    table[i] = place = t.data_ptr()
                    # The storage may have been freed or shrunk although the tensor has its shape.
                    end = (t.storage_offset() + numel) * itemsize
                    if not place or end > t.untyped_storage().nbytes():
                        return False
        except RuntimeError:  # a tensor has no address
            return False
        return True

    def check(self, params: Sequence[Any], grads: Sequence[Any], *, strides: bool) -> int | None:
        """Like :meth:`read`, for tiers that work on tensors and need no addresses.

        Args:
            strides: whether the tensors must have the same strides as before.
        """
        self._compiled = self._compiled or compiled_reader(self._device)
        if self._compiled is not None:
            return self.read(params, grads)
        gradients = self._checked_gradients(params, grads)
        if gradients is None:
            return None
        device, tables = self._device, [self.tables[0], *self.tables[2:]]
        try:
            for column, table, dtype in zip(self.columns, tables, self._dtypes, strict=True):
                for i, t in enumerate(column):
                    shape, stride, numel = self._shapes[i]
                    if t.dtype is not dtype or t.shape != shape:
                        return None
                    if strides and t.stride() != stride and not _same_strides(shape, t.stride(), stride):
                        return None
                    # Memory that has been freed or shrunk since the last step is not where it was.
                    place = t.data_ptr()
                    if place != table[i] or not place:
                        if t.device != device or not _has_memory(t, numel):
                            return None
                        table[i] = place
            return self._count_gradients(gradients, strides)
        except RuntimeError:  # a tensor has no address
            return None

    def _count_gradients(self, gradients: Sequence[Any], strides: bool) -> int | None:
        device, dtype, table, count = self._device, self._dtypes[0], self.tables[1], 0
        for i, g in enumerate(gradients):
            if g is None:
                continue
            count += 1
            shape, stride, numel = self._shapes[i]
            if type(g) not in PLAIN or g.dtype is not dtype or g.shape != shape or g.is_neg() or is_zero_tensor(g):
                return None
            if strides and g.stride() != stride and not _same_strides(shape, g.stride(), stride):
                return None
            place = g.data_ptr()
            if place != table[i] or not place:
                if g.device != device or not _has_memory(g, numel):
                    return None
                table[i] = place
        return count

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
                if not _cut_alike(spec, self._specs[i]):
                    return None
                self._gradient_specs[i] = spec
            gradients.append(local_tensor(g))
        return gradients


def _same_strides(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    return a == b or all(x == y for size, x, y in zip(shape, a, b, strict=True) if size != 1)


def _has_memory(t: Tensor, numel: int) -> bool:
    """Whether a tensor is plain, and its storage has not been freed or shrunk."""
    if type(t) not in PLAIN or t.layout is not torch.strided:
        return False
    end = (t.storage_offset() + numel) * t.itemsize
    return not numel or (t.data_ptr() != 0 and end <= t.untyped_storage().nbytes())


def _cut_alike(a: Any, b: Any) -> bool:
    return bool(a.placements == b.placements and a.mesh == b.mesh)
