"""The C source that reads and checks the addresses of many tensors; see :mod:`offbeat.tiers.addresses`."""

from __future__ import annotations

__all__ = ["SOURCE"]

SOURCE = """
typedef long long i64;
typedef struct _object PyObject;
PyObject *PyList_GetItem(PyObject *, i64);
i64 PyList_Size(PyObject *);
extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned);

/* torch's stable C interface, and what a tensor's gradient is; the addresses of the functions are handed in. */
static struct {
  int (*layout)(void *, int *), (*dtype)(void *, int *), (*device)(void *, int *), (*index)(void *, int *);
  int (*dim)(void *, i64 *);
  int (*sizes)(void *, i64 **), (*strides)(void *, i64 **), (*data)(void *, void **);
  int (*defined)(void *, unsigned char *);
  void *(*gradient)(void *);
  void (*bump)(void *);
  /* Where a tensor keeps its dispatch keys and its Python object, and that its type; where it keeps its storage. */
  i64 keys_at, object_at, type_at, storage_at, tensor_type, parameter_type;
} get;

#define WORD(base, offset) (*(const i64 *)((const char *)(base) + (offset)))

/* Whether the tensor is what its memory says: no subclass, no lazy sign or zero, no inference tensor. */
static int plain(void *handle, i64 keys) {
  const void *tensor = *(void **)handle;
  if (WORD(tensor, get.keys_at) != keys) return 0;
  i64 object = WORD(tensor, get.object_at);
  if (!object) return 1;
  i64 type = WORD(object, get.type_at);
  return type == get.tensor_type || type == get.parameter_type;
}

void offbeat_bind(const void *functions) { __builtin_memcpy(&get, functions, sizeof get); }

/* What a tensor looked like when it was found to fit: the tensor but for its reference counts, the same of its storage,
   and the type of its Python object. While all that is the same so is everything it says. A tensor ends with its
   dispatch keys. */
enum { TENSOR_WORDS = 24, USUAL_WORDS = 20, STORAGE_WORDS = 7 };
struct look { i64 tensor, words[TENSOR_WORDS], storage[STORAGE_WORDS], type, address; };

struct request {
  i64 rows, columns, none, tensor_type, offset, keys, device, index, pinned;
  /* Distributed tensors around the first column: where they keep their local part and what they say of the whole. */
  i64 wrapped, local_at, spec_at, wrapper_type;
  const i64 *starts, *metadata, *dtypes;
  i64 *gradients;
  const i64 *pinned_handles, *pinned_at, *wrappers, *wrapper_types, *specs, *gradient_specs;
  struct look *looks;  /* of each column, then of the gradients */
  i64 *tables[];  /* handles of each column, then the table of each column */
};

static i64 type_of(const void *tensor) {
  i64 object = WORD(tensor, get.object_at);
  return object ? WORD(object, get.type_at) : 0;
}

/* Without a way out in the middle this is a handful of wide operations, where memcmp would be a call. */
static inline i64 difference(const i64 *a, const void *b, i64 words) {
  i64 found = 0;
  for (i64 i = 0; i < words; ++i) found |= a[i] ^ ((const i64 *)b)[i];
  return found;
}

static int looks_the_same(const struct look *look, const void *tensor) {
  if (look->tensor != (i64)tensor) return 0;
  i64 words = (get.keys_at - 8) / 8;
  if (words == USUAL_WORDS ? difference(look->words, (const char *)tensor + 16, USUAL_WORDS)
                           : difference(look->words, (const char *)tensor + 16, words)) return 0;
  /* Another tensor may lie where one was that has been freed, and have no storage: only now it is known to have one. */
  const char *storage = (const char *)WORD(tensor, get.storage_at);
  return !(difference(look->storage, storage + 16, STORAGE_WORDS) | (look->type ^ type_of(tensor)));
}

static void remember(struct look *look, const void *tensor, i64 address) {
  const char *storage = (const char *)WORD(tensor, get.storage_at);
  look->tensor = (i64)tensor;
  __builtin_memcpy(look->words, (const char *)tensor + 16, get.keys_at - 8);
  __builtin_memcpy(look->storage, storage + 16, sizeof look->storage);
  look->type = type_of(tensor);
  look->address = address;
}

/* Whether the tensor is strided, on this device, and has this dtype, shape and layout; its address if so. */
static int fits(
    const struct request *r, void *handle, i64 dtype, const i64 *expected, struct look *look, i64 *address) {
  const void *tensor = *(void **)handle;
  if (looks_the_same(look, tensor)) { *address = look->address; return 1; }
  look->tensor = 0;
  int code;
  i64 dim, *sizes, *strides;
  void *data;
  if (!plain(handle, r->keys)) return 0;
  if (get.layout(handle, &code) || code != 0) return 0;
  if (get.dtype(handle, &code) || code != dtype) return 0;
  if (get.device(handle, &code) || code != r->device) return 0;
  if (get.index(handle, &code) || code != r->index) return 0;
  if (get.dim(handle, &dim) || dim != expected[0]) return 0;
  if (get.sizes(handle, &sizes) || get.strides(handle, &strides)) return 0;
  i64 elements = 1;
  for (i64 d = 0; d < dim; ++d) {
    if (sizes[d] != expected[1 + d] || (sizes[d] != 1 && strides[d] != expected[1 + dim + d])) return 0;
    elements *= sizes[d];
  }
  if (get.data(handle, &data) || (!data && elements)) return 0;
  *address = (i64)data;
  /* Sizes of more than five dimensions lie elsewhere. */
  if (dim <= 5 && get.keys_at - 8 <= 8 * TENSOR_WORDS) remember(look, tensor, *address);
  return 1;
}

struct reading { const struct request *request; PyObject *gradients; i64 next, count, failed, unknown; };

static int read_row(struct reading *reading, i64 i, i64 *count) {
  const struct request *r = reading->request;
  const i64 *expected = r->metadata + r->starts[i];
  void *gradient;
  for (i64 c = 0; c < r->columns; ++c)
    if (!fits(r, (void *)r->tables[c][i], r->dtypes[c], expected, &r->looks[c * r->rows + i],
              &r->tables[r->columns + c][i])) return 0;
  r->gradients[i] = 0;
  i64 owner = r->wrapped ? r->wrappers[i] : r->tables[0][i] - r->offset;
  if (r->wrapped && (WORD(owner, get.type_at) != r->wrapper_types[i] || WORD(owner, r->spec_at) != r->specs[i] ||
                     WORD(owner, r->local_at) + r->offset != r->tables[0][i])) return 0;
  i64 object = 0;
  if (reading->gradients) {
    object = (i64)PyList_GetItem(reading->gradients, i);
    if (object == r->none) return 1;
    if (!r->wrapped && WORD(object, get.type_at) != get.tensor_type) return 0;
    gradient = (char *)object + r->offset;
  } else {
    unsigned char defined;
    gradient = get.gradient(*(void **)(owner + r->offset));
    if (get.defined(gradient, &defined)) return 0;
    if (!defined) return 1;
    if (r->wrapped) object = WORD(*(void **)gradient, get.object_at);
  }
  if (r->wrapped) {
    if (!object) return 0;
    if (WORD(object, get.type_at) != r->wrapper_type || WORD(object, r->spec_at) != r->gradient_specs[i]) {
      reading->unknown = 1;
      return 0;
    }
    gradient = (char *)WORD(object, r->local_at) + r->offset;
  }
  if (!fits(r, gradient, r->dtypes[0], expected, &r->looks[r->columns * r->rows + i], &r->gradients[i])) return 0;
  if (!r->gradients[i]) r->gradients[i] = 1; /* an empty tensor lies nowhere, but it is there */
  ++*count;
  return 1;
}

static void worker(void *data) {
  struct reading *reading = data;
  i64 rows = reading->request->rows, count = 0;
  while (!__atomic_load_n(&reading->failed, __ATOMIC_RELAXED)) {
    i64 first = __atomic_fetch_add(&reading->next, 64, __ATOMIC_RELAXED);
    if (first >= rows) break;
    for (i64 i = first; i < first + 64 && i < rows; ++i)
      if (!read_row(reading, i, &count)) { __atomic_store_n(&reading->failed, 1, __ATOMIC_RELAXED); break; }
  }
  __atomic_fetch_add(&reading->count, count, __ATOMIC_RELAXED);
}

/* The number of gradients, -1 if a tensor is not as it was, -2 if a distributed gradient says of the whole what no
   other has said. Without a list of gradients they are those the
   parameters have; no Python object is looked at then, and several threads share the work. */
i64 offbeat_read(PyObject *params, PyObject *gradients, const struct request *r, i64 threads) {
  struct reading reading = {r, (i64)gradients == r->none ? 0 : gradients, 0, 0, 0, 0};
  if (PyList_Size(params) != r->rows || (reading.gradients && PyList_Size(gradients) != r->rows)) return -1;
  for (i64 i = 0; i < r->rows; ++i)
    if ((i64)PyList_GetItem(params, i) != (r->wrapped ? r->wrappers[i] : r->tables[0][i] - r->offset)) return -1;
  for (i64 i = 0; i < r->pinned; ++i) {
    void *data, *handle = (void *)r->pinned_handles[i];
    if (get.data(handle, &data) || (i64)data != r->pinned_at[i]) return -1;
  }
  if (threads > 1 && !reading.gradients) GOMP_parallel(worker, &reading, threads, 0);
  else worker(&reading);
  return !reading.failed ? reading.count : reading.unknown ? -2 : -1;
}

static void bump_worker(void *data) {
  struct reading *reading = data;
  const struct request *r = reading->request;
  for (;;) {
    i64 first = __atomic_fetch_add(&reading->next, 64, __ATOMIC_RELAXED);
    if (first >= r->rows) return;
    for (i64 i = first; i < first + 64 && i < r->rows; ++i)
      if (r->gradients[i])
      {
        for (i64 c = 0; c < r->columns; ++c) get.bump((void *)r->tables[c][i]);
        if (r->wrapped) get.bump((void *)(r->wrappers[i] + r->offset));
      }
  }
}

/* Tell autograd that the tensors of every row with a gradient are written. */
void offbeat_bump(const struct request *r, i64 threads) {
  struct reading reading = {r, 0, 0, 0, 0, 0};
  if (threads > 1) GOMP_parallel(bump_worker, &reading, threads, 0);
  else bump_worker(&reading);
}

i64 offbeat_dtype(i64 handle) { int code; return get.dtype((void *)handle, &code) ? -1 : code; }
i64 offbeat_device(i64 handle) { int code; return get.device((void *)handle, &code) ? -1 : code; }
i64 offbeat_index(i64 handle) { int code; return get.index((void *)handle, &code) ? -1 : code; }
i64 offbeat_address(i64 handle) { void *p; return get.data((void *)handle, &p) ? -1 : (i64)p; }
i64 offbeat_gradient(i64 handle) { return *(i64 *)get.gradient(*(void **)handle); }
"""
