// What this session holds on every node, and how much it may hold.
#ifndef CXL_OFFLOAD_MEMORY_NODE_BUDGET_H_
#define CXL_OFFLOAD_MEMORY_NODE_BUDGET_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "memory/run_map.h"
#include "os/node_set.h"

namespace cxl_offload::memory {

struct NodeUse {
  uint64_t current_bytes = 0;
  uint64_t peak_bytes = 0;
  uint64_t total_bytes = 0;  // ever charged
  std::optional<uint64_t> capacity_bytes;
};

class NodeBudget {
 public:
  explicit NodeBudget(std::map<os::NodeId, uint64_t> capacities)
      : capacities_(std::move(capacities)) {}

  // Charges all of it or nothing. Throws OutOfMemory naming the node whose capacity would be
  // passed.
  void charge(const NodeBytes& bytes);
  void refund(const NodeBytes& bytes) noexcept;
  // Refunds `out` and charges `in` in one step. No limit holds here: the pages have moved already.
  void exchange(const NodeBytes& out, const NodeBytes& in);
  // Bytes that may still be charged to the node; nothing when it has no capacity set.
  std::optional<uint64_t> room(os::NodeId node) const;
  std::map<os::NodeId, NodeUse> use() const;

 private:
  mutable std::mutex mutex_;
  const std::map<os::NodeId, uint64_t> capacities_;
  std::map<os::NodeId, NodeUse> use_;
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_NODE_BUDGET_H_
