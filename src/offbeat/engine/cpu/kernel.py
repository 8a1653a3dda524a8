"""A traced update as one C kernel that updates many tensors in one pass over memory.

The kernel reads tables of addresses, so no tensor is copied. Work is divided by elements, not by tensors: threads take
chunks of elements in order, regardless of the sizes of the tensors.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offbeat.engine.cpu.compiler import CompilerError, load, why_not_wanted
from offbeat.engine.trace import Constant, TypedProgram
from offbeat.rules.ops import OPERATIONS

SUPPORTED = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}

#: Below this number of elements a second thread costs more than it saves.
ELEMENTS_A_THREAD = 1 << 15
#: Elements that a thread takes at once: few enough for an even load, enough to stream.
CHUNK = 1 << 16


class CpuKernel:
    """A compiled update for one combination of dtypes.

    Call it with tables: for each column (p, g, then the state) the addresses of the tensors, then their sizes, the
    index of the set of coefficients that each tensor uses, all sets, and the number of elements. A tensor whose
    gradient has the address 0 is not updated.
    """

    def __init__(self, typed: TypedProgram) -> None:
        library = load(_kernel_source(typed))
        library.offbeat_step.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        library.offbeat_step.restype = None
        self._step = library.offbeat_step

    def __call__(
        self,
        columns: Sequence[array[int]],
        numel: array[int],
        chosen: array[int],
        coefficients: array[float],
        elements: int,
    ) -> None:
        """Run the kernel; see the class."""
        wanted = elements // ELEMENTS_A_THREAD
        threads = min(torch.get_num_threads(), wanted) if wanted > 1 else 1
        job = array("q", (len(numel), elements, CHUNK, 0))
        tables: list[array[Any]] = [numel, chosen, coefficients, *columns]
        job.extend(table.buffer_info()[0] for table in tables)
        self._step(job.buffer_info()[0], threads)

    def prepare(
        self,
        columns: Sequence[tuple[array[int], int]],
        numel: array[int],
        chosen: array[int],
        coefficients: array[float],
        elements: int,
    ) -> Callable[[], None]:
        """Return a repeatable call. Columns come with the row to begin at; tables keep their length."""
        wanted = elements // ELEMENTS_A_THREAD
        job = array("q", (len(numel), elements, CHUNK, 0))
        job.extend(table.buffer_info()[0] for table in (numel, chosen, coefficients))
        job.extend(table.buffer_info()[0] + 8 * row for table, row in columns)
        step, place = self._step, job.buffer_info()[0]

        def call(_: Any = (numel, chosen, coefficients, columns)) -> None:  # which keeps the tables alive
            job[3] = 0  # where the next thread begins
            step(place, min(torch.get_num_threads(), wanted) if wanted > 1 else 1)

        return call


def cpu_kernel(typed: TypedProgram) -> CpuKernel | str:
    """The kernel, compiled on first use, or the reason there is none."""
    return why_not_wanted() or _compiled(typed)


@functools.lru_cache(maxsize=1024)
def _compiled(typed: TypedProgram) -> CpuKernel | str:
    # A failure is cached too, so that a compiler that fails is called once and not at every step.
    try:
        return CpuKernel(typed)
    except CompilerError as error:
        return str(error)


_TYPES = """
typedef long long i64;
typedef float f32;
typedef double f64;
typedef unsigned short bf16;
typedef unsigned int u32;
"""

_HELPERS = {
    "bf16": """
static inline f32 load_bf16(bf16 x) { union { u32 u; f32 f; } v; v.u = (u32)x << 16; return v.f; }
static inline bf16 store_bf16(f32 x) {
  union { f32 f; u32 u; } v; v.f = x;
  u32 rounded = (v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16;
  return x != x ? (bf16)0x7fc0 : (bf16)rounded;
}
""",
    "f16": """
typedef _Float16 f16;
static inline f32 load_f16(f16 x) { return (f32)x; }
static inline f16 store_f16(f32 x) { return (f16)x; }
""",
    "f32": """
static inline f32 load_f32(f32 x) { return x; }
static inline f32 store_f32(f32 x) { return x; }
""",
    "f64": """
static inline f64 load_f64(f64 x) { return x; }
static inline f64 store_f64(f64 x) { return x; }
""",
}

_THREADS = """
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);

struct job {
  i64 tensors, elements, chunk, next;
  const i64 *numel, *chosen;
  const f64 *coefficients;
  const i64 *column[COLUMNS];
};

/* Where a thread stands in the tensors laid end to end; one without a gradient has no elements. */
struct place { i64 tensor, offset; };

static void part(const struct job *job, struct place *at, i64 first, i64 last) {
  for (; at->tensor < job->tensors; ++at->tensor) {
    i64 i = at->tensor, numel = job->column[1][i] ? job->numel[i] : 0;
    i64 begin = first - at->offset, end = last - at->offset;
    if (begin < 0) begin = 0;
    if (begin < numel && end > begin) tensor(job, i, begin, end < numel ? end : numel);
    if (end < numel) return;
    at->offset += numel;
    if (end == numel) { ++at->tensor; return; }
  }
}

/* Chunks are taken in order, so that a thread that is held up takes fewer of them. */
static void worker(void *data) {
  struct job *job = data;
  struct place at = {0, 0};
  for (;;) {
    i64 first = __atomic_fetch_add(&job->next, job->chunk, __ATOMIC_RELAXED);
    if (first >= job->elements) return;
    part(job, &at, first, first + job->chunk < job->elements ? first + job->chunk : job->elements);
  }
}

void offbeat_step(struct job *job, i64 threads) {
  if (threads > 1) GOMP_parallel(worker, job, threads, 0);
  else worker(job);
}
"""


def _kernel_source(typed: TypedProgram) -> str:
    """The C source of a program."""
    program, dtypes = typed.program, typed.dtypes
    kinds = [SUPPORTED[dtype] for dtype in dtypes]
    c = SUPPORTED[typed.compute]
    suffix = "" if c == "f64" else "f"
    lines = [f"#define COLUMNS {len(dtypes)}", _TYPES, *(_HELPERS[kind] for kind in sorted({*kinds, c}))]
    lines += [f"typedef {c} C;", "struct job;", "static void tensor(const struct job *, i64, i64, i64);", _THREADS]
    lines += ["static void tensor(const struct job *job, i64 i, i64 begin, i64 end) {"]
    for column, kind in enumerate(kinds):
        const = "const " if column == 1 else ""
        lines.append(f"  {const}{kind} *restrict t{column} = ({const}{kind} *)job->column[{column}][i];")
    count = len(program.coefficients)
    lines.append(f"  const f64 *coefficient = job->coefficients + job->chosen[i] * {count};")
    for i in range(count):
        lines.append(f"  const C v{len(dtypes) + i} = (C)coefficient[{i}];")
    lines.append("  for (i64 j = begin; j < end; ++j) {")
    for number, instruction in enumerate(program.instructions):
        if instruction.op == "tensor":
            lines.append(f"    const C v{number} = load_{kinds[number]}(t{number}[j]);")
        elif instruction.op != "scalar":
            args = [f"(C){a.value!r}" if isinstance(a, Constant) else f"v{a}" for a in instruction.args]
            kind = "int" if OPERATIONS[instruction.op].compares else "C"
            lines.append(f"    const {kind} v{number} = {OPERATIONS[instruction.op].c.format(*args, f=suffix)};")
    for column, output in zip([0, *range(2, len(dtypes))], program.outputs, strict=True):
        lines.append(f"    t{column}[j] = store_{kinds[column]}(v{output});")
    lines += ["  }", "}"]
    return "\n".join(lines) + "\n"
