// The simulated kernel against what Linux does: reservation, fallback, partial moves, holes.
#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "simulated_ground.h"

namespace cxl_offload::os {
namespace {

using memory::ground_machine;
using memory::kMiB;
using memory::kPage;

using Bytes = std::span<std::byte>;

Bytes map(SimulatedKernel& kernel, size_t bytes, PageKind kind = PageKind::kBase,
          size_t alignment = kPage) {
  return {kernel.map(bytes, alignment, kind), bytes};
}

std::vector<int> nodes_of(const SimulatedKernel& kernel, Bytes range, size_t page = kPage) {
  std::vector<int> nodes(range.size() / page);
  kernel.query(range, page, nodes);
  return nodes;
}

size_t count_on(const std::vector<int>& nodes, int node) {
  return static_cast<size_t>(std::ranges::count(nodes, node));
}

SimulatedMachine with_pools(uint64_t pages, bool reserves) {
  SimulatedMachine machine = ground_machine();
  for (SimulatedNode& node : machine.nodes) node.pools = {{kHugePageBytes, pages}};
  machine.reserves_huge_pages = reserves;
  return machine;
}

TEST(pages_are_absent_until_populated_and_again_after_discard) {
  SimulatedKernel kernel(ground_machine());
  const Bytes range = map(kernel, 8 * kPage);
  CHECK_EQ(count_on(nodes_of(kernel, range), kPageAbsent), 8u);
  kernel.populate(range.subspan(0, 4 * kPage), 1);
  CHECK_EQ(count_on(nodes_of(kernel, range), 1), 4u);
  CHECK_EQ(kernel.used_bytes(1), 4 * kPage);
  std::memset(range.data(), 0x5a, 4 * kPage);
  kernel.discard(range);
  CHECK_EQ(count_on(nodes_of(kernel, range), kPageAbsent), 8u);
  CHECK_EQ(kernel.used_bytes(1), 0u);
  CHECK_EQ(static_cast<int>(range[0]), 0);
  kernel.unmap(range);
  CHECK_EQ(kernel.mapping_count(), 0u);
}

TEST(touched_pages_go_to_the_initiator_when_they_are_first_asked_for) {
  SimulatedMachine machine = ground_machine();
  machine.initiator = 1;
  SimulatedKernel kernel(machine);
  const Bytes range = map(kernel, 8 * kPage);
  range[3 * kPage] = std::byte{1};
  const auto nodes = nodes_of(kernel, range);
  CHECK_EQ(nodes[3], 1);
  CHECK_EQ(count_on(nodes, kPageAbsent), 7u);
}

TEST(a_full_node_is_passed_over_for_the_nearest) {
  SimulatedKernel kernel(ground_machine());
  kernel.set_used_by_others(2, 64 * kMiB - 4 * kPage);
  const Bytes range = map(kernel, 10 * kPage);
  kernel.populate(range, 2);
  const auto nodes = nodes_of(kernel, range);
  CHECK_EQ(count_on(nodes, 2), 4u);
  CHECK_EQ(count_on(nodes, 0), 6u);
}

TEST(populate_throws_when_the_machine_is_full_and_what_is_there_stays) {
  SimulatedKernel kernel(ground_machine());
  kernel.set_used_by_others(1, 64 * kMiB);
  kernel.set_used_by_others(2, 64 * kMiB);
  const Bytes range = map(kernel, 65 * kMiB);
  CHECK_THROWS(OutOfMemory, kernel.populate(range, 0));
  CHECK_EQ(kernel.used_bytes(0), 64 * kMiB);
  kernel.unmap(range);
  CHECK_EQ(kernel.used_bytes(0), 0u);
}

TEST(huge_pages_are_set_aside_when_mapped) {
  SimulatedKernel kernel(with_pools(4, true));
  const Bytes first = map(kernel, 10 * kHugePageBytes, PageKind::kHuge2MiB);
  CHECK_THROWS(OutOfMemory, map(kernel, 3 * kHugePageBytes, PageKind::kHuge2MiB));
  kernel.populate(first, 0);
  CHECK_EQ(kernel.used_bytes(0), 4 * kHugePageBytes);
  kernel.discard(first);
  CHECK_THROWS(OutOfMemory, map(kernel, 3 * kHugePageBytes, PageKind::kHuge2MiB));
  kernel.unmap(first.subspan(0, kHugePageBytes));
  const Bytes second = map(kernel, 3 * kHugePageBytes, PageKind::kHuge2MiB);
  kernel.unmap(second);
  kernel.unmap(first.subspan(kHugePageBytes));
  CHECK_EQ(kernel.mapping_count(), 0u);
  const Bytes all = map(kernel, 12 * kHugePageBytes, PageKind::kHuge2MiB);
  kernel.populate(all, 1);
  CHECK_EQ(kernel.used_bytes(2), 4 * kHugePageBytes);
}

TEST(huge_pages_run_out_when_populated_if_they_are_not_set_aside) {
  SimulatedKernel kernel(with_pools(2, false));
  const Bytes range = map(kernel, 8 * kHugePageBytes, PageKind::kHuge2MiB);
  CHECK_THROWS(OutOfMemory, kernel.populate(range, 0));
  CHECK_EQ(kernel.used_bytes(0), 2 * kHugePageBytes);
  kernel.unmap(range);
  CHECK_EQ(kernel.used_bytes(0), 0u);
}

TEST(a_shrinking_pool_keeps_the_pages_in_use) {
  SimulatedKernel kernel(with_pools(4, true));
  const Bytes range = map(kernel, 3 * kHugePageBytes, PageKind::kHuge2MiB);
  kernel.populate(range, 0);
  CHECK_THROWS(InvalidArgument, kernel.set_pool(0, kHugePageBytes, 2));
  kernel.set_pool(0, kHugePageBytes, 3);
  CHECK_EQ(kernel.node_headroom(0, PageKind::kHuge2MiB).free_bytes, 0u);
}

TEST(unmapping_the_middle_leaves_two_mappings_that_know_their_pages) {
  SimulatedKernel kernel(ground_machine());
  const Bytes range = map(kernel, 9 * kPage);
  kernel.populate(range.subspan(0, 3 * kPage), 0);
  kernel.populate(range.subspan(3 * kPage, 3 * kPage), 1);
  kernel.populate(range.subspan(6 * kPage), 2);
  kernel.unmap(range.subspan(4 * kPage, kPage));
  CHECK_EQ(kernel.mapping_count(), 2u);
  CHECK_EQ(count_on(nodes_of(kernel, range.subspan(0, 4 * kPage)), 0), 3u);
  CHECK_EQ(count_on(nodes_of(kernel, range.subspan(5 * kPage)), 2), 3u);
  CHECK_EQ(kernel.used_bytes(1), 2 * kPage);
  kernel.unmap(range.subspan(0, 4 * kPage));
  kernel.unmap(range.subspan(5 * kPage));
  CHECK_EQ(kernel.mapping_count(), 0u);
  for (NodeId node : {0, 1, 2}) CHECK_EQ(kernel.used_bytes(node), 0u);
}

TEST(moves_stop_at_a_full_node_and_say_which_pages_stayed) {
  SimulatedKernel kernel(ground_machine());
  kernel.set_used_by_others(2, 64 * kMiB - 3 * kPage);
  const Bytes range = map(kernel, 8 * kPage);
  kernel.populate(range, 0);
  std::memset(range.data(), 0x77, range.size());
  const std::vector<NodeId> targets(8, 2);
  std::vector<int> states(8);
  kernel.move(range, kPage, targets, states);
  CHECK_EQ(count_on(states, 2), 3u);
  CHECK_EQ(count_on(states, 0), 5u);
  CHECK(states == nodes_of(kernel, range));
  CHECK_EQ(static_cast<int>(range[range.size() - 1]), 0x77);
}

TEST(a_process_at_its_limit_may_still_move) {
  SimulatedMachine machine = ground_machine();
  machine.process_limit_bytes = 4 * kPage;
  SimulatedKernel kernel(machine);
  const Bytes range = map(kernel, 4 * kPage);
  kernel.populate(range, 0);
  CHECK_EQ(kernel.process_headroom().free_bytes, 0u);
  const std::vector<NodeId> targets(4, 1);
  std::vector<int> states(4);
  kernel.move(range, kPage, targets, states);
  CHECK_EQ(count_on(states, 1), 4u);
  const Bytes more = map(kernel, kPage);
  CHECK_THROWS(OutOfMemory, kernel.populate(more, 0));
}

TEST(a_node_outside_the_cpuset_gives_nothing) {
  SimulatedMachine machine = ground_machine();
  machine.allowed_nodes = {0, 2};
  SimulatedKernel kernel(machine);
  CHECK(kernel.allowed_nodes() == (NodeSet{0, 2}));
  const Bytes range = map(kernel, 4 * kPage);
  kernel.populate(range, 1);
  CHECK_EQ(count_on(nodes_of(kernel, range), 0), 4u);
  CHECK(kernel.fallback_order(0) == std::vector<NodeId>{2});
}

TEST(faults_come_at_their_call_once_and_leave_what_they_say) {
  SimulatedKernel kernel(ground_machine());
  const Bytes range = map(kernel, 8 * kPage);
  kernel.faults().add({Operation::kPopulate, FaultEffect::kPartial, 2, EIO, -1});
  kernel.populate(range.subspan(0, 2 * kPage), 0);
  try {
    kernel.populate(range.subspan(2 * kPage), 0);
    CHECK(false);
  } catch (const SystemError& error) {
    CHECK_EQ(error.code(), EIO);
  }
  CHECK_EQ(kernel.used_bytes(0), 5 * kPage);
  kernel.faults().add({Operation::kPopulate, FaultEffect::kStray, 1, 0, 1});
  kernel.populate(range, 0);
  CHECK_EQ(kernel.used_bytes(1), 3 * kPage);
  kernel.faults().add({Operation::kMap, FaultEffect::kRefuse, 1, ENOMEM, -1});
  CHECK_THROWS(OutOfMemory, kernel.map(kPage, kPage, PageKind::kBase));
  CHECK_EQ(kernel.faults().fired().size(), 3u);
  CHECK_EQ(kernel.mapping_count(), 1u);
}

TEST(faults_that_could_never_fire_are_refused) {
  SimulatedKernel kernel(ground_machine());
  FaultPlan& plan = kernel.faults();
  CHECK_THROWS(InvalidArgument, plan.add({Operation::kMap, FaultEffect::kPartial, 1, EIO, -1}));
  CHECK_THROWS(InvalidArgument, plan.add({Operation::kMove, FaultEffect::kStray, 1, EIO, -1}));
  CHECK_THROWS(InvalidArgument, plan.add({Operation::kMap, FaultEffect::kRefuse, 0, EIO, -1}));
  CHECK_THROWS(InvalidArgument, plan.add({Operation::kMap, FaultEffect::kRefuse, 1, 0, -1}));
  CHECK_THROWS(InvalidArgument, plan.add_random({1, 1.5, {Operation::kMap}, EIO}));
  CHECK_THROWS(InvalidArgument, parse_operation("sync"));
}

TEST(random_faults_depend_on_the_seed_and_the_call_alone) {
  const auto fires = [](uint64_t seed) {
    FaultPlan plan;
    plan.add_random({seed, 0.25, {Operation::kQuery}, EIO});
    std::vector<bool> pattern;
    for (int i = 0; i < 400; ++i) {
      pattern.push_back(plan.begin_call(Operation::kQuery).has_value());
      CHECK(!plan.begin_call(Operation::kMap).has_value());
    }
    return pattern;
  };
  CHECK(fires(1) == fires(1));
  CHECK(fires(1) != fires(2));
  const auto pattern = fires(3);
  const auto hits = std::ranges::count(pattern, true);
  CHECK(hits > 60 && hits < 140);
}

TEST(threads_that_map_and_move_side_by_side_leave_an_exact_ledger) {
  SimulatedKernel kernel(ground_machine());
  {
    std::vector<std::jthread> threads;
    for (NodeId node : {0, 1, 2}) {
      threads.emplace_back([&kernel, node] {
        for (int i = 0; i < 200; ++i) {
          const Bytes range = map(kernel, 16 * kPage);
          kernel.populate(range, node);
          const std::vector<NodeId> targets(16, (node + 1) % 3);
          std::vector<int> states(16);
          kernel.move(range, kPage, targets, states);
          kernel.unmap(range.subspan(4 * kPage, 4 * kPage));
          kernel.unmap(range.subspan(0, 4 * kPage));
          kernel.unmap(range.subspan(8 * kPage));
        }
      });
    }
  }
  CHECK_EQ(kernel.mapping_count(), 0u);
  for (NodeId node : {0, 1, 2}) CHECK_EQ(kernel.used_bytes(node), 0u);
}

}  // namespace
}  // namespace cxl_offload::os
