// A set of NUMA nodes, in ascending order.
#ifndef CXL_OFFLOAD_OS_NODE_SET_H_
#define CXL_OFFLOAD_OS_NODE_SET_H_

#include <bitset>
#include <initializer_list>
#include <string>
#include <vector>

namespace cxl_offload::os {

using NodeId = int;

// The kernel's own bound (CONFIG_NODES_SHIFT = 10) on every distribution kernel.
inline constexpr NodeId kMaxNodes = 1024;

class NodeSet {
 public:
  NodeSet() = default;
  NodeSet(std::initializer_list<NodeId> nodes);
  explicit NodeSet(const std::vector<NodeId>& nodes);

  void insert(NodeId node);
  bool contains(NodeId node) const;
  bool empty() const { return bits_.none(); }
  size_t size() const { return bits_.count(); }
  std::vector<NodeId> nodes() const;
  // The mask as the system calls want it: little-endian words of unsigned long.
  std::vector<unsigned long> words() const;
  // "{0,2}"
  std::string to_string() const;

  bool operator==(const NodeSet& other) const = default;

 private:
  std::bitset<kMaxNodes> bits_;
};

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_NODE_SET_H_
