// A small simulated machine for tests of the placement layers: two sockets and a CPU-less node
// nearer to the first, 64 MiB each, without a reserve.
#ifndef CXL_OFFLOAD_TESTS_SIMULATED_GROUND_H_
#define CXL_OFFLOAD_TESTS_SIMULATED_GROUND_H_

#include <memory>
#include <utility>

#include "memory/numa_region.h"
#include "os/simulated_kernel.h"

namespace cxl_offload::memory {

inline constexpr size_t kMiB = size_t{1} << 20;
inline constexpr size_t kPage = 4096;

inline os::SimulatedMachine ground_machine() {
  os::SimulatedMachine machine;
  for (os::NodeId node : {0, 1, 2}) machine.nodes.push_back({node, 64 * kMiB, 0, {}});
  machine.distances = {{10, 21, 24}, {21, 10, 34}, {24, 34, 10}};
  return machine;
}

struct Ground {
  explicit Ground(const os::SimulatedMachine& machine = ground_machine(),
                  std::map<os::NodeId, uint64_t> capacities = {})
      : kernel(std::make_shared<os::SimulatedKernel>(machine)),
        budget(std::make_shared<NodeBudget>(std::move(capacities))) {}

  Placer placer() const { return {kernel, budget, Reserve{0.0, 0, 0}, 2}; }
  uint64_t charged(os::NodeId node) const {
    const auto use = budget->use();
    const auto at = use.find(node);
    return at == use.end() ? 0 : at->second.current_bytes;
  }
  // What the budget says against what the kernel says.
  bool accounts_agree() const {
    for (os::NodeId node : {0, 1, 2}) {
      if (charged(node) != kernel->used_bytes(node)) return false;
    }
    return true;
  }
  bool all_returned() const {
    bool none = kernel->mapping_count() == 0;
    for (os::NodeId node : {0, 1, 2}) none = none && kernel->used_bytes(node) + charged(node) == 0;
    return none;
  }

  std::shared_ptr<os::SimulatedKernel> kernel;
  std::shared_ptr<NodeBudget> budget;
};

inline Rule rule_of(RuleKind kind, std::vector<Share> shares) {
  Rule rule;
  rule.kind = kind;
  rule.shares = std::move(shares);
  return rule;
}

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_TESTS_SIMULATED_GROUND_H_
