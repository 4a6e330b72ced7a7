#include "memory/node_budget.h"

#include <algorithm>
#include <string>

#include "core/error.h"

namespace cxl_offload::memory {

void NodeBudget::charge(const NodeBytes& bytes) {
  const std::lock_guard lock(mutex_);
  for (const auto& [node, amount] : bytes) {
    const auto capacity = capacities_.find(node);
    if (capacity == capacities_.end()) continue;
    const uint64_t used = use_[node].current_bytes;
    if (amount > capacity->second - std::min(used, capacity->second)) {
      throw OutOfMemory("place " + format_bytes(amount) + " on node " + std::to_string(node) +
                        ": " + format_bytes(used) + " of its capacity of " +
                        format_bytes(capacity->second) +
                        " are in use; raise the capacity or move a share elsewhere");
    }
  }
  for (const auto& [node, amount] : bytes) {
    NodeUse& use = use_[node];
    use.current_bytes += amount;
    use.total_bytes += amount;
    use.peak_bytes = std::max(use.peak_bytes, use.current_bytes);
  }
}

void NodeBudget::refund(const NodeBytes& bytes) noexcept {
  const std::lock_guard lock(mutex_);
  for (const auto& [node, amount] : bytes) {
    const auto use = use_.find(node);
    if (use != use_.end()) use->second.current_bytes -= std::min(amount, use->second.current_bytes);
  }
}

void NodeBudget::exchange(const NodeBytes& out, const NodeBytes& in) {
  const std::lock_guard lock(mutex_);
  for (const auto& [node, amount] : in) use_[node];  // done first, because this may need memory
  for (const auto& [node, amount] : out) {
    const auto use = use_.find(node);
    if (use != use_.end()) use->second.current_bytes -= std::min(amount, use->second.current_bytes);
  }
  for (const auto& [node, amount] : in) {
    NodeUse& use = use_[node];
    const auto before = out.find(node);
    const uint64_t gone = before == out.end() ? 0 : before->second;
    use.current_bytes += amount;
    use.total_bytes += amount - std::min(amount, gone);
    use.peak_bytes = std::max(use.peak_bytes, use.current_bytes);
  }
}

std::optional<uint64_t> NodeBudget::room(os::NodeId node) const {
  const std::lock_guard lock(mutex_);
  const auto capacity = capacities_.find(node);
  if (capacity == capacities_.end()) return std::nullopt;
  const auto use = use_.find(node);
  const uint64_t used = use == use_.end() ? 0 : use->second.current_bytes;
  return capacity->second - std::min(used, capacity->second);
}

std::map<os::NodeId, NodeUse> NodeBudget::use() const {
  const std::lock_guard lock(mutex_);
  auto result = use_;
  for (const auto& [node, capacity] : capacities_) result[node].capacity_bytes = capacity;
  return result;
}

}  // namespace cxl_offload::memory
