#include "kernels/attention_queues.h"

#include <cstdint>

#include "kernels/attention_rows.h"

namespace cxl_offload {
namespace {

// A question takes about as long as reading 20 KiB.
constexpr size_t kAsked = 64;

// The node of the unit's first keys; below zero: none.
int home_of(const Attention& attention, const Unit& unit, const Kernel& kernel) {
  AttentionRows rows;
  RowSource source(attention, unit.batch, unit.begin, unit.end, unit.head);
  if (source.fill(rows, 0, 1) == 0) return -1;
  const size_t page = kernel.page_bytes(PageKind::kBase);
  const std::byte* at = rows.k[0] - reinterpret_cast<uintptr_t>(rows.k[0]) % page;
  int node = -1;
  kernel.query({at, page}, page, {&node, 1});
  return node;
}

}  // namespace

WorkQueues<size_t> queues_of(const Attention& attention, const std::vector<Unit>& units,
                             const WorkerTeam& team, const Kernel* kernel) {
  WorkQueues<size_t> queues(team);
  const bool ask = kernel != nullptr && queues.size() > 1;
  const size_t step = (units.size() + kAsked - 1) / kAsked;
  int home = -1;
  for (size_t i = 0; i < units.size(); ++i) {
    if (ask && i % step == 0) home = home_of(attention, units[i], *kernel);
    queues.give(home, i);
  }
  return queues;
}

}  // namespace cxl_offload
