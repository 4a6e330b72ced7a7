// From rule and room to runs, and the budget that limits them.
#include <chrono>
#include <map>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "memory/layout.h"
#include "simulated_ground.h"

namespace cxl_offload::memory {
namespace {

constexpr Reserve kNoReserve{0.0, 0, 0};

NodeBytes per_node(const Layout& layout) {
  NodeBytes total;
  size_t end = 0;
  for (const Run& run : layout.runs) {
    CHECK_EQ(run.offset, end);  // in order and without gaps
    CHECK(run.bytes > 0);
    end += run.bytes;
    total[run.node] += run.bytes;
  }
  return total;
}

Layout lay(const Ground& ground, const Rule& rule, size_t bytes, const NodeBytes& held = {}) {
  return lay_out(rule, bytes, *ground.kernel, *ground.budget, kNoReserve, held);
}

TEST(bind_fills_its_nodes_in_order_and_never_others) {
  const Ground ground;
  const Rule rule = rule_of(RuleKind::kBind, {{2}, {1}});
  CHECK(per_node(lay(ground, rule, 100 * kMiB)) == (NodeBytes{{2, 64 * kMiB}, {1, 36 * kMiB}}));
  const auto message = CHECK_THROWS(OutOfMemory, lay(ground, rule, 129 * kMiB));
  CHECK(message.find("node 1") != std::string::npos);
  CHECK(message.find("node 2") != std::string::npos);
}

TEST(preferred_spills_to_the_nearest_and_says_so) {
  const Ground ground;
  const Layout layout = lay(ground, rule_of(RuleKind::kPreferred, {{2}}), 130 * kMiB);
  CHECK(per_node(layout) == (NodeBytes{{2, 64 * kMiB}, {0, 64 * kMiB}, {1, 2 * kMiB}}));
  CHECK_EQ(layout.notes.size(), 2u);
}

TEST(the_reserve_is_kept_on_each_node_and_in_the_process) {
  const Ground ground;
  const Reserve reserve{1.0 / 8, kMiB, 1024 * kMiB};
  const Rule rule = rule_of(RuleKind::kBind, {{0}});
  lay_out(rule, 56 * kMiB, *ground.kernel, *ground.budget, reserve);
  CHECK_THROWS(OutOfMemory,
               lay_out(rule, 56 * kMiB + kPage, *ground.kernel, *ground.budget, reserve));
  os::SimulatedMachine machine = ground_machine();
  machine.process_limit_bytes = 16 * kMiB;
  const Ground limited(machine);
  const auto message = CHECK_THROWS(
      OutOfMemory, lay_out(rule, 15 * kMiB, *limited.kernel, *limited.budget, reserve));
  CHECK(message.find("cgroup memory.max") != std::string::npos);
}

TEST(a_strict_stripe_is_refused_for_the_node_that_is_full) {
  const Ground ground;
  ground.kernel->set_used_by_others(1, 60 * kMiB);
  Rule rule = rule_of(RuleKind::kStripe, {{0, 1}, {1, 1}});
  const auto message = CHECK_THROWS(OutOfMemory, lay(ground, rule, 16 * kMiB));
  CHECK(message.find("node 1 needs 8 MiB") != std::string::npos);
  CHECK(message.find("node 0") == std::string::npos);
  rule.strict = false;
  const Layout layout = lay(ground, rule, 16 * kMiB);
  CHECK(per_node(layout) == (NodeBytes{{0, 12 * kMiB}, {1, 4 * kMiB}}));
  CHECK_EQ(layout.notes.size(), 1u);
}

TEST(a_stripe_far_too_large_is_refused_before_its_runs_are_listed) {
  const Ground ground;
  Rule rule = rule_of(RuleKind::kStripe, {{0, 1}, {2, 1}});
  rule.pages = os::PageKind::kHuge2MiB;
  for (const bool strict : {true, false}) {
    rule.strict = strict;
    // Half a billion runs would take seconds and gigabytes.
    const auto begin = std::chrono::steady_clock::now();
    CHECK_THROWS(OutOfMemory, lay(ground, rule, size_t{1} << 50));
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(1));
  }
}

TEST(what_the_same_bytes_hold_already_counts_as_room) {
  os::SimulatedMachine machine = ground_machine();
  machine.process_limit_bytes = 64 * kMiB;
  const Ground ground(machine, {{0, 64 * kMiB}});
  const NumaRegion region(ground.placer(), rule_of(RuleKind::kBind, {{0}}), 64 * kMiB);
  const Rule stripe = rule_of(RuleKind::kStripe, {{0, 3}, {1, 1}});
  CHECK_THROWS(OutOfMemory, lay(ground, stripe, 64 * kMiB));
  const auto layout = lay(ground, stripe, 64 * kMiB, {{0, 64 * kMiB}});
  CHECK(per_node(layout) == (NodeBytes{{0, 48 * kMiB}, {1, 16 * kMiB}}));
}

TEST(huge_page_pools_have_no_reserve_and_are_named) {
  os::SimulatedMachine machine = ground_machine();
  machine.nodes[1].pools = {{os::kHugePageBytes, 4}};
  const Ground ground(machine);
  Rule rule = rule_of(RuleKind::kBind, {{1}});
  rule.pages = os::PageKind::kHuge2MiB;
  const Layout layout = lay_out(rule, 8 * kMiB, *ground.kernel, *ground.budget, Reserve{});
  CHECK(per_node(layout) == (NodeBytes{{1, 8 * kMiB}}));
  const auto message =
      CHECK_THROWS(OutOfMemory, lay_out(rule, 10 * kMiB, *ground.kernel, *ground.budget, {}));
  CHECK(message.find("huge-page pool of node 1") != std::string::npos);
}

TEST(the_budget_charges_all_nodes_or_none) {
  NodeBudget budget({{0, 10}, {1, 5}});
  budget.charge({{0, 6}, {1, 5}, {7, 100}});
  CHECK_THROWS(OutOfMemory, budget.charge({{0, 4}, {1, 1}}));
  CHECK_EQ(*budget.room(0), 4u);
  CHECK_EQ(*budget.room(1), 0u);
  CHECK(!budget.room(7).has_value());
  budget.refund({{0, 6}, {1, 5}, {7, 100}});
  CHECK_EQ(*budget.room(0), 10u);
  CHECK_EQ(budget.use()[7].current_bytes, 0u);
  CHECK_EQ(budget.use()[7].peak_bytes, 100u);
}

TEST(an_exchange_is_one_step_and_counts_only_what_is_new) {
  NodeBudget budget({{0, 10}, {1, 5}});
  budget.charge({{0, 8}});
  budget.exchange({{0, 8}}, {{0, 6}, {1, 2}});
  CHECK_EQ(budget.use()[0].current_bytes, 6u);
  CHECK_EQ(budget.use()[0].total_bytes, 8u);
  CHECK_EQ(budget.use()[1].total_bytes, 2u);
  CHECK_EQ(budget.use()[0].peak_bytes, 8u);
  budget.exchange({{0, 6}}, {{1, 6}});  // where the pages are is no question of limits
  CHECK_EQ(budget.use()[1].current_bytes, 8u);
  CHECK_EQ(*budget.room(1), 0u);
}

TEST(a_capacity_is_never_passed_by_threads_that_charge_together) {
  NodeBudget budget(std::map<os::NodeId, uint64_t>{{0, 1000}});
  std::vector<uint64_t> taken(4);
  {
    std::vector<std::jthread> threads;
    for (uint64_t& own : taken) {
      threads.emplace_back([&budget, &own] {
        for (int i = 0; i < 2000; ++i) {
          try {
            budget.charge({{0, 7}});
            own += 7;
            if (i % 3 == 0) {
              budget.refund({{0, 7}});
              own -= 7;
            }
          } catch (const OutOfMemory&) {
          }
        }
      });
    }
  }
  CHECK_EQ(std::accumulate(taken.begin(), taken.end(), uint64_t{0}), budget.use()[0].current_bytes);
  CHECK(budget.use()[0].peak_bytes <= 1000);
}

}  // namespace
}  // namespace cxl_offload::memory
