// The work of a team: one queue for each of its groups.
#ifndef CXL_OFFLOAD_KERNELS_WORK_QUEUES_H_
#define CXL_OFFLOAD_KERNELS_WORK_QUEUES_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "kernels/worker_team.h"

namespace cxl_offload::kernels {

template <class Item>
class WorkQueues {
 public:
  explicit WorkQueues(const WorkerTeam& team)
      : groups_(team.groups()), queues_(team.groups().size()) {}

  // Puts an item into the queue of the group that works on this node. Where no group does (-1, or
  // another node), the groups get items in turn.
  void give(int node, const Item& item) {
    const auto found = std::ranges::find(groups_, node, &WorkerGroup::node);
    const bool known = node >= 0 && found != groups_.end();
    const size_t group = known ? static_cast<size_t>(found - groups_.begin()) : turn_;
    queues_[group].items.push_back(item);
    turn_ = (turn_ + 1) % queues_.size();
  }

  // Takes items one by one: first those of the group, then those that the others have left. All
  // threads may call this at once, after the last give(). Calls visit(item), or visit(item, next)
  // with a pointer to the item that this thread visits afterwards, or null after its last one.
  template <class Visit>
  void drain(size_t group, const Visit& visit) {
    const Item* item = take(group);
    while (item != nullptr) {
      if constexpr (std::is_invocable_v<Visit, const Item&>) {
        visit(*item);
        item = take(group);
      } else {
        const Item* next = take(group);
        visit(*item, next);
        item = next;
      }
    }
  }

  const std::vector<Item>& of(size_t group) const { return queues_[group].items; }
  size_t size() const { return queues_.size(); }

 private:
  struct Queue {
    std::vector<Item> items;
    std::atomic<size_t> next = 0;
  };

  // Returns null when nothing is left.
  const Item* take(size_t group) {
    for (size_t i = 0; i < queues_.size(); ++i) {
      Queue& queue = queues_[(group + i) % queues_.size()];
      // Looking first keeps threads that come back from counting on and on.
      if (queue.next.load(std::memory_order_relaxed) >= queue.items.size()) continue;
      const size_t index = queue.next.fetch_add(1, std::memory_order_relaxed);
      if (index < queue.items.size()) return &queue.items[index];
    }
    return nullptr;
  }

  const std::vector<WorkerGroup>& groups_;
  std::vector<Queue> queues_;
  size_t turn_ = 0;
};

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_WORK_QUEUES_H_
