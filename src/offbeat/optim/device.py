"""Updates of tensors on a GPU: one launch, with coefficients from the host; or two, with coefficients made there.

Where counters or the learning rate lie on the device, nothing asks it for a number: coefficients are worked out there,
one row for each parameter, in double precision as on the host. A step then never waits, and can be captured.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.optim.coefficients import DeviceNumbers, device_rows
from offbeat.optim.extras import NOTHING, Extras
from offbeat.optim.scalars import Scalars
from offbeat.rules.rule import Rule, Slot, Values
from offbeat.tiers.device_table import DeviceTable, copy_from_host
from offbeat.tiers.trace import Program
from offbeat.tiers.triton_kernel import TritonError, can_compile, triton_kernel
from offbeat.tiers.triton_source import Variant

__all__ = ["DeviceCounters", "DeviceRun"]


class DeviceCounters:
    """What coefficients are made of where they are made on the device."""

    def __init__(self, rule: Rule, slots: Sequence[Slot], counters: Sequence[Scalars], fresh: bool) -> None:
        self.rule, self.slots, self.counters, self.fresh = rule, slots, counters, fresh


class DeviceRun:
    """The launches for some parameters of one device and one combination of dtypes.

    Args:
        counters: where coefficients are made on the device, what they are made of.
        form: how p, g and state are stored, if not all plainly.
        scales: columns of scales for those stored in 8 bits.
    """

    def __init__(
        self,
        program: Program,
        dtypes: tuple[torch.dtype, ...],
        compute: torch.dtype,
        numel: Sequence[int],
        device: torch.device,
        counters: DeviceCounters | None = None,
        h: Values | None = None,
        form: tuple[str, ...] = (),
        scales: Sequence[Sequence[Tensor]] = (),
    ) -> None:
        self.program, self.compute = program, compute
        self.kernel = triton_kernel(program, dtypes, compute, form)
        self._scales = [array("q", [t.data_ptr() for t in column]) for column in scales]
        self._device, self._numel, self._columns = device, numel, len(dtypes)
        self._can_compile: dict[Variant, bool] = {}
        self._every_row = array("q", range(len(numel)))
        self._counters = counters
        self._past: list[Any] = []
        self._forget_launches()
        if counters is None:
            self.table = DeviceTable(len(dtypes), numel, device, self._scales)
        else:
            assert h is not None
            self._begin(h)

    def can_compile(self, variant: Variant) -> bool:
        """Whether a variant of the kernel can be had; it is compiled to find out."""
        if (found := self._can_compile.get(variant)) is None:
            kernel = self.kernel
            found = self._can_compile[variant] = can_compile(
                kernel.program, kernel.dtypes, kernel.compute, variant, self._device, kernel.formats
            )
        return found

    def with_numbers(
        self,
        addresses: Sequence[array[int]],
        rows: array[int] | None,
        coefficients: Sequence[dict[str, Any]],
        extras: Extras,
    ) -> None:
        """Run with coefficients from the host: a few sets of them, and which each parameter uses (None: the first)."""
        names = self.program.coefficients
        if len(coefficients) == 1 and self.compute == torch.float32:
            self.table.send(addresses)
            row = coefficients[0]
            self._launch([row[name] for name in names], extras)
            return
        self.table.send(addresses, rows if rows is not None else array("q", bytes(8 * len(self._every_row))))
        kind = "f" if self.compute == torch.float32 else "d"
        values = array(kind, [row[name] for row in coefficients for name in names])
        table = torch.empty(max(1, len(values)), dtype=self.compute, device=self._device)
        copy_from_host(values, table[: len(values)])
        self._launch([table], extras, by_row=True)

    def fits(self, h: Values) -> bool:
        """Whether coefficients for these hyperparameters can be made as those before were."""
        return self._numbers is None or self._numbers.fits(h)

    def with_counters(self, addresses: Sequence[array[int]], h: Values, extras: Extras, *, capturing: bool) -> None:
        """Run with coefficients made on the device; counters have moved on afterwards.

        Args:
            capturing: whether a graph is being captured, whose replays must not see what later steps send.
        """
        assert self._counters is not None
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
        """Make the table, and the kernel that works coefficients out if there can be one."""
        counters = self._counters
        assert counters is not None
        names = self.program.coefficients
        self._forget_launches()
        self._numbers = DeviceNumbers.make(
            counters.rule, h, counters.slots, counters.counters, counters.fresh, names, self.compute,
            self._columns + len(self._scales),
        )  # fmt: skip
        stored = [array("q", [t.data_ptr() for t in counter.tensors]) for counter in counters.counters]
        tail = 0 if self._numbers is None else len(self._numbers.tail(h))
        self.table = DeviceTable(self._columns, self._numel, self._device, [*self._scales, *stored], tail)
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
        self._plain: list[Callable[..., None] | None] = [None, None]  # those with no extras, without and with rows

    def _rows_by_torch(self, addresses: Sequence[array[int]], h: Values, extras: Extras) -> None:
        counters = self._counters
        assert counters is not None
        counts = None if extras.found_inf is None else extras.found_inf == 0
        if 0 in addresses[1]:
            here = torch.tensor([address != 0 for address in addresses[1]]).to(self._device)
            counts = here if counts is None else here & counts
        device_rows(
            counters.rule, h, counters.slots, counters.counters, counters.fresh, self.program.coefficients, self.rows,
            counts,
        )  # fmt: skip

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
