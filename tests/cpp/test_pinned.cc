// Pinned regions under faults and threads: whatever fails while they move, the memory is valid,
// counted where it is, and registered if and only if it says so.
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "gpu/fake_driver.h"
#include "memory/session.h"
#include "simulated_ground.h"

namespace cxl_offload::memory {
namespace {

using os::Operation;

constexpr size_t kBytes = 8 * kMiB;

// A ground whose node 2 is movable, and a driver that pins its pages for long.
struct PinnedGround : Ground {
  explicit PinnedGround(bool movable) : Ground(machine_with(movable)) {
    driver->set_pinning({[this](std::span<std::byte> range) { kernel->pin(range); },
                         [this](std::byte* address) { kernel->unpin(address); }});
  }

  static os::SimulatedMachine machine_with(bool movable) {
    os::SimulatedMachine machine = ground_machine();
    machine.nodes[2].movable = movable;
    return machine;
  }

  const std::shared_ptr<gpu::FakeDriver> driver = std::make_shared<gpu::FakeDriver>();
  const std::shared_ptr<Session> session = std::make_shared<Session>(placer());
};

Rule lenient(std::vector<Share> shares) {
  Rule rule = rule_of(RuleKind::kStripe, std::move(shares));
  rule.granule_bytes = 64 * kPage;
  rule.strict = false;
  return rule;
}

std::shared_ptr<PlacedBlock> make_block(const PinnedGround& ground) {
  auto block = ground.session->allocate(kBytes, rule_of(RuleKind::kBind, {{0}}), ground.driver);
  std::memset(block->range().data(), 0x3c, kBytes);
  return block;
}

void check_block(const PinnedGround& ground, const PlacedBlock& block) {
  for (const std::byte byte : block.range()) CHECK(byte == std::byte{0x3c});
  CHECK(ground.accounts_agree());
  CHECK_EQ(ground.driver->counts().registered_bytes, block.memory().pinned() ? kBytes : 0);
  CHECK_EQ(ground.driver->is_registered(block.range().data()), block.memory().pinned());
  CHECK_EQ(ground.driver->counts().events, 0u);
  CHECK_EQ(ground.driver->counts().wrong_unregisters, 0u);
}

void check_returned(const PinnedGround& ground) {
  ground.session->trim();
  CHECK(ground.all_returned());
  CHECK_EQ(ground.driver->counts().registered_ranges, 0u);
}

TEST(no_call_that_fails_while_pinned_memory_moves_leaves_it_in_doubt) {
  const Rule target = lenient({{1, 1}, {2, 1}});
  for (const bool movable : {false, true}) {
    for (Operation operation : {Operation::kMove, Operation::kQuery, Operation::kSetPolicy}) {
      uint64_t calls = 1;
      for (uint64_t call = 0; call <= calls; ++call) {  // 0: none fails
        PinnedGround ground(movable);
        auto block = make_block(ground);
        block->memory().record_stream(7);
        ground.driver->launch(7);
        const uint64_t before = ground.kernel->faults().calls(operation);
        if (call > 0)
          ground.kernel->faults().add({operation, os::FaultEffect::kRefuse, call, EIO, -1});
        try {
          block->move(target);
        } catch (const SystemError&) {
        } catch (const PlacementError&) {
        }
        if (call == 0) calls = ground.kernel->faults().calls(operation) - before;
        CHECK(ground.driver->counts().event_waits > 0);
        check_block(ground, *block);
        block.reset();
        check_returned(ground);
      }
      CHECK(calls > 0);
    }
  }
}

TEST(registrations_that_fail_leave_memory_that_is_not_pinned_and_says_so) {
  for (uint64_t nth = 1; nth <= 2; ++nth) {
    PinnedGround ground(true);
    auto block = make_block(ground);
    ground.driver->fail_registration(nth);
    // Strict, so that the second registration is that of going back.
    const std::string text =
        CHECK_THROWS(PlacementError, block->move(rule_of(RuleKind::kBind, {{2}})));
    CHECK(!block->memory().pinned());
    CHECK(text.find("pinned") != std::string::npos);
    CHECK(!block->notes().empty());
    check_block(ground, *block);
    block->move(rule_of(RuleKind::kBind, {{1}}));
    CHECK(block->memory().pinned());
    CHECK(block->notes().empty());
    check_block(ground, *block);
    block.reset();
    check_returned(ground);
  }
}

TEST(an_interrupt_while_pinned_memory_moves_reaches_the_caller_whether_or_not_it_is_pinned_again) {
  for (const bool refused : {false, true}) {
    PinnedGround ground(true);
    auto block = make_block(ground);
    if (refused) ground.driver->fail_registration(1);
    {
      const InterruptScope scope([] { return true; });
      CHECK_THROWS(Interrupted, block->move(rule_of(RuleKind::kBind, {{1}})));
    }
    CHECK_EQ(block->memory().pinned(), !refused);
    CHECK_EQ(block->notes().empty(), !refused);
    CHECK_EQ(block->requested(), rule_of(RuleKind::kBind, {{0}}).describe());
    check_block(ground, *block);
    block.reset();
    check_returned(ground);
  }
}

TEST(threads_look_at_pinned_memory_while_it_moves) {
  PinnedGround ground(true);
  auto block = make_block(ground);
  std::atomic<bool> done = false;
  {
    std::vector<std::jthread> threads;
    for (int id = 0; id < 2; ++id) {
      threads.emplace_back([&] {
        while (!done) {
          uint64_t total = 0;
          for (const auto& [node, bytes] : ground.session->bytes_per_node(block->range())) {
            total += bytes;
          }
          CHECK_EQ(total, kBytes);
          block->notes();
          block->requested();
          block->memory().pinned();
          ground.session->node_use();
        }
      });
    }
    for (int i = 0; i < 40; ++i) {
      block->move(i % 2 == 0 ? lenient({{1, 1}, {2, 1}}) : lenient({{0, 3}, {1, 1}}));
    }
    done = true;
  }
  check_block(ground, *block);
  block.reset();
  check_returned(ground);
}

}  // namespace
}  // namespace cxl_offload::memory
