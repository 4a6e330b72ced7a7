#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "core/fork_guard.h"
#include "os/kernel.h"
#include "os/linux_kernel.h"

namespace cxl_offload::bindings {

namespace py = pybind11;

using os::Headroom;
using os::Kernel;
using os::PageKind;

void bind_os(py::module_& module) {
  py::enum_<PageKind>(module, "PageKind")
      .value("base", PageKind::kBase)
      .value("transparent_huge", PageKind::kTransparentHuge)
      .value("huge_2mib", PageKind::kHuge2MiB)
      .value("huge_1gib", PageKind::kHuge1GiB);

  py::class_<Headroom>(module, "Headroom")
      .def_readonly("total_bytes", &Headroom::total_bytes)
      .def_readonly("free_bytes", &Headroom::free_bytes)
      .def_readonly("limit", &Headroom::limit);

  py::class_<Kernel, std::shared_ptr<Kernel>>(module, "Kernel")
      .def_property_readonly("name", &Kernel::name)
      .def_property_readonly("allowed_nodes",
                             [](const Kernel& kernel) { return kernel.allowed_nodes().nodes(); })
      .def_property_readonly("local_node", &Kernel::local_node)
      .def("movable_bytes", &Kernel::movable_bytes, py::arg("node"))
      .def("page_bytes", &Kernel::page_bytes, py::arg("pages"))
      .def("node_headroom", &Kernel::node_headroom, py::arg("node"), py::arg("pages"),
           py::call_guard<Unlocked>())
      .def("process_headroom", &Kernel::process_headroom, py::call_guard<Unlocked>())
      .def("fallback_order", &Kernel::fallback_order, py::arg("node"));

  py::class_<ForkGuard>(module, "ForkGuard")
      .def(py::init())
      .def_property_readonly("in_child", &ForkGuard::in_child)
      .def("refuse_in_child", &ForkGuard::refuse_in_child, py::arg("what"));

  module.def("linux_kernel", &os::make_linux_kernel, py::arg("dax_root") = "",
             "The kernel of this machine; Device-DAX devices are looked for below dax_root.");
}

}  // namespace cxl_offload::bindings
