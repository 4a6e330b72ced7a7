// A pool of pinned memory: when a dropped block may serve again.
#include <algorithm>
#include <vector>

#include "check.h"
#include "fake_regions.h"
#include "gpu/fake_driver.h"
#include "memory/pool.h"

namespace cxl_offload::memory {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

struct Fixture {
  explicit Fixture(FakeRules rules = {}) {
    rules.driver = driver;
    source = std::make_shared<FakeSource>(rules);
    pool = std::make_shared<Pool>(source, driver);
  }
  // So that the pool may map as much again without waiting.
  void raise_peak(size_t bytes) {
    pool->allocate(bytes).reset();
    pool->trim();
  }
  std::shared_ptr<gpu::FakeDriver> driver = std::make_shared<gpu::FakeDriver>();
  std::shared_ptr<FakeSource> source;
  std::shared_ptr<Pool> pool;
};

// Drops a block after work was queued on it, and says where it was.
std::byte* use_and_drop(Fixture& f, std::shared_ptr<Allocation> block, gpu::StreamId stream) {
  std::byte* address = block->address();
  block->record_stream(stream);
  f.driver->launch(stream);
  block.reset();
  return address;
}

TEST(pinned_block_is_registered_and_says_so) {
  Fixture f;
  const auto block = f.pool->allocate(kMiB);
  CHECK(block->pinned());
  CHECK(f.driver->is_registered(block->address()));
}

TEST(block_is_not_reused_before_its_event) {
  Fixture f;
  f.raise_peak(3 * kMiB);
  const std::byte* address = use_and_drop(f, f.pool->allocate(kMiB), 7);
  const auto other = f.pool->allocate(kMiB);
  CHECK(other->address() != address);
  CHECK_EQ(f.driver->counts().event_waits, 0u);
  CHECK_EQ(f.pool->statistics().waiting.bytes.current, kMiB);
  f.driver->finish(7);
  const auto again = f.pool->allocate(kMiB);
  CHECK_EQ(again->address(), address);
  CHECK_EQ(f.driver->counts().event_waits, 0u);
  CHECK_EQ(f.driver->counts().synchronizations, 1u);  // of the trim above
  CHECK_EQ(f.driver->counts().events, 0u);
  f.pool->check_invariants();
}

TEST(block_waits_for_every_stream_that_used_it) {
  Fixture f;
  f.raise_peak(4 * kMiB);
  auto block = f.pool->allocate(kMiB);
  const std::byte* address = block->address();
  for (const gpu::StreamId stream : {7, 8, 7}) {
    block->record_stream(stream);
    f.driver->launch(stream);
  }
  block.reset();
  CHECK_EQ(f.driver->counts().events, 2u);
  f.driver->finish(8);
  const auto first = f.pool->allocate(kMiB);
  CHECK(first->address() != address);
  f.driver->finish(7);
  const auto second = f.pool->allocate(kMiB);
  CHECK_EQ(second->address(), address);
}

TEST(work_queued_after_recording_is_covered_too) {
  Fixture f;
  f.raise_peak(3 * kMiB);
  auto block = f.pool->allocate(kMiB);
  const std::byte* address = block->address();
  block->record_stream(7);
  f.driver->launch(7);
  f.driver->finish(7);
  f.driver->launch(7);
  block.reset();
  const auto other = f.pool->allocate(kMiB);
  CHECK(other->address() != address);
}

TEST(allocation_under_pressure_waits_for_the_event) {
  Fixture f;
  const std::byte* address = use_and_drop(f, f.pool->allocate(kMiB), 7);
  const auto again = f.pool->allocate(kMiB);
  CHECK_EQ(again->address(), address);
  CHECK_EQ(f.driver->counts().event_waits, 1u);
  CHECK_EQ(f.pool->statistics().event_waits, 1u);
  CHECK_EQ(f.source->account().obtained, 1u);
}

TEST(other_size_under_pressure_waits_and_gives_the_old_region_back) {
  Fixture f;
  use_and_drop(f, f.pool->allocate(4 * kMiB), 7);
  const auto other = f.pool->allocate(2 * kMiB);
  CHECK_EQ(f.source->account().now(), 2 * kMiB);
  CHECK_EQ(f.driver->counts().event_waits, 1u);
  CHECK_EQ(f.driver->counts().registered_bytes, 2 * kMiB);
}

TEST(blocks_without_a_stream_share_one_synchronize) {
  Fixture f;
  std::vector<std::shared_ptr<Allocation>> blocks;
  std::vector<std::byte*> addresses;
  for (int i = 0; i < 8; ++i) blocks.push_back(f.pool->allocate(kMiB));
  for (const auto& block : blocks) addresses.push_back(block->address());
  blocks.clear();
  CHECK_EQ(f.pool->statistics().waiting.count.current, 8u);
  for (int i = 0; i < 8; ++i) {
    blocks.push_back(f.pool->allocate(kMiB));
    CHECK(std::find(addresses.begin(), addresses.end(), blocks.back()->address()) !=
          addresses.end());
  }
  CHECK_EQ(f.driver->counts().synchronizations, 1u);
  CHECK_EQ(f.pool->statistics().synchronizations, 1u);
  blocks.pop_back();  // dropped after the synchronize: needs another one
  blocks.push_back(f.pool->allocate(kMiB));
  CHECK_EQ(f.driver->counts().synchronizations, 2u);
}

TEST(small_blocks_wait_as_well) {
  Fixture f;
  auto block = f.pool->allocate(100);
  const auto neighbour = f.pool->allocate(100);
  const std::byte* address = use_and_drop(f, std::move(block), 7);
  const auto other = f.pool->allocate(100);
  CHECK(other->address() != address);
  f.pool->check_invariants();
  f.driver->finish(7);
  f.pool->trim();
  const auto again = f.pool->allocate(100);
  CHECK_EQ(again->address(), address);
}

TEST(stream_that_cannot_be_recorded_counts_as_unknown) {
  Fixture f;
  auto block = f.pool->allocate(kMiB);
  block->record_stream(7);
  block->record_stream(8);
  f.driver->break_context();
  block.reset();
  CHECK_EQ(f.driver->counts().events, 0u);
  CHECK_EQ(f.pool->statistics().waiting.count.current, 1u);
  CHECK_THROWS(SystemError, f.pool->allocate(kMiB));
  const Trimmed trimmed = f.pool->trim();
  CHECK_EQ(trimmed.bytes, 0u);
  CHECK(trimmed.kept_because.find("broken") != std::string::npos);
  CHECK_EQ(f.pool->statistics().waiting.count.current, 1u);
  f.pool->check_invariants();
  f.pool.reset();  // nothing can be running any more
  CHECK_EQ(f.source->account().now(), 0u);
  CHECK_EQ(f.driver->counts().registered_ranges, 0u);
}

TEST(wait_that_fails_forgets_no_block) {
  Fixture f;
  f.raise_peak(2 * kMiB);
  use_and_drop(f, f.pool->allocate(kMiB), 7);
  f.driver->break_context();
  CHECK(!f.pool->trim().kept_because.empty());
  CHECK_EQ(f.pool->statistics().waiting.bytes.current, kMiB);
  f.driver->finish(7);
  const auto again = f.pool->allocate(kMiB);
  CHECK_EQ(f.pool->statistics().reuses, 1u);
}

TEST(trim_waits_and_unregisters) {
  Fixture f;
  use_and_drop(f, f.pool->allocate(3 * kMiB), 7);
  f.pool->allocate(2 * kMiB).reset();
  CHECK_EQ(f.source->account().now(), 2 * kMiB);
  CHECK_EQ(f.pool->trim().bytes, 2 * kMiB);
  CHECK_EQ(f.source->account().now(), 0u);
  CHECK_EQ(f.driver->counts().registered_ranges, 0u);
  CHECK_EQ(f.driver->counts().wrong_unregisters, 0u);
  CHECK_EQ(f.driver->counts().events, 0u);
}

TEST(pool_that_dies_waits_and_unregisters) {
  Fixture f;
  auto last = f.pool->allocate(2 * kMiB);
  use_and_drop(f, f.pool->allocate(3 * kMiB), 7);
  last->record_stream(9);
  f.driver->launch(9);
  f.pool.reset();
  last.reset();
  CHECK_EQ(f.source->account().now(), 0u);
  CHECK_EQ(f.driver->counts().registered_ranges, 0u);
  CHECK_EQ(f.driver->counts().events, 0u);
  CHECK(f.driver->counts().event_waits >= 2);
}

TEST(region_made_for_one_block_serves_its_size_only) {
  Fixture f;
  f.raise_peak(64 * kMiB);
  use_and_drop(f, f.pool->allocate(32 * kMiB), 7);
  f.driver->finish(7);
  const auto small = f.pool->allocate(kMiB);
  CHECK_EQ(small->offset(), 0u);
  CHECK_EQ(small->region()->range().size(), kMiB);
  const auto near = f.pool->allocate(32 * kMiB - 4096);
  CHECK_EQ(near->region()->range().size(), 32 * kMiB);
  CHECK_EQ(near->capacity(), 32 * kMiB);
  f.pool->check_invariants();
}

TEST(displaced_pinned_block_goes_with_its_region) {
  Fixture f;
  const auto first = f.pool->allocate(4096);  // shows that regions may be shared
  auto small = f.pool->allocate(4096);
  auto moved = f.pool->allocate(8192);  // in the same chunk
  CHECK(small->region() == moved->region());
  const std::byte* address = moved->address();
  moved->displace();
  use_and_drop(f, std::move(moved), 7);
  f.driver->finish(7);
  f.pool->trim();
  f.pool->check_invariants();
  CHECK_EQ(f.pool->statistics().lost.bytes.current, 8192u);
  std::vector<std::shared_ptr<Allocation>> blocks;
  for (int i = 0; i < 12; ++i) {
    blocks.push_back(f.pool->allocate(4096));
    CHECK(blocks.back()->address() < address || blocks.back()->address() >= address + 8192);
  }
  blocks.clear();
  small.reset();
  f.pool->trim();
  CHECK_EQ(f.source->account().now(), 4096u);
  CHECK_EQ(f.pool->statistics().lost.bytes.current, 0u);
}

TEST(refused_registration_leaves_nothing_and_pins_again_after_giving_back) {
  Fixture f;
  f.driver->fail_registration(1);
  CHECK_THROWS(SystemError, f.pool->allocate(kMiB));
  CHECK_EQ(f.source->account().now(), 0u);
  CHECK_EQ(f.source->account().regions, 0u);
  f.pool->check_invariants();
  const auto block = f.pool->allocate(kMiB);
}

TEST(register_limit_makes_the_pool_wait_and_give_back) {
  FakeRules rules;
  auto driver = std::make_shared<gpu::FakeDriver>(8 * kMiB);
  rules.driver = driver;
  const auto source = std::make_shared<FakeSource>(rules);
  const auto pool = std::make_shared<Pool>(source, driver);
  std::vector<std::shared_ptr<Allocation>> blocks;
  for (int i = 0; i < 6; ++i) blocks.push_back(pool->allocate(kMiB));
  for (const auto& block : blocks) block->record_stream(5);
  driver->launch(5);
  blocks.clear();
  const auto large = pool->allocate(7 * kMiB);
  CHECK_EQ(driver->counts().registered_bytes, 7 * kMiB);
  CHECK_THROWS(OutOfMemory, pool->allocate(2 * kMiB));
}

TEST(long_queue_of_running_blocks_does_not_slow_every_allocation) {
  Fixture f;
  f.raise_peak(size_t{1} << 30);
  std::vector<std::shared_ptr<Allocation>> blocks;
  for (int i = 0; i < 500; ++i) blocks.push_back(f.pool->allocate(kMiB));
  for (auto& block : blocks) use_and_drop(f, std::move(block), 7);
  blocks.clear();
  const auto before = f.driver->counts().event_queries;
  const auto fresh = f.pool->allocate(kMiB);
  CHECK(f.driver->counts().event_queries - before <= 32);
  CHECK_EQ(f.pool->statistics().waiting.count.current, 500u);
  f.driver->finish(7);
  const auto again = f.pool->allocate(kMiB);
  CHECK_EQ(f.pool->statistics().waiting.count.current, 0u);
  f.pool->check_invariants();
}

}  // namespace
}  // namespace cxl_offload::memory
