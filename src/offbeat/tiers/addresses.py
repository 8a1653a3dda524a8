"""Where many tensors lie, read and checked in one go.

A compiled kernel works on addresses, and an address is only good if the tensor behind it is still what it was: same
dtype, shape, strides and storage, and plain, so that its memory holds its values. Asking from Python costs some
microseconds a tensor; with a compiler at hand a small C function asks torch's stable C interface instead. A few things
that interface does not offer are read at offsets measured on tensors that are known to differ there; where that does
not work out, Python asks.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from offbeat.tiers.addresses_source import SOURCE
from offbeat.tiers.compiler import CompilerError, load, why_no_compiler
from offbeat.tiers.layout import same_layout

__all__ = ["AddressBook", "unwrap"]


#: What the C function returns if a distributed gradient's specification is new to it.
UNKNOWN = -2
#: The size of what it remembers of a tensor, in words: see ``struct look`` there.
LOOK_WORDS = 1 + 24 + 7 + 2
#: Where a request has the type of distributed gradients.
_WRAPPER_TYPE = 12

#: Below this many tensors a second thread costs more than it brings.
ROWS_A_THREAD = 256


class AddressBook:
    """The addresses of columns of tensors: parameters first, then their state. The tensors' objects stay the same.

    All tensors are plain, dense and on one device; those in one row have the same shape and layout. ``pinned`` are
    further tensors that must stay where they are. ``wrappers`` are distributed tensors whose local parts the parameters
    are; gradients are distributed then too, cut as they are.
    """

    def __init__(
        self,
        columns: Sequence[Sequence[Tensor]],
        pinned: Sequence[Sequence[Tensor]] = (),
        wrappers: Sequence[Any] | None = None,
    ) -> None:
        self.wrappers = None if wrappers is None else list(wrappers)
        self.pinned = [t for column in pinned for t in column]
        self._pinned_at = array("q", [t.data_ptr() for t in self.pinned])
        self.columns = [list(column) for column in columns]
        rows = len(self.columns[0])
        self.tables = [array("q", bytes(8 * rows)) for _ in range(len(columns) + 1)]
        self._expected = [[_kind(t) for t in column] for column in self.columns]
        self._reader = _reader()
        layout = (0, 0) if wrappers is None else _wrapper_layout(wrappers)
        if layout is None:
            self._reader = None
        if self._reader is not None:
            assert layout is not None
            read, offset = self._reader
            self._handles = [array("q", [id(t) + offset for t in column]) for column in self.columns]
            self._metadata = array("q")
            starts = []
            for p in self.columns[0]:
                starts.append(len(self._metadata))
                self._metadata.extend((p.dim(), *p.shape, *p.stride()))
            self._starts = array("q", starts)
            self._dtypes = array("q", [_dtype_code(column[0]) for column in self.columns])
            gradients, *others = [self.tables[1], self.tables[0], *self.tables[2:]]
            self._arguments = array("q", [rows, len(self.columns), id(None), id(Tensor), offset])
            self._arguments.extend(_place(self.columns[0][0].device))
            self._pinned_handles = array("q", [id(t) + offset for t in self.pinned])
            self._arguments.append(len(self.pinned))
            self._arguments.extend((int(wrappers is not None), *layout, 0))
            outer = self.wrappers or []
            self._specs: list[Any] = [w._spec for w in outer]  # kept, so that they are recognised by their ids
            self._gradient_specs: list[Any] = []
            self._wrapper_tables = [array("q", map(id, outer)), array("q", [id(type(w)) for w in outer])]
            self._wrapper_tables += [array("q", map(id, self._specs)), array("q", bytes(8 * len(outer)))]
            self._looks = array("q", bytes(8 * LOOK_WORDS * (len(self.columns) + 1) * rows))
            fixed: list[array[Any]] = [self._starts, self._metadata, self._dtypes, gradients]
            fixed += [self._pinned_handles, self._pinned_at, *self._wrapper_tables, self._looks]
            for table in (*fixed, *self._handles, *others):
                self._arguments.append(table.buffer_info()[0])
            self._read = read

    def is_unchanged(self, row: int) -> bool:
        """Whether the tensors of a row are of the kind they were, and have memory."""
        columns = zip(self.columns, self._expected, strict=True)
        return all(
            _kind(column[row]) == expected[row] and (column[row].data_ptr() or not column[row].numel())
            for column, expected in columns
        )

    def read(self, params: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> int | None:
        """Bring :attr:`tables` up to date: addresses of parameters, gradients (0 for None), then state.

        Args:
            params: must be this book's parameters, in its order.
            grads: their gradients; None reads them from ``.grad``.

        Returns:
            How many gradients there are, or None if a tensor is not as it was; the tables are of no use then.
        """
        if self._reader is not None:
            params = params if type(params) is list else list(params)
            given = grads if grads is None or type(grads) is list else list(grads)
            count: int = self._read(params, given, self._arguments.buffer_info()[0], self._threads())
            if count == UNKNOWN and self._learn(params, given):
                count = self._read(params, given, self._arguments.buffer_info()[0], self._threads())
            return None if count < 0 else count
        grads = [p.grad for p in params] if grads is None else grads
        if self.wrappers is not None:
            unwrapped = unwrap(params, grads) if all(map(is_, params, self.wrappers)) else None
            if unwrapped is None:
                return None
            params, grads = unwrapped
        return self._read_slowly(params, grads)

    def _learn(self, params: Sequence[Any], grads: Sequence[Any] | None) -> bool:
        """Whether distributed gradients are cut as their parameters; what they say of it is recognised from now on."""
        grads = [p.grad for p in params] if grads is None else grads
        specs = [getattr(g, "_spec", None) for g in grads]
        if any(s is not None and not _cut_alike(s, p._spec) for p, s in zip(params, specs, strict=True)):
            return False
        known = next((type(g) for g, spec in zip(grads, specs, strict=True) if spec is not None), None)
        self._arguments[_WRAPPER_TYPE] = id(known)
        old = self._gradient_specs or [None] * len(specs)
        self._gradient_specs = [o if s is None else s for s, o in zip(specs, old, strict=True)]
        for i, spec in enumerate(self._gradient_specs):
            self._wrapper_tables[3][i] = id(spec) if spec is not None else 0
        return True

    def bump(self, active: Sequence[int] | None) -> None:
        """Tell autograd that the rows read last (``active``: only these) are written."""
        library = _library() if self._reader is not None else None
        if library is not None:
            library[0].offbeat_bump(self._arguments.buffer_info()[0], self._threads())
        else:
            columns = [*self.columns, *([] if self.wrappers is None else [self.wrappers])]
            rows = range(len(self.columns[0])) if active is None else active
            increment_version([column[i] for column in columns for i in rows])

    def _threads(self) -> int:
        return min(torch.get_num_threads(), len(self.columns[0]) // ROWS_A_THREAD)

    def _read_slowly(self, params: Sequence[Tensor], grads: Sequence[Tensor | None]) -> int | None:
        if len(params) != len(self.columns[0]) or not all(map(is_, params, self.columns[0])):
            return None
        if [t.data_ptr() for t in self.pinned] != self._pinned_at.tolist():
            return None
        count = 0
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            if g is None:
                self.tables[1][i] = 0
                continue
            if type(g) is not Tensor or g.layout is not torch.strided or g.shape != p.shape:
                return None
            if g.is_neg() or g._is_zerotensor():
                return None
            if g.dtype is not p.dtype or g.device != p.device or not same_layout(g, p):
                return None
            self.tables[1][i] = g.data_ptr() or 1  # an empty tensor lies nowhere, but it is there
            count += 1
        tables = [self.tables[0], *self.tables[2:]]
        for column, expected, table in zip(self.columns, self._expected, tables, strict=True):
            for i, t in enumerate(column):
                if _kind(t) != expected[i]:
                    return None
                table[i] = t.data_ptr()
        return count


def _cut_alike(a: Any, b: Any) -> bool:
    return bool(a.placements == b.placements and a.mesh == b.mesh)


def unwrap(params: Sequence[Any], grads: Sequence[Any]) -> tuple[list[Tensor], list[Tensor | None]] | None:
    """The local parts, or None where gradients are not cut as their parameters."""
    local: list[Tensor | None] = []
    for p, g in zip(params, grads, strict=True):
        if g is None:
            local.append(None)
        elif type(g) is Tensor or getattr(g, "_spec", None) is None or not _cut_alike(g._spec, p._spec):
            return None
        else:
            local.append(g._local_tensor)
    return [p._local_tensor for p in params], local


def _kind(t: Tensor) -> tuple[Any, ...]:
    return t.dtype, t.device, t.layout, t.shape, t.stride()


@functools.cache
def _library() -> tuple[Any, int] | None:
    """The C functions and the offset of a tensor's handle in its Python object, or None where Python must do."""
    if why_no_compiler():
        return None
    try:
        path = load(SOURCE)._name
    except CompilerError:
        return None
    offset = _handle_offset()
    if offset is None:
        return None
    library = ctypes.PyDLL(path)  # keeps the interpreter's lock: it works on Python objects
    layout = _measure_layout(offset)
    if layout is None:
        return None
    try:
        functions = _torch_functions()
    except (AttributeError, OSError):
        return None
    functions.extend((*layout, id(Tensor), id(torch.nn.Parameter)))
    _keys_at.append(layout[0])
    library.offbeat_bind.argtypes, library.offbeat_bind.restype = (ctypes.c_void_p,), None
    library.offbeat_bind(functions.buffer_info()[0])
    library.offbeat_read.argtypes = (ctypes.py_object, ctypes.py_object, ctypes.c_void_p, ctypes.c_int64)
    library.offbeat_read.restype = ctypes.c_int64
    library.offbeat_bump.argtypes, library.offbeat_bump.restype = (ctypes.c_void_p, ctypes.c_int64), None
    for name in ("offbeat_dtype", "offbeat_device", "offbeat_index", "offbeat_address", "offbeat_gradient"):
        function = getattr(library, name)
        function.argtypes, function.restype = (ctypes.c_int64,), ctypes.c_int64
    return (library, offset) if _works(library, offset) else None


def _works(library: Any, offset: int) -> bool:
    """Whether what the functions say of some tensors is what Python says of them."""
    probe = torch.nn.Parameter(torch.arange(6.0)[2:])
    undefined = library.offbeat_gradient(id(probe) + offset)
    probe.grad = torch.ones(4)
    other = torch.nn.Parameter(torch.zeros(2))
    return bool(
        library.offbeat_address(id(probe) + offset) == probe.data_ptr()
        and library.offbeat_gradient(id(probe) + offset) == probe.grad._cdata
        and library.offbeat_gradient(id(other) + offset) == undefined != probe.grad._cdata
    )


def _torch_functions() -> array[int]:
    torch_library = ctypes.CDLL(torch._C.__file__)
    names = ("layout", "dtype", "device_type", "device_index", "dim", "sizes", "strides", "data_ptr")
    functions = [getattr(torch_library, f"aoti_torch_get_{name}") for name in names]
    functions.append(torch_library.aoti_torch_is_defined)
    functions.append(torch_library._ZNK3c1010TensorImpl4gradEv)  # c10::TensorImpl::grad() const
    # torch::autograd::impl::bump_version(const at::Tensor &); throws for inference tensors only, which are not plain
    functions.append(torch_library._ZN5torch8autograd4impl12bump_versionERKN2at6TensorE)
    return array("q", [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions])


def _handle_offset() -> int | None:
    """Where a tensor's Python object keeps the pointer that ``_cdata`` shows."""
    probes = [torch.zeros(3), torch.nn.Parameter(torch.zeros(2)), torch.zeros(2, 2, dtype=torch.bfloat16)]
    for offset in range(16, min(64, Tensor.__basicsize__ - 7), 8):
        if all(ctypes.c_int64.from_address(id(t) + offset).value == t._cdata for t in probes):
            return offset
    return None


class _Odd(Tensor):
    """A subclass, to see how one differs."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return NotImplemented


def _words(address: int, end: int) -> dict[int, int]:
    return {at: ctypes.c_int64.from_address(address + at).value for at in range(0, end, 8)}


def _measure_layout(offset: int) -> tuple[int, int, int, int] | None:
    """Where a tensor keeps its dispatch keys and its Python object, an object its type, and a tensor its storage.

    Found by comparing tensors that differ in just that. None if it is not clear-cut.
    """
    # Several times: what lies beyond the end of a tensor differs by accident, but not always in the same way.
    rounds = [_candidates(offset) for _ in range(8)]
    found = [set.intersection(*(one[kind] for one in rounds)) for kind in range(4)]
    if any(len(places) != 1 for places in found):
        return None
    keys, objects, types, storages = (places.pop() for places in found)
    return keys, objects, types, storages


@torch.inference_mode(False)
def _candidates(offset: int) -> list[set[int]]:
    # Shapes, values and gradients differ, so that only what all plain tensors share is left.
    plain = [torch.zeros(3), torch.ones(2, 5), torch.nn.Parameter(torch.zeros(4)), torch.zeros(6)[1:].view(5, 1)]
    with torch.inference_mode():
        inference = torch.zeros(3)
    odd = [
        torch._neg_view(torch.zeros(3)),
        torch._efficientzerotensor((3,)),
        torch.zeros(3).as_subclass(_Odd),
        inference,
    ]
    size = 192
    common = _words(plain[0]._cdata, size)
    for t in plain[1:]:
        common = {at: word for at, word in _words(t._cdata, size).items() if common.get(at) == word}
    keys = {at for at, word in common.items() if all(_words(t._cdata, size)[at] != word for t in odd)}
    objects = {at for at in range(0, size, 8) if all(_words(t._cdata, size)[at] == id(t) for t in plain)}
    types = {at for at in range(0, offset, 8) if all(_words(id(t), offset)[at] == id(type(t)) for t in plain)}
    storages = {at for at in range(0, size, 8) if all(_words(t._cdata, size)[at] == _storage(t) for t in plain)}
    return [keys, objects, types, storages]


def _storage(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def _wrapper_layout(wrappers: Sequence[Any]) -> tuple[int, int] | None:
    """Where distributed tensors' Python objects keep their local parts and specifications; None if it is not clear."""
    first = wrappers[0]
    if any(type(w) is not type(first) for w in wrappers):
        return None
    words = _words(id(first), type(first).__basicsize__ - 7)
    parts = [at for at, word in words.items() if word == id(first._local_tensor)]
    specs = [at for at, word in words.items() if word == id(first._spec)]
    return (parts[0], specs[0]) if len(parts) == len(specs) == 1 else None


#: Where a tensor keeps its dispatch keys, once that has been measured.
_keys_at: list[int] = []


@functools.lru_cache(maxsize=64)
def _place(device: torch.device) -> tuple[int, int, int]:
    """What a plain tensor on this device has for dispatch keys, and how torch's C interface numbers the device."""
    found = _library()
    assert found is not None
    library, offset = found
    plain = torch.zeros(1, device=device)
    keys = ctypes.c_int64.from_address(plain._cdata + _keys_at[-1]).value
    return keys, int(library.offbeat_device(id(plain) + offset)), int(library.offbeat_index(id(plain) + offset))


def _reader() -> tuple[Any, int] | None:
    found = _library()
    return None if found is None else (found[0].offbeat_read, found[1])


def _dtype_code(t: Tensor) -> int:
    found = _library()
    assert found is not None
    library, offset = found
    return int(library.offbeat_dtype(id(t) + offset))
