// A placement rule: how the pages of an allocation choose their nodes.
#ifndef CXL_OFFLOAD_MEMORY_RULE_H_
#define CXL_OFFLOAD_MEMORY_RULE_H_

#include <cstddef>
#include <string>
#include <vector>

#include "memory/stripe.h"
#include "os/kernel.h"

namespace cxl_offload::memory {

enum class RuleKind {
  kFirstTouch,  // the node of the thread that writes first; nothing is faulted in ahead
  kBind,        // the listed nodes in order, each until it is full; never elsewhere
  kPreferred,   // the same, then any other node, nearest first
  kStripe,      // weighted interleave over the listed nodes
  kReplicate,   // a whole copy on each listed node: blocks of kBind that belong together
  kDevice,      // a Device-DAX device, no node
};

struct Rule {
  RuleKind kind = RuleKind::kFirstTouch;
  std::vector<Share> shares;  // weights count for kStripe only
  size_t granule_bytes = os::kHugePageBytes;
  // What to do with a stripe whose node is full: refuse it (strict), or put its granules on the
  // nearest other node and say so in a note.
  bool strict = true;
  os::PageKind pages = os::PageKind::kBase;
  std::string
      device;  // for kDevice; its pages are as large as its alignment, whatever `pages` says

  os::NodeSet nodes() const;
  // "weighted interleave 4:1 over nodes {0,2}, granule 2 MiB"
  std::string describe() const;
};

// The unit in which blocks and runs of that kind are cut. A transparent huge page moves as one even
// where it is counted in base pages, so it may not belong to two blocks.
size_t unit_bytes(const os::Kernel& kernel, os::PageKind kind);

// Throws InvalidArgument for a rule that has no meaning on this kernel: it has unknown nodes or
// none, or a granule that is no multiple of the page.
void check_rule(const Rule& rule, const os::Kernel& kernel);

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_RULE_H_
