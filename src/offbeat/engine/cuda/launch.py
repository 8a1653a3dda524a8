"""Updates of tensors on a GPU: one launch with coefficients from the host, or two if they are computed there.

If the step counters or the learning rate are on the device, the host never waits for a number: coefficients are
computed on the device, one row for each parameter, in double precision as on the host. Such a step can be captured.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.engine.cuda.kernel import TritonError, can_compile, triton_kernel
from offbeat.engine.cuda.numbers import DeviceNumbers, StoredOnDevice
from offbeat.engine.cuda.source import Variant
from offbeat.engine.cuda.table import DeviceTable, copy_from_host
from offbeat.engine.extras import NOTHING, Extras
from offbeat.engine.trace import Program
from offbeat.rules.rule import Values

__all__ = ["DeviceRun"]


class DeviceRun:
    """The launches for some parameters of one device and one combination of dtypes.

    Args:
        stored: the stored scalars, if coefficients are computed on the device from them.
        h: the hyperparameters they are computed from at first.
        form: the forms in which p, g and state are stored, if not all are plain.
        scales: columns of scales for those stored in 8 bits.
    """

    def __init__(
        self,
        program: Program,
        dtypes: tuple[torch.dtype, ...],
        compute: torch.dtype,
        numel: Sequence[int],
        device: torch.device,
        stored: StoredOnDevice | None,
        h: Values,
        form: tuple[str, ...],
        scales: Sequence[Sequence[Tensor]],
    ) -> None:
        self.program, self.compute = program, compute
        self.kernel = triton_kernel(program, dtypes, compute, form)
        self._scales = [array("q", [t.data_ptr() for t in column]) for column in scales]
        self._device, self._numel, self._columns = device, numel, len(dtypes)
        self._every_row = array("q", range(len(numel)))
        self._stored = stored
        self._past: list[Any] = []
        self._forget_launches()
        if stored is None:
            self.table = DeviceTable(len(dtypes), numel, device, self._scales)
        else:
            self._begin(h)

    def can_compile(self, variant: Variant) -> bool:
        """Whether a variant of the kernel compiles; it is compiled to find out."""
        kernel = self.kernel
        return can_compile(kernel.program, kernel.dtypes, kernel.compute, variant, self._device, kernel.formats)

    def with_sets(
        self,
        addresses: Sequence[array[int]],
        chosen: array[int] | None,
        sets: Sequence[dict[str, Any]],
        extras: Extras,
    ) -> None:
        """Run with sets of coefficients from the host; ``chosen`` is the set of each parameter (None: the first)."""
        names = self.program.coefficients
        if len(sets) == 1 and self.compute == torch.float32:
            self.table.send(addresses)
            row = sets[0]
            self._launch([row[name] for name in names], extras)
            return
        self.table.send(addresses, chosen if chosen is not None else array("q", bytes(8 * len(self._every_row))))
        kind = "f" if self.compute == torch.float32 else "d"
        values = array(kind, [row[name] for row in sets for name in names])
        rows = torch.empty(max(1, len(values)), dtype=self.compute, device=self._device)
        copy_from_host(values, rows[: len(values)])
        self._launch([rows], extras, by_row=True)

    def fits(self, h: Values) -> bool:
        """Whether the kernel that computes coefficients is right for these hyperparameters."""
        assert self._stored is not None
        return self._numbers is None or self._numbers.fits(h, first=self._stored.first)

    def from_now_on(self, stored: StoredOnDevice) -> None:
        """Compute coefficients from these scalars: the same columns, after the first step."""
        self._stored = stored

    def with_stored(self, addresses: Sequence[array[int]], h: Values, extras: Extras, *, capturing: bool) -> None:
        """Run with coefficients computed on the device, and store the new scalars there.

        Args:
            capturing: whether a graph is being captured. Its replays must not see what later steps send.
        """
        if not self.fits(h):
            if self.table.is_captured:
                self._past.append((self.table, self.rows))
            self._begin(h)
        numbers = self._numbers
        tail = array("d") if numbers is None else numbers.tail(h)
        words: Tensor | None = None
        if capturing:
            words = self.table.freeze(addresses, self._every_row, tail)
        else:
            self.table.send(addresses, self._every_row, tail)
        if numbers is not None:
            guard = extras.found_inf
            launch = self._bound.get(guard is not None) if words is None else None
            if launch is None:
                content = self.table.words if words is None else words
                launch = numbers.kernel.bind(content, self.rows, guarded=guard is not None)
                if words is None:
                    self._bound[guard is not None] = launch
            launch(*numbers.tensors(h, self._device), *([] if guard is None else [guard]))
        else:
            self._rows_by_torch(addresses, h, extras)
        self._launch([self.rows], extras, by_row=True, words=words)

    def _begin(self, h: Values) -> None:
        """Make the table, and the kernel that computes coefficients if the rule allows one."""
        stored = self._stored
        assert stored is not None
        names = self.program.coefficients
        self._forget_launches()
        columns = self._columns + len(self._scales)
        self._numbers = DeviceNumbers.make(stored, h, names, self.compute, columns)
        places = [array("q", [t.data_ptr() for t in column.tensors]) for column in stored.columns]
        tail = 0 if self._numbers is None else len(self._numbers.tail(h))
        self.table = DeviceTable(self._columns, self._numel, self._device, [*self._scales, *places], tail)
        shape = (len(self._numel), len(names))
        self.rows = torch.empty(shape, dtype=self.compute, device=self._device)
        if self._numbers is not None:
            try:
                for guarded in (False, True):
                    self._bound[guarded] = self._numbers.kernel.bind(self.table.words, self.rows, guarded=guarded)
            except TritonError:
                self._numbers = None

    def _forget_launches(self) -> None:
        self._bound: dict[Any, Callable[..., None]] = {}
        self._plain: list[Callable[..., None] | None] = [None, None]  # without extras: with one set, with rows

    def _rows_by_torch(self, addresses: Sequence[array[int]], h: Values, extras: Extras) -> None:
        assert self._stored is not None
        active = None if extras.found_inf is None else extras.found_inf == 0
        if 0 in addresses[1]:
            here = torch.tensor([address != 0 for address in addresses[1]]).to(self._device)
            active = here if active is None else here & active
        self._stored.by_torch(h, self.program.coefficients, self.rows, active)

    def _launch(
        self, coefficients: Sequence[Any], extras: Extras, *, by_row: bool = False, words: Tensor | None = None
    ) -> None:
        plain = extras is NOTHING and words is None
        if plain and (launch := self._plain[by_row]) is not None:
            launch(*coefficients)
            return
        variant = extras.variant(by_row=by_row)
        launch = self._bound.get(variant) if words is None else None
        if launch is None:
            launch = self.kernel.bind(self.table, variant, words)
            if words is None:
                self._bound[variant] = launch
        if plain:
            self._plain[by_row] = launch
        launch(*coefficients, *(t for t in extras.numbers if t is not None))
