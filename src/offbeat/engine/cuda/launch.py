"""Updates of tensors on a GPU: one launch with coefficients from the host, or two if the GPU computes them.

If the step counters or the learning rate are on the device, coefficients are computed there, one row for each parameter
and in double precision as on the host. The host never waits for a number, and such a step can be captured.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from offbeat.engine.batch import Batch
from offbeat.engine.cuda.capture import is_capturing
from offbeat.engine.cuda.kernel import bind_kernel, why_no_kernel
from offbeat.engine.cuda.numbers import DeviceNumbers
from offbeat.engine.cuda.table import DeviceTable, copy_from_host
from offbeat.engine.grad_transforms import NO_TRANSFORMS, GradTransforms
from offbeat.engine.options import Options
from offbeat.engine.scalars import CoefficientSets
from offbeat.engine.state import State
from offbeat.engine.trace import TypedProgram


class Launches:
    """The launches of a program over tensors of these sizes.

    Attributes:
        table: the addresses on the device.
    """

    def __init__(
        self,
        typed: TypedProgram,
        numel: Sequence[int],
        device: torch.device,
        places: Sequence[array[int]] = (),
        tail: int = 0,
    ) -> None:
        self._typed = typed
        self.table = DeviceTable(len(typed.dtypes), numel, device, places, tail)
        self._bound: dict[Any, Callable[..., None]] = {}

    def needs_rows(self, sets: CoefficientSets) -> bool:
        """Return whether a kernel cannot take these coefficients as arguments: several sets, or float64 is needed."""
        return len(sets.sets) > 1 or self._typed.compute != torch.float32

    def with_sets(self, addresses: Sequence[array[int]], sets: CoefficientSets, transforms: GradTransforms) -> None:
        """Run with coefficients from the host."""
        names, compute, table = self._typed.program.coefficients, self._typed.compute, self.table
        if not self.needs_rows(sets):
            table.send(addresses)
            self.run([sets.sets[0][name] for name in names], transforms, by_row=False)
            return
        table.send(addresses, array("q", bytes(8 * table.tensors) if sets.chosen is None else sets.chosen))
        values = array("f" if compute == torch.float32 else "d", [row[name] for row in sets.sets for name in names])
        rows = torch.empty(max(1, len(values)), dtype=compute, device=table.device)
        copy_from_host(values, rows[: len(values)])
        self.run([rows], transforms, by_row=True)

    def run(
        self, coefficients: Sequence[Any], transforms: GradTransforms, *, by_row: bool, words: Tensor | None = None
    ) -> None:
        """Launch with coefficients as arguments, or as rows on the device."""

        def bind(content: Tensor) -> Callable[..., None]:
            return bind_kernel(self._typed, transforms.variant(by_row=by_row), self.table, content)

        launch = self.bound(by_row if transforms is NO_TRANSFORMS else transforms.variant(by_row=by_row), bind, words)
        launch(*coefficients, *(t for t in transforms.numbers if t is not None))

    def bound(
        self, key: Any, bind: Callable[[Tensor], Callable[..., None]], words: Tensor | None = None
    ) -> Callable[..., None]:
        """A launch that reads these words of a captured graph; or a cached one that reads the table's words."""
        if words is not None:
            return bind(words)
        if key not in self._bound:
            self._bound[key] = bind(self.table.words)
        return self._bound[key]


class DeviceBatch(Batch):
    """One launch of a Triton kernel, or two if coefficients are computed on the device.

    Attributes:
        rows: the coefficients on the device, one row for each parameter, if they are computed there.
        numbers: what computes them; None if they come from the host.
    """

    def _set_up(self, options: Options) -> None:
        super()._set_up(options)
        self.book.fill(self._gradients)
        self._typed = options.typed(self.dtypes, on_device=self.on_device)
        self._device = self.shards[0].device
        self._every_row = array("q", range(len(self.shards)))
        self._capturing = False
        self._last: Options | None = None
        self.clips_exactly = self._typed.compute == self.dtypes[0]
        self.numbers: DeviceNumbers | None = None
        columns, tail = list(self.scales), 0
        if self.on_device:
            self.numbers = self._make_numbers(options)
            columns += [column.tensors for column in self.scalars]
            tail = len(self.numbers.tail(options.h))
        places = [array("q", [t.data_ptr() for t in column]) for column in columns]
        self.launches = Launches(self._typed, [p.numel() for p in self.shards], self._device, places, tail)
        for guarded in (False, True) if self.numbers is not None else ():
            self._bind_numbers(guarded, None)  # so that a failure comes before anything changes

    def _make_numbers(self, options: Options) -> DeviceNumbers:
        names = self._typed.program.coefficients
        self.rows = torch.empty((len(self.shards), len(names)), dtype=self._typed.compute, device=self._device)
        dtypes = {key: c.tensors[0].dtype for key, c in zip(options.scalar_keys, self.scalars, strict=True)}
        before = len(self.dtypes) + len(self.scales)
        return DeviceNumbers(options, dtypes, names, self.rows, before, self._is_first(options))

    def _is_first(self, options: Options) -> bool:
        """Return whether all parameters are at their first step, for rules that do not count steps."""
        return self._first is not None and self._first[0] and "step" not in options.scalar_keys

    def prepare(self, options: Options) -> bool:
        """Compute the coefficients, or check that the device can. False if the batch does not fit."""
        if self.numbers is None:
            return super().prepare(options)
        self._capturing = bool(options.h.capturable) and is_capturing()
        ready = not self._capturing or (self._count == len(self.params) and self.launches.table.can_freeze)
        return ready and self.numbers.fits(options.h, self._is_first(options))

    def takes(self, transforms: GradTransforms) -> bool:
        """Return whether :meth:`run` can apply these transforms in the same pass."""
        if transforms.changes_gradients and not self._own_gradients:
            return False
        # With counters on the host, the host must know whether the step is skipped.
        if transforms.found_inf is not None and self.scalars and not self.on_device:
            return False
        variant = transforms.variant(by_row=self.on_device or self.launches.needs_rows(self.sets))
        return why_no_kernel(self._typed, variant, self._device) is None

    @torch.no_grad()
    def _run(self, options: Options, transforms: GradTransforms, state: State, active: Sequence[int] | None) -> None:
        if self.numbers is not None:
            self._run_with_numbers(self.numbers, options, transforms, state)
        else:
            self._begin_late(options, active)
            self.launches.with_sets(self.book.tables, self.sets, transforms)
            # The device does not need this, so it comes after the launch.
            self.sets.store(options.scalar_keys, self.scalars, active)
            self._prepare_next(options)
        self.book.bump(active)
        increment_version([t for column in self.scales for t in column])

    def _prepare_next(self, options: Options) -> None:
        """Compute the coefficients of the next step while the device is busy, unless options change at every step."""
        if self._last is options and self._first is None:
            with suppress(ArithmeticError, ValueError, RuntimeError):  # this step is done; the next one raises
                super().prepare(options)
        self._last = options

    def _run_with_numbers(
        self, numbers: DeviceNumbers, options: Options, transforms: GradTransforms, state: State
    ) -> None:
        """With coefficients computed on the device; the new scalars are stored there."""
        h, words, table = options.h, None, self.launches.table
        if self._capturing:
            # Replays must not see what later steps send. A graph needs its tables as long as it needs the state.
            words = table.freeze(self.book.tables, self._every_row, numbers.tail(h))
            if self not in state.kept:
                state.kept.append(self)
        else:
            table.send(self.book.tables, self._every_row, numbers.tail(h))
        guards = [] if transforms.found_inf is None else [transforms.found_inf]
        self._bind_numbers(bool(guards), words)(*numbers.tensors(h), *guards)
        self.launches.run([self.rows], transforms, by_row=True, words=words)
        if options.h.capturable and not self._capturing:
            table.prepare_captures()

    def _bind_numbers(self, guarded: bool, words: Tensor | None) -> Callable[..., None]:
        numbers = self.numbers
        assert numbers is not None
        return self.launches.bound(("numbers", guarded), lambda content: numbers.bind(content, guarded), words)
