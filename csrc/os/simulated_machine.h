// What a simulated machine has, and who holds how much of it.
#ifndef CXL_OFFLOAD_OS_SIMULATED_MACHINE_H_
#define CXL_OFFLOAD_OS_SIMULATED_MACHINE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "os/kernel.h"
#include "os/simulated_dax.h"

namespace cxl_offload::os {

struct SimulatedPool {
  size_t page_bytes = kHugePageBytes;
  uint64_t pages = 0;
};

struct SimulatedNode {
  NodeId id = 0;
  uint64_t total_bytes = 0;  // huge-page pools included, as in MemTotal
  uint64_t used_by_others_bytes = 0;
  std::vector<SimulatedPool> pools;
  bool movable = false;  // all of it in ZONE_MOVABLE
};

struct SimulatedMachine {
  std::vector<SimulatedNode> nodes;
  // distances[i][j]: from nodes[i] to nodes[j]. Empty: 10 on the diagonal, 20 elsewhere.
  std::vector<std::vector<int>> distances;
  // The node whose CPUs run the process: first touch puts pages there.
  NodeId initiator = 0;
  // The nodes that a cpuset allows; empty if all are allowed.
  std::vector<NodeId> allowed_nodes;
  // The limit of a cgroup's memory.max, for base pages of this process on all nodes together.
  std::optional<uint64_t> process_limit_bytes;
  // true: mapping explicit huge pages sets them aside in the pools, or is refused, as MAP_HUGETLB
  // does. false: mapping always succeeds and populating may fail, as with MAP_NORESERVE as well.
  bool reserves_huge_pages = true;
  std::vector<SimulatedDax> dax;
};

// Free and used pages of every node of a machine. Not thread-safe.
class NodeLedger {
 public:
  // Throws InvalidArgument for a machine that cannot exist.
  NodeLedger(const SimulatedMachine& machine, size_t base_page_bytes);

  const NodeSet& allowed() const { return allowed_; }
  bool is_movable(NodeId id) const { return node(id).movable; }
  // Throws InvalidArgument for a node that is not there.
  void check_node(NodeId node) const;
  // Allowed nodes other than `node`, nearest first; ties by id.
  std::vector<NodeId> fallback_order(NodeId node) const;

  // Takes up to `pages` pages of that size on the node; returns how many.
  uint64_t take(NodeId node, size_t page_bytes, uint64_t pages);
  void give_back(NodeId node, size_t page_bytes, uint64_t pages);
  // Sets `pages` huge pages aside on no node in particular; false: not that many are free.
  bool reserve(size_t page_bytes, uint64_t pages);
  void cancel_reservation(size_t page_bytes, uint64_t pages);

  uint64_t total_bytes(NodeId node, size_t page_bytes) const;
  uint64_t free_bytes(NodeId node, size_t page_bytes) const;
  // Counts pages of this process, of every size.
  uint64_t used_bytes(NodeId node) const;
  Headroom process_headroom() const;

  // These act for other processes on the machine. They throw InvalidArgument for more than is free.
  void set_used_by_others(NodeId node, uint64_t bytes);
  void set_pool(NodeId node, size_t page_bytes, uint64_t pages);

 private:
  struct Pool {
    uint64_t pages = 0;
    uint64_t used = 0;
  };
  struct Node {
    uint64_t total_bytes = 0;
    bool movable = false;
    uint64_t others_bytes = 0;
    uint64_t used_pages = 0;  // base pages of this process
    std::map<size_t, Pool> pools;
    std::vector<NodeId> fallback;
  };

  const Node& node(NodeId id) const;
  Node& node(NodeId id) { return const_cast<Node&>(std::as_const(*this).node(id)); }
  uint64_t room_bytes(const Node& node) const;
  uint64_t used_base_bytes() const;

  size_t base_page_bytes_;
  std::map<NodeId, Node> nodes_;
  NodeSet allowed_;
  std::optional<uint64_t> process_limit_;
  std::map<size_t, uint64_t> reserved_;  // page size -> pages mapped, not populated
};

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_SIMULATED_MACHINE_H_
