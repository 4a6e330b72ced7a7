#include "kernels/attention_queues.h"

#include "kernels/attention_rows.h"
#include "kernels/page_home.h"

namespace cxl_offload::kernels {
namespace {

// The node of the unit's first keys; below zero: none.
int home_of(const Attention& attention, const Unit& unit, const os::Kernel& kernel) {
  AttentionRows rows;
  RowSource source(attention, unit.batch, unit.begin, unit.end, unit.head);
  if (source.fill(rows, 0, 1) == 0) return -1;
  return page_home(rows.k[0], kernel);
}

}  // namespace

WorkQueues<size_t> queues_of(const Attention& attention, const std::vector<Unit>& units,
                             const WorkerTeam& team, const os::Kernel* kernel) {
  WorkQueues<size_t> queues(team);
  const bool ask = kernel != nullptr && queues.size() > 1;
  const size_t step = (units.size() + kMostAsked - 1) / kMostAsked;
  int home = -1;
  for (size_t i = 0; i < units.size(); ++i) {
    if (ask && i % step == 0) home = home_of(attention, units[i], *kernel);
    queues.give(home, i);
  }
  return queues;
}

}  // namespace cxl_offload::kernels
