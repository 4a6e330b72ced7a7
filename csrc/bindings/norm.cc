#include "kernels/norm.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "bindings/lost.h"

namespace cxl_offload::bindings {

namespace py = pybind11;

namespace {

void refuse_lost(const kernels::Norm& given, bool is_done) {
  check_memory([&](LostParts& lost) {
    if (!is_done) kernels::check_norm(given);
    lost.add(given.x);
    lost.add(given.weight);
    if (is_done) lost.add(given.y);
  });
}

void compute(const kernels::Norm& given, kernels::WorkerTeam& team, Isa isa) {
  refuse_lost(given, false);
  settle(given.y);
  kernels::run_norm(given, team, isa);
  refuse_lost(given, true);
}

}  // namespace

void bind_norm(py::module_& module) {
  module.def(
      "run_norm",
      [](TensorView x, TensorView weight, TensorView y, float eps, kernels::WorkerTeam& team,
         const std::string& isa) {
        const Unlocked released;
        compute({std::move(x), std::move(weight), std::move(y), eps}, team,
                isa.empty() ? best_isa() : parse_isa(isa));
      },
      py::arg("x"), py::arg("weight"), py::arg("y"), py::arg("eps"), py::arg("team"),
      py::arg("isa") = "", "See kernels/norm.h.");
  module.def(
      "run_plain_norm",
      [](uintptr_t x, uintptr_t weight, uintptr_t y, std::pair<int64_t, int64_t> shape,
         const std::string& dtype, float eps, kernels::WorkerTeam& team) {
        const Unlocked released;
        const auto [rows, width] = shape;
        const Dtype type = parse_dtype(dtype);
        compute(
            {make_view(x, type, {rows, width}, {width, 1}), make_view(weight, type, {width}, {1}),
             make_view(y, type, {rows, width}, {width, 1}), eps},
            team, best_isa());
      },
      py::arg("x"), py::arg("weight"), py::arg("y"), py::arg("shape"), py::arg("dtype"),
      py::arg("eps"), py::arg("team"),
      "As run_norm(), of contiguous tensors of one type at these addresses; shape: (rows, width).");
}

}  // namespace cxl_offload::bindings
