#include "bindings/plain_tensors.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "bindings/attributes.h"
#include "bindings/bind.h"

namespace cxl_offload::bindings {
namespace {

namespace py = pybind11;

struct Names {
  Name is_cpu{"is_cpu"};
  Name layout{"layout"};
  Name dtype{"dtype"};
  Name shape{"shape"};
  Name is_contiguous{"is_contiguous"};
  Name nbytes{"nbytes"};
  Name data_ptr{"data_ptr"};
};

const Names& names() {
  static const Names all;
  return all;
}

// While torch records operators, sizes are tensors, which are indices too.
uint64_t number(const py::object& given) {
  const py::object index = PyLong_Check(given.ptr()) ? given : owned(PyNumber_Index(given.ptr()));
  const uint64_t value = PyLong_AsUnsignedLongLong(index.ptr());
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

std::vector<int64_t> lengths_of(py::handle tensor) {
  const py::object shape = attribute(tensor, names().shape);
  std::vector<int64_t> lengths(py::len(shape));
  for (size_t i = 0; i < lengths.size(); ++i) {
    lengths[i] = static_cast<int64_t>(number(owned(PySequence_GetItem(shape.ptr(), i))));
  }
  return lengths;
}

}  // namespace

PlainTensors::PlainTensors(const py::tuple& classes, const py::dict& dtypes, py::object strided,
                           py::handle table)
    : classes_(classes),
      strided_(std::move(strided)),
      table_(table),
      is_neg_(classes[0].attr("is_neg")),
      storage_offset_(classes[0].attr("storage_offset")),
      untyped_storage_(classes[0].attr("untyped_storage")) {
  for (const auto& [dtype, name] : dtypes) {
    dtypes_.emplace_back(py::reinterpret_borrow<py::object>(dtype),
                         parse_dtype(name.cast<std::string>()));
  }
}

std::optional<Dtype> PlainTensors::dtype_of(py::handle tensor) const {
  const py::object dtype = attribute(tensor, names().dtype);
  for (const auto& [known, type] : dtypes_) {
    if (dtype.is(known)) return type;
  }
  return std::nullopt;
}

bool PlainTensors::is_own_class(py::handle tensor) const {
  const PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
  return std::ranges::any_of(classes_,
                             [type](const py::handle& each) { return each.ptr() == type; });
}

// As the table's: all but the storage, and whether numbers are negated.
std::optional<TensorView> PlainTensors::by_attributes(py::handle tensor) const {
  const bool is_dense = attribute(tensor, names().is_cpu).ptr() == Py_True &&
                        attribute(tensor, names().layout).is(strided_) &&
                        call(tensor, names().is_contiguous).ptr() == Py_True;
  const std::optional<Dtype> dtype = is_dense ? dtype_of(tensor) : std::nullopt;
  if (!dtype) return std::nullopt;
  TensorView view{nullptr, *dtype, lengths_of(tensor), {}};
  view.strides = row_major_strides(view.shape);
  view.data = reinterpret_cast<std::byte*>(number(call(tensor, names().data_ptr)));
  return view;
}

std::optional<TensorView> PlainTensors::view(py::handle tensor, py::object* kept) const {
  if (!is_own_class(tensor)) return std::nullopt;
  std::optional<TensorView> view = table_.is_there() ? table_.read(tensor) : by_attributes(tensor);
  if (!view || call_found(is_neg_, tensor).ptr() != Py_False) return std::nullopt;
  const auto address = reinterpret_cast<uintptr_t>(view->data);
  if (address % dtype_bytes(view->dtype) != 0) return std::nullopt;
  if (view->numel() == 0) return view;
  const uint64_t needed =
      (number(call_found(storage_offset_, tensor)) + view->numel()) * dtype_bytes(view->dtype);
  py::object storage = call_found(untyped_storage_, tensor);
  const bool is_held = address != 0 && number(call(storage, names().nbytes)) >= needed;
  if (!is_held) return std::nullopt;
  if (kept != nullptr) *kept = std::move(storage);
  return view;
}

void bind_plain_tensors(py::module_& module) {
  py::class_<PlainTensors>(module, "PlainTensors")
      .def(py::init<const py::tuple&, const py::dict&, py::object, py::handle>(),
           py::arg("classes"), py::arg("dtypes"), py::kw_only(), py::arg("strided"),
           py::arg("table") = py::none())
      .def(
          "view", [](const PlainTensors& plain, py::handle tensor) { return plain.view(tensor); },
          py::arg("tensor"), "A view, or None; see bindings/plain_tensors.h.");
}

}  // namespace cxl_offload::bindings
