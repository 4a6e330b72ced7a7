#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "os/fault_plan.h"
#include "os/simulated_kernel.h"

namespace cxl_offload::bindings {
namespace {

namespace py = pybind11;

using os::FaultEffect;
using os::NodeId;
using os::SimulatedKernel;

using Pools = std::vector<std::pair<size_t, uint64_t>>;
using DaxRow = std::tuple<std::string, uint64_t, size_t, std::string, int>;
using NodeRow = std::tuple<NodeId, uint64_t, uint64_t, Pools>;

std::shared_ptr<SimulatedKernel> make_kernel(const std::vector<NodeRow>& nodes,
                                             std::vector<std::vector<int>> distances,
                                             NodeId initiator, std::vector<NodeId> allowed_nodes,
                                             std::optional<uint64_t> process_limit_bytes,
                                             const std::vector<NodeId>& movable_nodes,
                                             const std::vector<DaxRow>& dax) {
  os::SimulatedMachine machine;
  for (const auto& [id, total_bytes, used_by_others_bytes, pools] : nodes) {
    os::SimulatedNode node{id, total_bytes, used_by_others_bytes, {}, false};
    node.movable = std::ranges::find(movable_nodes, id) != movable_nodes.end();
    for (const auto& [page_bytes, pages] : pools) node.pools.push_back({page_bytes, pages});
    machine.nodes.push_back(std::move(node));
  }
  machine.distances = std::move(distances);
  machine.initiator = initiator;
  machine.allowed_nodes = std::move(allowed_nodes);
  machine.process_limit_bytes = process_limit_bytes;
  for (const auto& [name, size_bytes, align_bytes, mode, target_node] : dax) {
    machine.dax.push_back({name, size_bytes, align_bytes, mode, target_node});
  }
  return std::make_shared<SimulatedKernel>(machine);
}

std::map<std::string, uint64_t> calls_of(const SimulatedKernel& kernel) {
  std::map<std::string, uint64_t> calls;
  for (size_t i = 0; i < os::kOperationCount; ++i) {
    const auto operation = static_cast<os::Operation>(i);
    calls[os::operation_name(operation)] = kernel.faults().calls(operation);
  }
  return calls;
}

}  // namespace

void bind_simulated(py::module_& module) {
  py::enum_<FaultEffect>(module, "FaultEffect")
      .value("refuse", FaultEffect::kRefuse)
      .value("partial", FaultEffect::kPartial)
      .value("stray", FaultEffect::kStray)
      .value("hidden", FaultEffect::kHidden)
      .value("shared", FaultEffect::kShared)
      .value("signal", FaultEffect::kSignal);

  py::class_<SimulatedKernel, os::Kernel, std::shared_ptr<SimulatedKernel>>(module,
                                                                            "SimulatedKernel")
      .def(py::init(&make_kernel), py::arg("nodes"), py::arg("distances"), py::kw_only(),
           py::arg("initiator"), py::arg("allowed_nodes"), py::arg("process_limit_bytes"),
           py::arg("movable_nodes") = std::vector<NodeId>(), py::arg("dax") = std::vector<DaxRow>(),
           "nodes: (id, total bytes, bytes used by others, [(page bytes, pages)]) of every node. "
           "dax: (name, bytes, alignment, mode, target node) of every device.")
      .def("used_bytes", &SimulatedKernel::used_bytes, py::arg("node"))
      .def_property_readonly("mapping_count", &SimulatedKernel::mapping_count)
      .def("dax_mapped_bytes", &SimulatedKernel::dax_mapped_bytes, py::arg("device"))
      .def("set_used_by_others", &SimulatedKernel::set_used_by_others, py::arg("node"),
           py::arg("nbytes"))
      .def("set_pool", &SimulatedKernel::set_pool, py::arg("node"), py::arg("page_bytes"),
           py::arg("pages"))
      .def(
          "fail",
          [](const SimulatedKernel& kernel, const std::string& operation, uint64_t call, int code,
             FaultEffect effect, uint64_t times) {
            for (uint64_t i = 0; i < times; ++i) {
              kernel.faults().add({os::parse_operation(operation), effect, call + i, code, -1});
            }
          },
          py::arg("operation"), py::kw_only(), py::arg("call") = 1, py::arg("code") = ENOMEM,
          py::arg("effect") = FaultEffect::kRefuse, py::arg("times") = 1,
          "Lets the call-th call of an operation from now, and those after it, fail.")
      .def(
          "fail_at_random",
          [](const SimulatedKernel& kernel, const std::vector<std::string>& operations,
             double probability, uint64_t seed, int code) {
            os::RandomFaults faults{seed, probability, {}, code};
            for (const std::string& operation : operations) {
              faults.operations.push_back(os::parse_operation(operation));
            }
            kernel.faults().add_random(faults);
          },
          py::arg("operations"), py::kw_only(), py::arg("probability"), py::arg("seed"),
          py::arg("code") = ENOMEM,
          "Lets each call of these operations fail with a probability, decided by the seed.")
      .def("clear_faults", [](const SimulatedKernel& kernel) { kernel.faults().clear(); })
      .def_property_readonly("calls", &calls_of)
      .def_property_readonly("faults_fired", [](const SimulatedKernel& kernel) {
        return kernel.faults().fired().size();
      });
}

}  // namespace cxl_offload::bindings
