"""Chunks of a batch of matrices: parameters that are transformed as one stack, and what stays from step to step.

Tables of addresses and prepared calls of kernels are kept. They are used only in a step whose batch has been read
again: then every tensor lies where the tables say, in the layout and dtype that the kernels were made for.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat.engine.cpu.kernel import CpuKernel
from offbeat.engine.cuda.launch import Launches
from offbeat.engine.grad_transforms import NO_TRANSFORMS
from offbeat.engine.matrix.stages import stages
from offbeat.engine.options import Options
from offbeat.engine.scalars import CoefficientSets
from offbeat.engine.tensors import is_dense
from offbeat.engine.trace import TypedProgram
from offbeat.rules.products import Products
from offbeat.rules.rule import Values

__all__ = ["Chunk"]


class Chunk:
    """Parameters of equal shape, layout and coefficients.

    Args:
        at: their positions in the batch.
        params: their local tensors.
        dtype: the dtype of their stack.
        products: the products that the transform is told to use.
        shape: the shape of a whole parameter, if ``params`` are pieces.

    Attributes:
        scalars: the coefficients of this step, with those that depend on the shape.
        about: what the transform is told.
        kernels: the prepared calls of the elementwise parts; None where they have to be looked for.
    """

    scalars: dict[str, Any]
    about: Values

    def __init__(
        self,
        at: list[int],
        params: list[Tensor],
        dtype: torch.dtype,
        products: Products,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.at, self.params, self.dtype = at, params, dtype
        self._products = products
        self.kernels: Kernels | None = None
        p = params[0]
        self._shape = (len(at), *p.shape)
        self._whole = tuple(p.shape) if shape is None else shape
        gaps_or_in_order = p.is_contiguous() or not is_dense(p)
        self._strides = None if gaps_or_in_order else (p.numel(), *p.stride())
        self._one = len(at) == 1
        self._for: tuple[Any, Any] = (None, None)

    def new_stack(self) -> Tensor:
        """A stack of tensors laid out like the parameters, without values."""
        device = self.params[0].device
        if self._strides is None:
            return torch.empty(self._shape, dtype=self.dtype, device=device)
        return torch.empty_strided(self._shape, self._strides, dtype=self.dtype, device=device)

    def is_like(self, result: Tensor) -> bool:
        """Return whether a stack is laid out as one of :meth:`new_stack`."""
        if type(result) is not Tensor or result.dtype is not self.dtype or result.shape != self._shape:
            return False
        # How far apart the matrices of a stack are does not matter if there is one.
        return (
            result.is_contiguous()
            if self._strides is None
            else result.stride()[self._one :] == self._strides[self._one :]
        )

    def is_for(self, options: Options, numbers: Mapping[str, Any]) -> bool:
        """Return whether it has the coefficients of a step with these options and numbers already."""
        return self._for[0] is options and self._for[1] is numbers

    def set_numbers(self, options: Options, h: Values, numbers: Mapping[str, Any]) -> None:
        """Take the coefficients of a step; ``h`` are the hyperparameters that scales are computed from."""
        matrix = options.rule.matrix
        assert matrix is not None
        self.scalars = {**numbers, **matrix.scales(h, self._whole)}
        c = Values(**self.scalars, **options.structure)
        self.about = Values(
            h=options.h, c=c, products=self._products, params=self.params, dtype=self.params[0].dtype, shape=self._whole
        )
        self._for = options, numbers
        if self.kernels is not None and not self.kernels.set_numbers(self.scalars):
            self.kernels = None

    def find_kernels(
        self,
        options: Options,
        tables: Sequence[array[int]],
        keys: Sequence[str],
        dtypes: Sequence[torch.dtype],
        known: Mapping[Any, Any],
    ) -> None:
        """Prepare calls of the kernels, if earlier steps have found kernels for these tensors.

        Args:
            tables: where parameters, gradients and state of the batch lie.
            keys: the names of the state among the tables.
            dtypes: the dtypes of parameters, gradients and that state.
            known: what the stages have found at earlier steps.
        """
        first, second = stages(options.rule)
        if first is None:
            return
        x = self.dtype
        parts: list[Any] = []
        for stage, columns, types in ((first, (None, 1), (x, dtypes[1])), (second, (0, None), (dtypes[0], x))):
            kept = stage.keys(keys)
            more = [2 + keys.index(key) for key in kept]
            names = stage.names(self.scalars)
            typed = (*types, *(dtypes[i] for i in more))
            kernel = stage.kernel_for(kept, names, typed, self.params[0].device, known)
            if kernel is None:
                return
            parts.append(Part(*kernel, [None if i is None else tables[i] for i in (*columns, *more)], names))
        self.kernels = Kernels(self.at, self.params[0], x.itemsize, parts)
        self.kernels.set_numbers(self.scalars)


class Part(NamedTuple):
    """An elementwise part: its program, its C kernel (None: Triton's), its tables of addresses (None: the stack) and
    the names of its coefficients.
    """

    typed: TypedProgram
    kernel: CpuKernel | None
    tables: Sequence[array[int] | None]
    names: tuple[str, ...]


class Kernels:
    """Calls of the kernels of the two elementwise parts, for some rows of a batch.

    Args:
        at: the rows.
        like: a parameter of the chunk.
        width: the bytes of an element of the stack.
        parts: the parts.
    """

    def __init__(self, at: list[int], like: Tensor, width: int, parts: Sequence[Part]) -> None:
        n = len(at)
        self._at, self._bytes = at, like.numel() * width
        self._names = [part.names for part in parts]
        self._numbers = [array("d", bytes(8 * len(names))) for names in self._names]
        self._sets = [CoefficientSets(None, [{}])]  # in a list, which calls hold on to instead of this object
        self._stack = array("q", bytes(8 * n))
        self._copied: list[tuple[array[int], array[int]]] = []
        self._sizes = array("q", [like.numel()] * n)
        self._before, self._after = (
            self._on_device(part, like.device) if part.kernel is None else self._on_cpu(part, part.kernel, numbers)
            for part, numbers in zip(parts, self._numbers, strict=True)
        )

    def _on_cpu(self, part: Part, kernel: CpuKernel, numbers: array[float]) -> Callable[[], None]:
        first, n = self._at[0], len(self._at)
        in_order = self._at == list(range(first, first + n))
        columns = [
            (self._stack, 0) if table is None else (table, first) if in_order else (self._copy(table), 0)
            for table in part.tables
        ]
        return kernel.prepare(columns, self._sizes, array("q", bytes(8 * n)), numbers, sum(self._sizes))

    def _on_device(self, part: Part, device: torch.device) -> Callable[[], None]:
        launches = Launches(part.typed, self._sizes, device)
        columns = [self._stack if table is None else self._copy(table) for table in part.tables]
        sets = self._sets
        return lambda: launches.with_sets(columns, sets[0], NO_TRANSFORMS)

    def _copy(self, table: array[int]) -> array[int]:
        """Make a copy of these rows of a table, which :meth:`before` updates in every step."""
        own = array("q", bytes(8 * len(self._at)))
        self._copied.append((own, table))
        return own

    def set_numbers(self, scalars: Mapping[str, Any]) -> bool:
        """Take the coefficients of a step. False if they have other names."""
        try:
            for numbers, names in zip(self._numbers, self._names, strict=True):
                numbers[:] = array("d", [scalars[name] for name in names])
        except KeyError:
            return False
        self._sets[0] = CoefficientSets(None, [dict(scalars)])
        return True

    def before(self, x: Tensor) -> None:
        """Write the stack ``x``; begins a step."""
        for own, table in self._copied:
            for k, i in enumerate(self._at):
                own[k] = table[i]
        self._point_to(x)
        self._before()

    def after(self, result: Tensor) -> None:
        """Update the parameters from the transformed stack."""
        self._point_to(result)
        self._after()

    def _point_to(self, stack: Tensor) -> None:
        place = stack.data_ptr()
        for k in range(len(self._stack)):
            self._stack[k] = place
            place += self._bytes
