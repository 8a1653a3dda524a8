// Reads and checks the addresses of many tensors in one call, for offbeat/engine/addresses.py.
//
// Compiled against the headers of the installed torch, which say where a tensor keeps its fields. Nothing is kept
// between calls: the lists that are passed in own the tensors.

#include <torch/csrc/autograd/python_variable.h>

#include <c10/core/TensorOptions.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace {

constexpr int64_t CHANGED = -1;  // a tensor has changed
constexpr int64_t UNKNOWN = -2;  // a distributed gradient has a new specification

PyObject* local_name = nullptr;
PyObject* spec_name = nullptr;

// Gives access to the 64-bit numbers of an array.array, which cannot be resized meanwhile.
class Words {
 public:
  Words(PyObject* object, bool writable) {
    if (PyObject_GetBuffer(object, &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE)) throw python_error();
  }
  Words(Words&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;
  Words& operator=(Words&&) = delete;
  ~Words() { PyBuffer_Release(&view_); }  // does nothing after a move
  int64_t* data() const { return static_cast<int64_t*>(view_.buf); }
  int64_t size() const { return static_cast<int64_t>(view_.len / sizeof(int64_t)); }

 private:
  Py_buffer view_{};
};

// Returns the object at a position, still owned by the list, or null beyond the end.
inline PyObject* item(PyObject* list, int64_t i) {
  return i < PyList_GET_SIZE(list) ? PyList_GET_ITEM(list, i) : nullptr;
}

// Owns a reference to the value of an attribute.
class Owned {
 public:
  explicit Owned(PyObject* object) : object_(object) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }

 private:
  PyObject* object_;
};

// Returns the dispatch keys of a dense tensor on this device whose memory simply holds its values. Sparse, negated,
// conjugated, wrapped and inference tensors have other keys, and so do those with a Python dispatch.
c10::DispatchKeySet plain_keys(c10::Device device) {
  const auto dense = c10::DispatchKeySet(c10::computeDispatchKey(std::nullopt, std::nullopt, device));
  const auto backend = dense.highestBackendKey();
  return dense | c10::getAutogradRelatedKeySetFromBackend(backend) |
      c10::getAutocastRelatedKeySetFromBackend(backend) | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);
}

// Returns whether the tensor's Python object is a plain Tensor; one without a Python object counts as plain.
template <class Slot>
auto has_plain_type(const at::Tensor&, const Slot* slot, int) -> decltype(slot->load_pyobj(), true) {
  PyObject* object = slot->load_pyobj();
  return !object || THPVariable_CheckExact(object);
}
template <class Slot>
bool has_plain_type(const at::Tensor& tensor, const Slot*, long) {  // for a torch whose slot has no load_pyobj()
  const Owned object(THPVariable_Wrap(tensor));
  if (!object.get()) throw python_error();
  return THPVariable_CheckExact(object.get());
}

// The dimensions, sizes and strides that the tensors of one row must have.
struct Shape {
  int64_t dimensions;
  const int64_t* sizes;
  const int64_t* strides;
};

struct Kind {
  caffe2::TypeMeta dtype;
  size_t size;  // of an element
};

class Check {
 public:
  explicit Check(c10::Device device) : device_(device), keys_(plain_keys(device)) {}

  // Returns whether a tensor is plain and has this dtype, shape and layout. Writes its address if so.
  bool operator()(c10::TensorImpl* tensor, const Kind& kind, const Shape& shape, int64_t* address) const {
    if (tensor->key_set() != keys_ || tensor->dtype() != kind.dtype || tensor->device() != device_) return false;
    const auto sizes = tensor->sizes();
    if (static_cast<int64_t>(sizes.size()) != shape.dimensions) return false;
    const auto strides = tensor->strides();
    for (int64_t d = 0; d < shape.dimensions; ++d) {
      if (sizes[d] != shape.sizes[d] || (strides[d] != shape.strides[d] && sizes[d] != 1)) return false;
    }
    const auto& storage = tensor->storage();
    if (!storage) return false;
    *address = 0;
    const auto bytes = static_cast<size_t>(tensor->numel()) * kind.size;
    if (!bytes) return true;
    // Somebody may have freed or shrunk the memory without the tensor's knowledge. Tensors here have no gaps.
    const auto start = static_cast<size_t>(tensor->storage_offset()) * kind.size;
    if (start + bytes > storage.nbytes() || !storage.data()) return false;
    *address = reinterpret_cast<int64_t>(storage.mutable_data()) + static_cast<int64_t>(start);
    return true;
  }

 private:
  c10::Device device_;
  c10::DispatchKeySet keys_;
};

// Reads an attribute of objects of one type. If it is a slot, as in DTensor, the slot is read directly.
class Attribute {
 public:
  Attribute(PyTypeObject* type, PyObject* name) : type_(type), name_(name), slot_(get_from(type, name)) {
    PyObject* slot = slot_.get();
    direct_ = slot && Py_IS_TYPE(slot, &PyMemberDescr_Type) && type->tp_getattro == PyObject_GenericGetAttr;
  }
  // Returns a new reference, or null if there is no such attribute.
  PyObject* operator()(PyObject* object) const {
    PyObject* found = direct_ && Py_TYPE(object) == type_
        ? PyMemberDescr_Type.tp_descr_get(slot_.get(), object, reinterpret_cast<PyObject*>(type_))
        : PyObject_GetAttr(object, name_);
    if (!found) PyErr_Clear();
    return found;
  }

 private:
  static PyObject* get_from(PyTypeObject* type, PyObject* name) {
    PyObject* found = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name);
    if (!found) PyErr_Clear();
    return found;
  }
  PyTypeObject* type_;
  PyObject* name_;
  Owned slot_;
  bool direct_;
};

// The local tensor and the specification of a distributed tensor; null if it has no such attribute.
struct Parts {
  Parts(const Attribute& local, const Attribute& spec, PyObject* object) : local(local(object)), spec(spec(object)) {}
  Owned local, spec;
};

enum Argument {
  PARAMS, GRADS, COLUMNS, TABLES, SHAPES, DTYPES, DEVICE, PINNED, PINNED_AT, WRAPPERS, SPECS, GRADIENT_SPECS, ARGUMENTS
};

class Reading {
 public:
  explicit Reading(PyObject* const* arguments)
      : a_(arguments),
        shapes_(a_[SHAPES], false),
        pinned_at_(a_[PINNED_AT], false),
        check_(reinterpret_cast<THPDevice*>(a_[DEVICE])->device),
        rows_(PyList_GET_SIZE(a_[PARAMS])),
        columns_(PyList_GET_SIZE(a_[COLUMNS])) {
    for (int64_t c = 0; c < columns_; ++c) {
      PyObject* dtype = item(a_[DTYPES], c);
      if (!dtype || !THPDtype_Check(dtype) || !PyList_Check(item(a_[COLUMNS], c))) throw_type("a column");
      const auto type = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
      kinds_.push_back({c10::scalarTypeToTypeMeta(type), c10::elementSize(type)});
    }
    for (int64_t c = 0; c < columns_ + 1; ++c) {
      PyObject* table = item(a_[TABLES], c);
      if (!table) throw_type("a table");
      tables_.emplace_back(table, true);
    }
    grads_ = a_[GRADS] == Py_None ? nullptr : a_[GRADS];
    wrappers_ = a_[WRAPPERS] == Py_None ? nullptr : a_[WRAPPERS];
  }

  int64_t run() {
    if (!columns_ || (grads_ && PyList_GET_SIZE(grads_) != rows_)) return CHANGED;
    for (int64_t c = 0; c < columns_; ++c)
      if (PyList_GET_SIZE(column(c)) != rows_) return CHANGED;
    for (const auto& table : tables_)
      if (table.size() != rows_) return CHANGED;
    if (!pinned_stayed()) return CHANGED;
    int64_t count = 0, at = 0;
    for (int64_t i = 0; i < rows_; ++i) {
      const int64_t* words = shapes_.data() + at;
      const int64_t left = shapes_.size() - at;
      if (left < 1 || words[0] < 0 || (left - 1) / 2 < words[0]) return CHANGED;
      at += 1 + 2 * words[0];
      prefetch(i);
      const int64_t state = row(i, {words[0], words + 1, words + 1 + words[0]});
      if (state < 0) return state;
      count += state;
    }
    return count;
  }

 private:
  [[noreturn]] static void throw_type(const char* what) {
    PyErr_Format(PyExc_TypeError, "%s of an address book is missing or of another type", what);
    throw python_error();
  }

  PyObject* column(int64_t c) const { return PyList_GET_ITEM(a_[COLUMNS], c); }

  // Returns the tensor of an object whose type is Tensor or Parameter, else null.
  c10::TensorImpl* plain(PyObject* object) const {
    if (!object || (Py_TYPE(object) != tensor_type_ && Py_TYPE(object) != parameter_type_)) return nullptr;
    return THPVariable_Unpack(object).unsafeGetTensorImpl();
  }

  // With thousands of tensors most of the time goes into waiting for memory: object, then tensor, then storage. Each
  // is prefetched some rows ahead, when the pointer to it has arrived.
  void prefetch(int64_t i) const {
    for (int64_t c = 0; c < columns_; ++c) prefetch(column(c), i);
    if (wrappers_) {
      if (PyObject* object = item(wrappers_, i + 8)) __builtin_prefetch(object);
      return;
    }
    if (grads_) return prefetch(grads_, i);
    if (const auto* tensor = plain(item(a_[PARAMS], i + 2)))
      __builtin_prefetch(tensor->grad().unsafeGetTensorImpl());
  }

  void prefetch(PyObject* list, int64_t i) const {
    if (PyObject* object = item(list, i + 8)) __builtin_prefetch(object);
    if (const auto* tensor = plain(item(list, i + 4))) {
      const auto* bytes = reinterpret_cast<const char*>(tensor);
      for (size_t line = 0; line < sizeof(c10::TensorImpl); line += 64) __builtin_prefetch(bytes + line);
    }
    if (const auto* tensor = plain(item(list, i + 2)))
      __builtin_prefetch(tensor->unsafe_storage().unsafeGetStorageImpl());
  }

  bool pinned_stayed() const {
    const int64_t count = PyList_GET_SIZE(a_[PINNED]);
    if (pinned_at_.size() != count) return false;
    for (int64_t i = 0; i < count; ++i) {
      auto* tensor = plain(item(a_[PINNED], i));
      if (!tensor || !tensor->has_storage()) return false;
      if (reinterpret_cast<int64_t>(tensor->mutable_data()) != pinned_at_.data()[i]) return false;
    }
    return true;
  }

  // Returns 1 if the row has a gradient, 0 if it has none, or CHANGED or UNKNOWN.
  int64_t row(int64_t i, const Shape& shape) {
    for (int64_t c = 0; c < columns_; ++c) {
      auto* tensor = plain(item(column(c), i));
      if (!tensor || !check_(tensor, kinds_[c], shape, &tables_[c ? c + 1 : 0].data()[i])) return CHANGED;
    }
    return wrappers_ ? distributed_gradient(i, shape) : gradient(i, shape);
  }

  int64_t gradient(int64_t i, const Shape& shape) {
    PyObject* param = item(a_[PARAMS], i);
    if (!param || param != item(column(0), i)) return CHANGED;
    if (grads_) {
      PyObject* object = item(grads_, i);
      if (object == Py_None) return none(i);
      return found(i, plain(object), shape);
    }
    const at::Tensor& tensor = THPVariable_Unpack(param).unsafeGetTensorImpl()->grad();
    if (!tensor.defined()) return none(i);
    auto* impl = tensor.unsafeGetTensorImpl();
    return has_plain_type(tensor, impl->pyobj_slot(), 0) ? found(i, impl, shape) : CHANGED;
  }

  int64_t distributed_gradient(int64_t i, const Shape& shape) {
    PyObject* param = item(wrappers_, i);
    if (!param || param != item(a_[PARAMS], i) || !is_tensor(param)) return CHANGED;
    const Parts whole(*local_, *spec_, param);
    if (!whole.spec.get() || whole.spec.get() != item(a_[SPECS], i)) return CHANGED;
    if (!whole.local.get() || whole.local.get() != item(column(0), i)) return CHANGED;
    const Owned object(grads_ ? Py_XNewRef(item(grads_, i)) : wrap(THPVariable_Unpack(param)));
    if (object.get() == Py_None) return none(i);
    if (!object.get() || Py_TYPE(object.get()) != Py_TYPE(param)) return CHANGED;
    const Parts part(*local_, *spec_, object.get());
    if (!part.spec.get() || part.spec.get() != item(a_[GRADIENT_SPECS], i)) return UNKNOWN;
    return found(i, plain(part.local.get()), shape);
  }

  static PyObject* wrap(const at::Tensor& param) {
    const at::Tensor& tensor = param.unsafeGetTensorImpl()->grad();
    return tensor.defined() ? THPVariable_Wrap(tensor) : Py_NewRef(Py_None);
  }

  // Usually all wrappers have one type, so its attributes are looked up once.
  bool is_tensor(PyObject* object) {
    if (Py_TYPE(object) == known_) return true;
    if (!PyObject_TypeCheck(object, tensor_type_)) return false;
    known_ = Py_TYPE(object);
    local_.emplace(known_, local_name);
    spec_.emplace(known_, spec_name);
    return true;
  }

  int64_t none(int64_t i) { return tables_[1].data()[i] = 0; }

  int64_t found(int64_t i, c10::TensorImpl* tensor, const Shape& shape) {
    int64_t* address = &tables_[1].data()[i];
    if (!tensor || !check_(tensor, kinds_[0], shape, address)) return CHANGED;
    if (!*address) *address = 1;  // an empty gradient has no address, and 0 means that there is none
    return 1;
  }

  PyObject* const* a_;
  PyObject* grads_;
  PyObject* wrappers_;
  Words shapes_, pinned_at_;
  std::vector<Words> tables_;
  std::vector<Kind> kinds_;
  Check check_;
  int64_t rows_, columns_;
  PyTypeObject* tensor_type_ = reinterpret_cast<PyTypeObject*>(THPVariableClass);
  PyTypeObject* parameter_type_ = reinterpret_cast<PyTypeObject*>(ParameterClass);
  PyTypeObject* known_ = nullptr;
  std::optional<Attribute> local_, spec_;
};

PyObject* read(PyObject*, PyObject* const* a, Py_ssize_t count) {
  const auto is_list = [&](int i) { return PyList_Check(a[i]); };
  if (count != ARGUMENTS || !is_list(PARAMS) || !(a[GRADS] == Py_None || is_list(GRADS)) || !is_list(COLUMNS) ||
      !is_list(TABLES) || !is_list(DTYPES) || !THPDevice_Check(a[DEVICE]) || !is_list(PINNED) ||
      !(a[WRAPPERS] == Py_None || is_list(WRAPPERS)) || !is_list(SPECS) || !is_list(GRADIENT_SPECS)) {
    PyErr_SetString(PyExc_TypeError, "read() takes lists, arrays and a device, as an address book has them");
    return nullptr;
  }
  try {
    return PyLong_FromLongLong(Reading(a).run());
  } catch (python_error&) {  // the error is already set in Python
    return nullptr;
  } catch (const std::exception&) {  // treat a tensor that raises as changed
    return PyLong_FromLongLong(CHANGED);
  }
}

// Tells autograd that the tensors of every row with a gradient were written: bump(columns, gradients, wrappers or None).
PyObject* bump(PyObject*, PyObject* const* a, Py_ssize_t count) {
  if (count != 3 || !PyList_Check(a[0]) || !(a[2] == Py_None || PyList_Check(a[2]))) {
    PyErr_SetString(PyExc_TypeError, "bump() takes a list of columns, a table and a list or None");
    return nullptr;
  }
  try {
    const Words gradients(a[1], false);
    auto* tensor = reinterpret_cast<PyTypeObject*>(THPVariableClass);
    const auto bump_list = [&](PyObject* list) {
      for (int64_t i = 0; i < gradients.size(); ++i) {
        if (!gradients.data()[i]) continue;
        PyObject* object = item(list, i);
        if (!object || !PyObject_TypeCheck(object, tensor)) continue;
        THPVariable_Unpack(object).unsafeGetTensorImpl()->bump_version();
      }
    };
    for (Py_ssize_t c = 0; c < PyList_GET_SIZE(a[0]); ++c)
      if (PyList_Check(item(a[0], c))) bump_list(item(a[0], c));
    if (a[2] != Py_None) bump_list(a[2]);
    Py_RETURN_NONE;
  } catch (python_error&) {  // the error is already set in Python
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef methods[] = {
    {"read", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(read)), METH_FASTCALL, nullptr},
    {"bump", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(bump)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "offbeat_reader", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit_offbeat_reader() {
  local_name = PyUnicode_InternFromString("_local_tensor");
  spec_name = PyUnicode_InternFromString("_spec");
  return local_name && spec_name ? PyModule_Create(&module) : nullptr;
}
