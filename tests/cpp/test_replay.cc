#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "replay/sharing.h"
#include "replay/steps.h"

namespace cxl_offload::replay {
namespace {

TEST(replay_of_equal_jobs_takes_their_sum_on_one_resource) {
  const std::vector<double> setup(4, 0), alone(4, 1), shares(4, 1);
  const std::vector<int64_t> demands{0, 1, 2, 3, 4}, queues{0, 1, 2, 4}, steps{0, 2, 3};
  const std::vector<int32_t> resources(4, 0);
  std::vector<double> starts(4), ends(4), lengths(2);
  run_steps({setup, alone, demands, resources, shares, queues, steps}, {0.0},
            {starts, ends, lengths});
  CHECK_EQ(lengths[0], 2.0);
  CHECK_EQ(lengths[1], 2.0);
  CHECK_EQ(starts[3], 1.0);
  CHECK_EQ(ends[3], 2.0);
}

// Nothing is used more than it carries, and whoever is held up has a full resource of which nobody
// has more than he: the definition of max-min fairness.
TEST(sharing_is_max_min_fair_for_random_demands) {
  constexpr int32_t kResources = 5;
  std::mt19937 draw(7);
  Sharing sharing(std::vector<double>(kResources, 0.0));
  for (int trial = 0; trial < 2000; ++trial) {
    const size_t count = 1 + draw() % 6;
    std::vector<std::vector<int32_t>> resources(count);
    std::vector<std::vector<double>> shares(count);
    std::vector<Demand> jobs;
    for (size_t at = 0; at < count; ++at) {
      for (int32_t resource = 0; resource < kResources; ++resource) {
        if (draw() % 2) continue;
        resources[at].push_back(resource);
        shares[at].push_back((1 + draw() % 100) / 100.0);
      }
      if (!shares[at].empty()) shares[at][draw() % shares[at].size()] = 1;
      jobs.push_back({resources[at], shares[at]});
    }
    std::vector<double> speeds(count);
    sharing.speeds(jobs, speeds);
    std::vector<double> used(kResources, 0), most(kResources, 0);
    for (size_t at = 0; at < count; ++at) {
      for (size_t i = 0; i < shares[at].size(); ++i) {
        const auto resource = static_cast<size_t>(resources[at][i]);
        used[resource] += speeds[at] * shares[at][i];
        most[resource] = std::max(most[resource], speeds[at] * shares[at][i]);
      }
    }
    for (double amount : used) CHECK(amount <= 1 + 1e-6);
    for (size_t at = 0; at < count; ++at) {
      CHECK(speeds[at] > 0 && speeds[at] <= 1);
      if (speeds[at] > 1 - 1e-6) continue;
      bool bound = false;
      for (size_t i = 0; i < shares[at].size(); ++i) {
        const auto resource = static_cast<size_t>(resources[at][i]);
        bound |= used[resource] > 1 - 1e-6 && speeds[at] * shares[at][i] > most[resource] - 1e-6;
      }
      CHECK(bound);
    }
  }
}

}  // namespace
}  // namespace cxl_offload::replay
