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

// Checks a setting where it is given, so that a wrong one is not found only at the first step.
template <class R>
R checked(R rule) {
  kernels::check_rule(rule);
  return rule;
}

void bind_rules(py::module_& module) {
  py::class_<kernels::Adam>(module, "AdamRule")
      .def(py::init([](int64_t step, double lr, std::pair<double, double> betas, double eps,
                       double weight_decay, bool decoupled, bool bias_correction,
                       double grad_scale) {
             return checked(kernels::Adam{step, lr, betas.first, betas.second, eps, weight_decay,
                                          decoupled, bias_correction, grad_scale});
           }),
           py::kw_only(), py::arg("step"), py::arg("lr"), py::arg("betas"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("decoupled"), py::arg("bias_correction") = true,
           py::arg("grad_scale") = 1.0);
  py::class_<kernels::Adagrad>(module, "AdagradRule")
      .def(py::init([](int64_t step, double lr, double lr_decay, double eps, double weight_decay,
                       double grad_scale) {
             return checked(kernels::Adagrad{step, lr, lr_decay, eps, weight_decay, grad_scale});
           }),
           py::kw_only(), py::arg("step"), py::arg("lr"), py::arg("lr_decay"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("grad_scale") = 1.0);
  py::class_<kernels::Lion>(module, "LionRule")
      .def(py::init([](double lr, std::pair<double, double> betas, double weight_decay,
                       double grad_scale) {
             return checked(kernels::Lion{lr, betas.first, betas.second, weight_decay, grad_scale});
           }),
           py::kw_only(), py::arg("lr"), py::arg("betas"), py::arg("weight_decay"),
           py::arg("grad_scale") = 1.0);
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
  bind_rules(module);
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
