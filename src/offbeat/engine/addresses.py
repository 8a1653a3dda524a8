"""Where many tensors lie, read and checked in one go.

A compiled kernel works on addresses, and an address is only good if the tensor behind it is still what it was: same
dtype, shape, strides and device, with memory enough, and plain, so that its memory holds its values. Python needs a few
microseconds to check one tensor; the compiled reader needs a few hundredths of a microsecond.
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
from offbeat.engine.tensors import is_plain

#: What the compiled reader returns if a distributed gradient's specification is new to it.
UNKNOWN = -2


class AddressBook:
    """The addresses of columns of tensors: parameters first, then their state. The tensors' objects stay the same.

    All tensors are plain, dense and on one device; those in one column have the same dtype, those in one row the same
    shape and layout. ``pinned`` are further tensors that must stay where they are. ``wrappers`` are distributed tensors
    whose local parts the parameters are; gradients are distributed then too, cut as they are.
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
        #: Of parameters, gradients (0: there is none), then of each column of state.
        self.tables = [array("q", bytes(8 * len(self.columns[0]))) for _ in range(len(columns) + 1)]
        self._pinned_at = array("q", [t.data_ptr() for t in self.pinned])
        self._device = self.columns[0][0].device
        self._dtypes = [column[0].dtype for column in self.columns]
        self._shapes = [(p.shape, p.stride(), p.numel()) for p in self.columns[0]]
        # Specifications are recognised by being the same objects. Those of gradients are learnt from the gradients.
        self._specs: list[Any] = [spec_of(w) for w in self.wrappers or []]
        self._gradient_specs: list[Any] = [None] * len(self._specs)
        self._request = (
            self.columns, self.tables, shapes_of(self.columns[0]), self._dtypes, self._device,
            self.pinned, self._pinned_at, self.wrappers, self._specs, self._gradient_specs,
        )  # fmt: skip
        self._compiled = compiled_reader(self._device)

    def fill(self, grads: Sequence[Tensor | None]) -> None:
        """Set :attr:`tables` for gradients that have been checked, as the columns have been."""
        # An empty gradient has no address, but it is there.
        self.tables[1][:] = array("q", [0 if g is None else g.data_ptr() or 1 for g in grads])
        for column, table in self._column_tables():
            table[:] = array("q", [t.data_ptr() for t in column])

    def _column_tables(self) -> Iterator[tuple[list[Tensor], array[int]]]:
        return zip(self.columns, [self.tables[0], *self.tables[2:]], strict=True)

    def read(self, params: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> int | None:
        """Bring :attr:`tables` up to date.

        Args:
            params: must be this book's parameters, in its order.
            grads: their gradients; None reads them from ``.grad``.

        Returns:
            How many gradients there are, or None if a tensor is not as it was; the tables are of no use then.
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
        """Tell autograd that the rows read last (``active``: only these, those with a gradient) are written."""
        if self._compiled is not None:
            self._compiled.bump(self.columns, self.tables[1], self.wrappers)
        else:
            columns = [*self.columns, *([] if self.wrappers is None else [self.wrappers])]
            rows = range(len(self.columns[0])) if active is None else active
            increment_version([column[i] for column in columns for i in rows])

    def _read_in_python(self, params: Sequence[Any], grads: Sequence[Any] | None) -> int | None:
        mine = self.columns[0] if self.wrappers is None else self.wrappers
        if len(params) != len(mine) or not all(map(is_, params, mine)):
            return None
        if list(map(_place, self.pinned)) != self._pinned_at.tolist():
            return None
        gradients: Sequence[Any] | None = [p.grad for p in params] if grads is None else grads
        gradients = gradients if self.wrappers is None else self._local_gradients(params, grads)
        if gradients is None or len(gradients) != len(params):
            return None
        for c, (column, table) in enumerate(self._column_tables()):
            for i, t in enumerate(column):
                address = self._address(c, i, t)
                if address is None:
                    return None
                table[i] = address
        count = 0
        for i, g in enumerate(gradients):
            address = 0 if g is None else self._address(0, i, g)
            if address is None:
                return None
            self.tables[1][i] = 0 if g is None else address or 1  # an empty tensor lies nowhere, but it is there
            count += g is not None
        return count

    def _local_gradients(self, params: Sequence[Any], grads: Sequence[Any] | None) -> list[Any] | None:
        """The local parts of gradients that are cut as their parameters, and None if any is not.

        The specifications of these gradients are recognised from now on.
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

    def _address(self, column: int, row: int, t: Any) -> int | None:
        """Where a tensor lies (an empty one: 0), or None if it is not what is expected there."""
        dtype = self._dtypes[column]
        if not is_plain(t) or t.dtype is not dtype or t.device != self._device:
            return None
        shape, strides, numel = self._shapes[row]
        try:
            if t.layout is not torch.strided or t.shape != shape or not _same_strides(shape, t.stride(), strides):
                return None
            if t.is_neg() or is_zero_tensor(t) or t.is_inference() or (dtype.is_complex and t.is_conj()):
                return None
            place = t.data_ptr()
            # The storage may have been freed or shrunk while the tensor kept its shape.
            end = (t.storage_offset() + numel) * dtype.itemsize
            if numel and (not place or end > t.untyped_storage().nbytes()):
                return None
        except RuntimeError:  # the tensor has no address
            return None
        return place if numel else 0


def _same_strides(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    return a == b or all(x == y for size, x, y in zip(shape, a, b, strict=True) if size != 1)


def _place(t: Tensor) -> int | None:
    try:
        return t.data_ptr() if is_plain(t) else None
    except RuntimeError:  # the tensor has no memory of its own
        return None


def _cut_alike(a: Any, b: Any) -> bool:
    return bool(a.placements == b.placements and a.mesh == b.mesh)
