// Regions on simulated nodes under faults: whatever fails, the accounts are those of the kernel.
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "memory/session.h"
#include "simulated_ground.h"

namespace cxl_offload::memory {
namespace {

using os::FaultEffect;
using os::Operation;

Rule stripe_of(std::vector<Share> shares) {
  Rule rule = rule_of(RuleKind::kStripe, std::move(shares));
  rule.granule_bytes = 64 * kPage;
  return rule;
}

// Every call of `operation` that `act` makes fails once, on a ground of its own each time.
template <typename Act>
size_t fail_each_call(Operation operation, FaultEffect effect, int code, const Act& act) {
  Ground counted;
  act(counted, false);
  const uint64_t calls = counted.kernel->faults().calls(operation);
  for (uint64_t call = 1; call <= calls; ++call) {
    Ground ground;
    ground.kernel->faults().add({operation, effect, call, code, -1});
    act(ground, true);
    CHECK_EQ(ground.kernel->faults().fired().size(), 1u);
    CHECK(ground.all_returned());
  }
  return calls;
}

TEST(no_call_that_fails_while_a_region_is_made_leaves_anything) {
  const auto make = [](const Ground& ground, bool fails) {
    const Rule rule = stripe_of({{0, 2}, {1, 1}, {2, 1}});
    if (!fails) {
      const NumaRegion region(ground.placer(), rule, 8 * kMiB);
      CHECK(ground.accounts_agree());
      return;
    }
    CHECK_THROWS(SystemError, NumaRegion(ground.placer(), rule, 8 * kMiB));
  };
  size_t sites = 0;
  for (Operation operation :
       {Operation::kMap, Operation::kPopulate, Operation::kQuery, Operation::kSetPolicy}) {
    sites += fail_each_call(operation, FaultEffect::kRefuse, EPERM, make);
  }
  sites += fail_each_call(Operation::kPopulate, FaultEffect::kPartial, EIO, make);
  CHECK(sites > 20);
}

TEST(no_call_that_fails_while_pages_move_leaves_a_wrong_account) {
  const auto move = [](const Ground& ground, bool fails) {
    NumaRegion region(ground.placer(), stripe_of({{0, 1}, {1, 1}}), 8 * kMiB);
    std::memset(region.range().data(), 0x3c, region.range().size());
    const NodeBytes before{{0, 4 * kMiB}, {1, 4 * kMiB}};
    try {
      region.move(2 * kMiB, 4 * kMiB, {rule_of(RuleKind::kBind, {{2}})});
      CHECK(!fails || ground.kernel->faults().fired().empty());
      CHECK_EQ(ground.kernel->used_bytes(2), 4 * kMiB);
    } catch (const SystemError&) {
      CHECK(fails);
      CHECK_EQ(ground.kernel->used_bytes(0), 4 * kMiB);
      CHECK_EQ(ground.kernel->used_bytes(1), 4 * kMiB);
    }
    CHECK(ground.accounts_agree());
    CHECK_EQ(static_cast<int>(region.range()[3 * kMiB]), 0x3c);
    region.release(0, 8 * kMiB);
    CHECK(ground.accounts_agree());
  };
  Ground made;
  const NumaRegion region(made.placer(), stripe_of({{0, 1}, {1, 1}}), 8 * kMiB);
  const uint64_t queries = made.kernel->faults().calls(Operation::kQuery);
  CHECK(fail_each_call(Operation::kMove, FaultEffect::kRefuse, EBUSY, move) >= 1);
  CHECK(fail_each_call(Operation::kMove, FaultEffect::kPartial, EIO, move) >= 1);
  // The first calls are those that make the region.
  for (uint64_t call = queries + 1; call <= queries + 3; ++call) {
    Ground ground;
    ground.kernel->faults().add({Operation::kQuery, FaultEffect::kRefuse, call, EPERM, -1});
    move(ground, true);
    CHECK(ground.all_returned());
  }
  Ground refused;
  refused.kernel->faults().add({Operation::kSetPolicy, FaultEffect::kRefuse, 2, EPERM, -1});
  move(refused, true);
  CHECK(refused.all_returned());
}

TEST(pages_that_a_failed_move_could_not_put_back_are_counted_where_they_are) {
  int left_there = 0;
  for (uint64_t query = 1; query <= 8; ++query) {
    Ground ground;
    NumaRegion region(ground.placer(), rule_of(RuleKind::kBind, {{0}}), 8 * kMiB);
    os::FaultPlan& faults = ground.kernel->faults();
    faults.add({Operation::kMove, FaultEffect::kPartial, 1, EIO, -1});
    for (uint64_t later = 2; later <= 8; ++later) {
      faults.add({Operation::kMove, FaultEffect::kRefuse, later, EIO, -1});
    }
    faults.add({Operation::kQuery, FaultEffect::kRefuse, query, EPERM, -1});
    CHECK_THROWS(SystemError, region.move(0, 8 * kMiB, {rule_of(RuleKind::kBind, {{2}})}));
    faults.clear();
    CHECK(ground.accounts_agree());
    if (ground.kernel->used_bytes(2) > 0) ++left_there;
  }
  CHECK(left_there > 4);
}

// The calling thread waits before its first piece until another thread has faulted one in. The
// others may also have taken both pieces before it asks for one: then it never waits.
TEST(a_region_of_two_pieces_is_faulted_in_by_two_threads) {
  const Ground ground;
  bool waits_in_vain = false;
  const InterruptScope scope([&] {
    waits_in_vain = true;
    for (int wait = 0; waits_in_vain && wait < 10'000; ++wait) {
      waits_in_vain = ground.kernel->used_bytes(0) == 0;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  });
  const NumaRegion region(ground.placer(), rule_of(RuleKind::kBind, {{0}}), 16 * kMiB);
  CHECK(!waits_in_vain);
  CHECK_EQ(ground.kernel->used_bytes(0), 16 * kMiB);
}

TEST(pages_that_stray_are_brought_back_or_refused) {
  const Ground ground;
  ground.kernel->faults().add({Operation::kPopulate, FaultEffect::kStray, 1, 0, 1});
  {
    const NumaRegion region(ground.placer(), rule_of(RuleKind::kBind, {{0}}), 4 * kMiB);
    CHECK_EQ(ground.kernel->used_bytes(0), 4 * kMiB);
  }
  // Strays, and half of them cannot be moved back in.
  ground.kernel->faults().add({Operation::kPopulate, FaultEffect::kStray, 1, 0, 1});
  ground.kernel->faults().add({Operation::kMove, FaultEffect::kPartial, 1, EIO, -1});
  CHECK_THROWS(SystemError, NumaRegion(ground.placer(), rule_of(RuleKind::kBind, {{0}}), 4 * kMiB));
  CHECK(ground.all_returned());
}

// A node that fills up between the look at its room and the touch of its pages.
TEST(a_node_that_fills_up_meanwhile_is_named_and_nothing_is_left) {
  const Ground ground;
  const Rule rule = rule_of(RuleKind::kBind, {{2}});
  const Rule preferred = rule_of(RuleKind::kPreferred, {{2}});
  const Placer placer = ground.placer();
  std::atomic<bool> stop = false;
  std::jthread other([&] {
    for (bool full = false; !stop; full = !full) {
      try {
        ground.kernel->set_used_by_others(2, full ? 0 : 62 * kMiB);
      } catch (const InvalidArgument&) {  // we are there already
      }
    }
  });
  int refused = 0;
  for (int i = 0; i < 300 || (refused == 0 && i < 1000000); ++i) {
    try {
      const NumaRegion region(placer, rule, 8 * kMiB);
      CHECK_EQ(ground.charged(2), 8 * kMiB);
      CHECK(ground.accounts_agree());
    } catch (const OutOfMemory& error) {
      ++refused;
      CHECK(std::strstr(error.what(), "node 2") != nullptr);
    }
    const NumaRegion lenient(placer, preferred, 8 * kMiB);
    CHECK(ground.accounts_agree());
    CHECK(ground.charged(2) == 8 * kMiB || !lenient.notes().empty());
  }
  stop = true;
  other.join();
  CHECK(refused > 0);
  ground.kernel->set_used_by_others(2, 0);
  CHECK(ground.all_returned());
}

TEST(blocks_of_one_region_move_side_by_side) {
  const Ground ground;
  NumaRegion region(ground.placer(), rule_of(RuleKind::kBind, {{0}}), 16 * kMiB);
  {
    std::vector<std::jthread> threads;
    for (size_t part = 0; part < 4; ++part) {
      threads.emplace_back([&region, part] {
        for (int i = 0; i < 20; ++i) {
          region.move(part * 4 * kMiB, 4 * kMiB,
                      {rule_of(RuleKind::kBind, {{static_cast<os::NodeId>((part + i) % 3)}})});
        }
      });
    }
  }
  CHECK(ground.accounts_agree());
  CHECK_EQ(ground.charged(0) + ground.charged(1) + ground.charged(2), 16 * kMiB);
  region.release(4 * kMiB, 4 * kMiB);
  CHECK(ground.accounts_agree());
}

TEST(a_capacity_refuses_a_spill_too) {
  const Ground ground(ground_machine(), {{0, kMiB}, {1, kMiB}});
  // Populating node 2 goes astray onto node 0, and moving it back is refused for want of room.
  ground.kernel->faults().add({Operation::kPopulate, FaultEffect::kStray, 1, 0, 0});
  const NumaRegion region(ground.placer(), rule_of(RuleKind::kPreferred, {{2}}), 4 * kMiB);
  CHECK_EQ(ground.charged(2), 4 * kMiB);
  CHECK_THROWS(OutOfMemory,
               NumaRegion(ground.placer(), rule_of(RuleKind::kPreferred, {{0}}), 80 * kMiB));
  CHECK(ground.accounts_agree());
}

// Three granules change places between full nodes: node 1 has room for one, nodes 0 and 2 for none.
struct FullNodes {
  FullNodes() {
    ground.kernel->set_used_by_others(0, 64 * kMiB - 64 * kPage);
    ground.kernel->set_used_by_others(2, 64 * kMiB - 64 * kPage);
  }
  Rule wanted() const {
    Rule rule = stripe_of({{0, 1}, {2, 1}, {1, 1}});
    rule.strict = false;
    return rule;
  }

  const Ground ground{ground_machine(), {{1, 64 * kPage}}};
};

TEST(granules_that_wait_for_each_other_arrive_on_full_nodes) {
  const FullNodes full;
  NumaRegion region(full.ground.placer(), stripe_of({{1, 1}, {0, 1}, {2, 1}}), 192 * kPage);
  CHECK(region.move(0, 192 * kPage, {full.wanted()}).notes.empty());
  CHECK(region.runs(0, 192 * kPage) ==
        (std::vector<Run>{
            {0, 64 * kPage, 0}, {64 * kPage, 64 * kPage, 2}, {128 * kPage, 64 * kPage, 1}}));
  CHECK_EQ(full.ground.kernel->used_bytes(1), 64 * kPage);
  CHECK(full.ground.accounts_agree());
}

TEST(pages_that_cannot_leave_a_node_count_for_its_capacity) {
  const FullNodes full;
  NumaRegion region(full.ground.placer(), stripe_of({{1, 1}, {0, 1}, {2, 1}}), 192 * kPage);
  // The first granule is shared with a child whenever it is asked to leave node 1.
  for (const uint64_t call : {1, 4, 6})
    full.ground.kernel->faults().add({Operation::kMove, FaultEffect::kShared, call, 0, -1});
  CHECK_THROWS(OutOfMemory, region.move(0, 192 * kPage, {full.wanted()}));
  CHECK_EQ(full.ground.kernel->used_bytes(1), 64 * kPage);
  CHECK(full.ground.accounts_agree());
}

TEST(a_session_gives_back_what_other_pools_cache_before_it_refuses) {
  const Ground ground;
  const auto session = std::make_shared<Session>(ground.placer());
  Rule huge = rule_of(RuleKind::kBind, {{1}});
  huge.pages = os::PageKind::kTransparentHuge;
  session->allocate(60 * kMiB, huge, nullptr);
  CHECK_EQ(ground.kernel->used_bytes(1), 60 * kMiB);
  const auto live = session->allocate(60 * kMiB, rule_of(RuleKind::kBind, {{1}}), nullptr);
  CHECK(session->bytes_per_node(live->range()) == (NodeBytes{{1, 60 * kMiB}}));
  CHECK_THROWS(OutOfMemory, session->allocate(60 * kMiB, huge, nullptr));
  CHECK(ground.accounts_agree());
}

TEST(threads_that_fight_for_the_last_bytes_leave_a_true_account) {
  const Ground ground;
  const auto session = std::make_shared<Session>(ground.placer());
  std::atomic<int> served = 0;
  {
    std::vector<std::jthread> threads;
    for (int id = 0; id < 4; ++id) {
      threads.emplace_back([&, id] {
        Rule rule = rule_of(RuleKind::kBind, {{id % 2 + 1}});
        if (id > 1) rule.pages = os::PageKind::kTransparentHuge;
        for (int i = 0; i < 60; ++i) {
          try {
            const auto block = session->allocate(40 * kMiB, rule, nullptr);
            ++served;
            if (i % 4 == 0) block->move(rule_of(RuleKind::kPreferred, {{0}}));
          } catch (const OutOfMemory&) {
          }
        }
      });
    }
  }
  CHECK(served > 60);
  CHECK(ground.accounts_agree());
  session->trim();
  CHECK(ground.all_returned());
}

}  // namespace
}  // namespace cxl_offload::memory
