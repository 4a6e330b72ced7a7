#include <algorithm>
#include <mutex>
#include <thread>
#include <vector>

#include "check.h"
#include "kernels/work_queues.h"

namespace cxl_offload::kernels {
namespace {

using Items = std::vector<int>;

WorkQueues<int> queues_with(const WorkerTeam& team, int items) {
  WorkQueues<int> queues(team);
  for (int item = 0; item < items; ++item) queues.give(item % 3 == 0 ? 1 : -1, item);
  return queues;
}

Items all_of(int items) {
  Items all;
  for (int item = 0; item < items; ++item) all.push_back(item);
  return all;
}

TEST(each_item_is_visited_once_by_any_threads) {
  const WorkerTeam team({{0, 2, {}}, {1, 2, {}}});
  for (int items : {0, 1, 2, 7, 1000}) {
    for (bool looks_ahead : {false, true}) {
      WorkQueues<int> queues = queues_with(team, items);
      std::mutex mutex;
      Items found;
      const auto keep = [&](int item) {
        const std::lock_guard lock(mutex);
        found.push_back(item);
      };
      std::vector<std::jthread> threads;
      for (size_t group : {0, 0, 1, 1}) {
        threads.emplace_back([&, group] {
          if (looks_ahead) {
            queues.drain(group, [&](int item, const int*) { keep(item); });
          } else {
            queues.drain(group, [&](int item) { keep(item); });
          }
        });
      }
      threads.clear();
      std::ranges::sort(found);
      CHECK(found == all_of(items));
    }
  }
}

TEST(the_next_item_is_the_one_that_the_thread_visits_next) {
  const WorkerTeam team({{0, 2, {}}, {1, 2, {}}});
  WorkQueues<int> queues = queues_with(team, 500);
  std::vector<std::jthread> threads;
  std::atomic<int> wrong = 0;
  for (size_t group : {0, 0, 1, 1}) {
    threads.emplace_back([&, group] {
      int expected = -1;
      bool is_last = false;
      queues.drain(group, [&](int item, const int* next) {
        wrong += is_last || (expected >= 0 && item != expected);
        is_last = next == nullptr;
        expected = is_last ? -1 : *next;
      });
    });
  }
  threads.clear();
  CHECK_EQ(wrong.load(), 0);
}

}  // namespace
}  // namespace cxl_offload::kernels
