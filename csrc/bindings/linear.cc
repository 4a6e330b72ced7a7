#include "kernels/linear.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <tuple>

#include "bindings/bind.h"

namespace cxl_offload::bindings {

namespace py = pybind11;

using kernels::GroupScales;

void bind_linear(py::module_& module) {
  py::enum_<GroupScales>(module, "GroupScales")
      .value("low_step", GroupScales::kLowStep)
      .value("inverse_low", GroupScales::kInverseLow)
      .value("zero_step", GroupScales::kZeroStep);
  module.def(
      "run_linear",
      [](TensorView x, TensorView weight, TensorView y, kernels::WorkerTeam& team,
         std::optional<TensorView> bias, std::optional<TensorView> scale,
         std::optional<std::pair<TensorView, GroupScales>> groups, const std::string& isa,
         std::shared_ptr<os::Kernel> kernel) {
        const py::gil_scoped_release released;
        kernels::Linear given;
        given.x = std::move(x);
        given.weight = std::move(weight);
        given.y = std::move(y);
        if (bias) given.bias = std::move(*bias);
        if (scale) given.scale = std::move(*scale);
        if (groups) std::tie(given.groups, given.group_scales) = std::move(*groups);
        kernels::run_linear(given, team, isa.empty() ? best_isa() : parse_isa(isa), kernel.get());
      },
      py::arg("x"), py::arg("weight"), py::arg("y"), py::arg("team"), py::kw_only(),
      py::arg("bias") = py::none(), py::arg("scale") = py::none(), py::arg("groups") = py::none(),
      py::arg("isa") = "", py::arg("kernel") = py::none(), "See kernels/linear.h.");
}

}  // namespace cxl_offload::bindings
