#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "transfer/packing.h"

namespace cxl_offload::bindings {
namespace {

namespace py = pybind11;

std::byte* bytes_at(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

void bind_packing(py::module_& module) {
  py::enum_<Code>(module, "Code").value("int4", Code::kInt4).value("fp8", Code::kFp8);
  py::enum_<Element>(module, "Element")
      .value("float16", Element::kFloat16)
      .value("bfloat16", Element::kBfloat16)
      .value("float32", Element::kFloat32);
  py::class_<Packing>(module, "Packing")
      .def(py::init<Code, Element, size_t>(), py::arg("code"), py::arg("element"),
           py::arg("group_elements"))
      .def("code_bytes", &Packing::code_bytes, py::arg("count"))
      .def("packed_bytes", &Packing::packed_bytes, py::arg("count"))
      .def(
          "pack",
          [](const Packing& packing, uintptr_t source, size_t count, uintptr_t target) {
            packing.pack(bytes_at(source), count, bytes_at(target));
          },
          py::arg("source"), py::arg("count"), py::arg("target"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "unpack",
          [](const Packing& packing, uintptr_t source, size_t count, uintptr_t target) {
            packing.unpack(bytes_at(source), count, bytes_at(target));
          },
          py::arg("source"), py::arg("count"), py::arg("target"),
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_transfer(py::module_& module) { bind_packing(module); }

}  // namespace cxl_offload::bindings
