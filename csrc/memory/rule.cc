#include "memory/rule.h"

#include "core/error.h"

namespace cxl_offload::memory {

os::NodeSet Rule::nodes() const {
  os::NodeSet nodes;
  for (const Share& share : shares) nodes.insert(share.node);
  return nodes;
}

std::string Rule::describe() const {
  std::string order;
  std::string weights;
  for (const Share& share : shares) {
    order += (order.empty() ? "" : ",") + std::to_string(share.node);
    weights += (weights.empty() ? "" : ":") + std::to_string(share.weight);
  }
  switch (kind) {
    case RuleKind::kFirstTouch:
      return "first touch";
    case RuleKind::kBind:
      return "bind to nodes {" + order + "}";
    case RuleKind::kPreferred:
      return "prefer nodes " + order + " in order";
    case RuleKind::kDevice:
      return "device " + device;
    case RuleKind::kStripe:
      return "interleave " + weights + " over nodes {" + order + "}, granule " +
             format_bytes(granule_bytes);
    case RuleKind::kReplicate:
      return "a copy on each of nodes {" + order + "}";
  }
  return "";
}

size_t unit_bytes(const os::Kernel& kernel, os::PageKind kind) {
  return kind == os::PageKind::kTransparentHuge ? kernel.transparent_huge_bytes()
                                                : kernel.page_bytes(kind);
}

void check_rule(const Rule& rule, const os::Kernel& kernel) {
  if (rule.kind == RuleKind::kFirstTouch || rule.kind == RuleKind::kDevice) return;
  if (rule.shares.empty()) throw InvalidArgument("placement names no node; give at least one");
  const os::NodeSet allowed = kernel.allowed_nodes();
  for (const Share& share : rule.shares) {
    if (!allowed.contains(share.node)) {
      throw InvalidArgument(rule.describe() + ": node " + std::to_string(share.node) +
                            " has no memory that this process may use; usable nodes are " +
                            allowed.to_string());
    }
  }
  if (rule.kind != RuleKind::kStripe) return;
  const Stripe stripe(rule.shares, rule.granule_bytes);
  const size_t unit = unit_bytes(kernel, rule.pages);
  if (rule.granule_bytes % unit != 0) {
    throw InvalidArgument(rule.describe() + ": the granule is no multiple of the " +
                          format_bytes(unit) + " page; use a larger granule or smaller pages");
  }
}

}  // namespace cxl_offload::memory
