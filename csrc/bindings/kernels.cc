#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "kernels/openmp.h"
#include "kernels/shared_cpus.h"
#include "kernels/update.h"
#include "kernels/update_check.h"
#include "probe/update_traffic.h"

namespace cxl_offload::bindings {
namespace {

namespace py = pybind11;

using kernels::WorkerTeam;

void bind_views(py::module_& module) {
  py::class_<TensorView>(module, "TensorView")
      .def(py::init([](uintptr_t address, const std::string& dtype, std::vector<int64_t> shape,
                       std::vector<int64_t> strides) {
             return make_view(address, parse_dtype(dtype), std::move(shape), std::move(strides));
           }),
           py::arg("address"), py::arg("dtype"), py::arg("shape"), py::arg("strides"))
      .def_property_readonly(
          "address", [](const TensorView& view) { return reinterpret_cast<uintptr_t>(view.data); })
      .def_property_readonly("dtype", [](const TensorView& view) { return dtype_name(view.dtype); })
      .def_readonly("shape", &TensorView::shape)
      .def_readonly("strides", &TensorView::strides)
      .def_property_readonly("numel", &TensorView::numel)
      .def_property_readonly("nbytes", &TensorView::bytes)
      .def_property_readonly("is_contiguous", &TensorView::is_contiguous);
}

void bind_team(py::module_& module) {
  using Group = std::tuple<int, size_t, std::vector<int>>;
  py::class_<WorkerTeam>(module, "WorkerTeam")
      .def(py::init([](const std::vector<Group>& groups) {
             std::vector<kernels::WorkerGroup> given;
             for (const auto& [node, threads, cpus] : groups) {
               given.push_back({node, threads, cpus});
             }
             return std::make_unique<WorkerTeam>(std::move(given));
           }),
           py::arg("groups"), "Groups are (node, threads, cpus); see kernels/worker_team.h.")
      .def_property_readonly("threads", &WorkerTeam::threads)
      .def_property_readonly("groups", [](const WorkerTeam& team) {
        std::vector<Group> groups;
        for (const kernels::WorkerGroup& group : team.groups()) {
          groups.emplace_back(group.node, group.threads, group.cpus);
        }
        return groups;
      });
}

void bind_shared_cpus(py::module_& module) {
  py::class_<kernels::SharedCpus, std::unique_ptr<kernels::SharedCpus, WithoutGil>>(module,
                                                                                    "SharedCpus")
      .def(py::init(), py::call_guard<Unlocked>())
      .def_property_readonly("sleeping_seconds", &kernels::SharedCpus::sleeping_seconds)
      .def_property_readonly("why_off", &kernels::SharedCpus::why_off);
  py::class_<kernels::SleepingWaits, std::unique_ptr<kernels::SleepingWaits, WithoutGil>>(
      module, "SleepingWaits")
      .def(py::init(), py::call_guard<Unlocked>());
  module.def("why_openmp_cannot_sleep", &kernels::why_openmp_cannot_sleep,
             "Why the two do nothing, or empty; see kernels/openmp.h.");
}

}  // namespace

void bind_kernels(py::module_& module) {
  bind_views(module);
  bind_team(module);
  bind_shared_cpus(module);
  module.attr("STATE_BLOCK") = kernels::kCodedElements;
  module.def(
      "update_traffic",
      [](const std::vector<std::tuple<uintptr_t, size_t, bool>>& streams, size_t blocks,
         const std::vector<int>& cpus, size_t ahead_bytes, const std::string& isa) {
        std::vector<probe::TrafficStream> given;
        for (const auto& [address, lines, written] : streams) {
          given.push_back({reinterpret_cast<std::byte*>(address), lines, written});
        }
        const Isa chosen = isa.empty() ? best_isa() : parse_isa(isa);
        return probe::update_traffic(given, blocks, cpus, ahead_bytes, chosen);
      },
      py::arg("streams"), py::arg("blocks"), py::arg("cpus"), py::kw_only(),
      py::arg("ahead_bytes") = 0, py::arg("isa") = "", py::call_guard<Unlocked>(),
      "Seconds of one pass over streams of (address, lines a block, written); see "
      "probe/update_traffic.h.");
}

}  // namespace cxl_offload::bindings
