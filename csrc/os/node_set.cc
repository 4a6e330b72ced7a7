#include "os/node_set.h"

#include <climits>

#include "core/error.h"

namespace cxl_offload::os {

NodeSet::NodeSet(std::initializer_list<NodeId> nodes) {
  for (NodeId node : nodes) insert(node);
}

NodeSet::NodeSet(const std::vector<NodeId>& nodes) {
  for (NodeId node : nodes) insert(node);
}

void NodeSet::insert(NodeId node) {
  if (node < 0 || node >= kMaxNodes) {
    throw InvalidArgument("node " + std::to_string(node) + " is outside 0.." +
                          std::to_string(kMaxNodes - 1));
  }
  bits_.set(static_cast<size_t>(node));
}

bool NodeSet::contains(NodeId node) const {
  return node >= 0 && node < kMaxNodes && bits_.test(static_cast<size_t>(node));
}

std::vector<NodeId> NodeSet::nodes() const {
  std::vector<NodeId> result;
  for (size_t i = 0; i < bits_.size(); ++i) {
    if (bits_.test(i)) result.push_back(static_cast<NodeId>(i));
  }
  return result;
}

std::vector<unsigned long> NodeSet::words() const {
  constexpr size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
  std::vector<unsigned long> result(kMaxNodes / kWordBits, 0);
  for (NodeId node : nodes()) {
    const auto bit = static_cast<size_t>(node);
    result[bit / kWordBits] |= 1UL << (bit % kWordBits);
  }
  return result;
}

std::string NodeSet::to_string() const {
  std::string text = "{";
  for (NodeId node : nodes()) {
    if (text.size() > 1) text += ",";
    text += std::to_string(node);
  }
  return text + "}";
}

}  // namespace cxl_offload::os
