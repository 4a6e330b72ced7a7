// A pool without a GPU: what blocks look like, what is reused, cut, given back.
#include <cstring>
#include <set>
#include <vector>

#include "check.h"
#include "fake_regions.h"
#include "memory/pool.h"

namespace cxl_offload::memory {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMiB = size_t{1} << 20;

struct Fixture {
  explicit Fixture(FakeRules rules = {})
      : source(std::make_shared<FakeSource>(rules)), pool(std::make_shared<Pool>(source)) {}
  std::shared_ptr<FakeSource> source;
  std::shared_ptr<Pool> pool;
};

using Block = std::shared_ptr<Allocation>;

uintptr_t address_of(const Block& block) { return reinterpret_cast<uintptr_t>(block->address()); }

TEST(large_block_owns_whole_pages_and_small_ones_share) {
  Fixture f;
  const auto large = f.pool->allocate(kPage + 1);
  const auto page = f.pool->allocate(kPage - 10);  // rounds up to a page
  const auto small = f.pool->allocate(100);
  const auto other = f.pool->allocate(1);
  CHECK_EQ(large->bytes(), kPage + 1);
  CHECK_EQ(large->capacity(), 2 * kPage);
  CHECK_EQ(address_of(large) % kPage, 0u);
  CHECK(large->owns_pages() && page->owns_pages());
  CHECK_EQ(page->capacity(), kPage);
  CHECK(!small->owns_pages());
  CHECK_EQ(small->capacity(), 128u);
  CHECK_EQ(address_of(small) % 64, 0u);
  CHECK_EQ(address_of(small) / kPage, address_of(other) / kPage);
  CHECK(address_of(small) / kPage != address_of(page) / kPage);
  CHECK(small->region() != nullptr);
  CHECK_EQ(small->region()->range().data() + small->offset(), small->address());
  f.pool->check_invariants();
}

TEST(empty_block_has_no_address_and_costs_nothing) {
  Fixture f;
  const auto empty = f.pool->allocate(0);
  CHECK(empty->address() == nullptr);
  CHECK(empty->region() == nullptr);
  CHECK(!empty->pinned() && !empty->owns_pages());
  empty->record_stream(3);
  CHECK_EQ(f.source->account().obtained, 0u);
  CHECK_EQ(f.pool->statistics().asked.count.total, 0u);
}

TEST(absurd_size_is_refused) {
  Fixture f;
  CHECK_THROWS(OutOfMemory, f.pool->allocate(SIZE_MAX));
  CHECK_THROWS(OutOfMemory, f.pool->allocate(SIZE_MAX / 2));
  f.pool->check_invariants();
}

TEST(dropped_block_is_reused_at_the_same_size) {
  Fixture f;
  auto block = f.pool->allocate(3 * kMiB);
  const uintptr_t address = address_of(block);
  block.reset();
  block = f.pool->allocate(3 * kMiB);
  CHECK_EQ(address_of(block), address);
  CHECK_EQ(f.source->account().obtained, 1u);
  CHECK_EQ(f.pool->statistics().reuses, 1u);
}

TEST(dropped_block_is_cut_for_smaller_ones_and_merged_again) {
  Fixture f;
  f.pool->allocate(4 * kMiB).reset();
  std::vector<Block> parts;
  for (int i = 0; i < 4; ++i) parts.push_back(f.pool->allocate(kMiB));
  CHECK_EQ(f.source->account().obtained, 1u);
  CHECK_EQ(f.pool->statistics().cached.bytes.current, 0u);
  parts.clear();
  f.pool->check_invariants();
  CHECK_EQ(f.pool->statistics().cached.count.current, 1u);
  const auto whole = f.pool->allocate(4 * kMiB);
  CHECK_EQ(f.source->account().obtained, 1u);
}

TEST(blocks_of_two_regions_are_never_merged) {
  Fixture f;
  auto first = f.pool->allocate(kMiB);
  auto second = f.pool->allocate(kMiB);
  CHECK_EQ(f.source->account().obtained, 2u);
  first.reset();
  second.reset();
  f.pool->check_invariants();
  CHECK_EQ(f.pool->statistics().cached.count.current, 2u);
}

TEST(miss_gives_back_what_the_peak_does_not_need) {
  Fixture f;
  for (int i = 0; i < 8; ++i) f.pool->allocate((8 + i) * kMiB).reset();
  CHECK(f.source->account().now() <= 15 * kMiB + 15 * kMiB / 64 + (64 << 10));
  CHECK(f.source->account().peak_bytes <= 15 * kMiB + 15 * kMiB / 64 + (64 << 10));
  f.pool->check_invariants();
}

TEST(miss_returns_parts_of_regions_in_use) {
  Fixture f;
  auto large = f.pool->allocate(16 * kMiB);
  large.reset();
  const auto pinned_down = f.pool->allocate(kMiB);  // in the region of 16 MiB
  const auto next = f.pool->allocate(15 * kMiB + 100 * kPage);
  CHECK(f.source->account().now() <= 16 * kMiB + 16 * kMiB / 64 + (64 << 10) + 100 * kPage);
  CHECK_EQ(f.source->account().now(), f.pool->statistics().mapped.bytes.current);
  f.pool->check_invariants();
}

TEST(small_blocks_do_not_map_a_region_each) {
  Fixture f;
  std::vector<Block> blocks;
  for (int i = 0; i < 20000; ++i) blocks.push_back(f.pool->allocate(64 + i % 9000));
  // 90 MB: some hundred chunks, for each doubling takes at most as many.
  CHECK(f.source->account().regions < 800);
  const auto statistics = f.pool->statistics();
  const double waste = static_cast<double>(statistics.mapped.bytes.peak) /
                       static_cast<double>(statistics.held.bytes.peak);
  CHECK(waste < 1.02);
}

TEST(trim_returns_everything_when_nothing_is_live) {
  Fixture f;
  std::vector<Block> blocks;
  for (size_t i = 1; i < 200; ++i) blocks.push_back(f.pool->allocate(i * 1000));
  const size_t mapped = f.source->account().now();
  blocks.clear();
  CHECK_EQ(f.pool->trim().bytes, mapped);
  CHECK_EQ(f.source->account().now(), 0u);
  CHECK_EQ(f.source->account().regions, 0u);
  CHECK_EQ(f.pool->statistics().mapped.count.current, 0u);
  f.pool->check_invariants();
}

TEST(trim_leaves_live_blocks_readable) {
  FakeRules rules;
  rules.backed = true;
  Fixture f(rules);
  std::vector<Block> blocks;
  for (size_t i = 0; i < 64; ++i) {
    blocks.push_back(f.pool->allocate(1 + i * 1500));
    std::memset(blocks.back()->address(), static_cast<int>(i), blocks.back()->bytes());
  }
  for (size_t i = 0; i < 64; i += 2) blocks[i].reset();
  CHECK(f.pool->trim().bytes > 0);
  for (size_t i = 1; i < 64; i += 2) {
    for (size_t at = 0; at < blocks[i]->bytes(); ++at) {
      if (blocks[i]->address()[at] != static_cast<std::byte>(i)) CHECK(!"a live byte changed");
    }
  }
  f.pool->check_invariants();
}

TEST(part_that_cannot_be_returned_stays_cached) {
  FakeRules rules;
  rules.refuse_release = true;
  Fixture f(rules);
  auto first = f.pool->allocate(8 * kMiB);
  first.reset();
  const auto small = f.pool->allocate(kMiB);
  CHECK_EQ(f.pool->trim().bytes, 0u);
  f.pool->check_invariants();
  CHECK_EQ(f.pool->statistics().cached.bytes.current, 7 * kMiB);
  const auto again = f.pool->allocate(7 * kMiB);
  CHECK_EQ(f.source->account().obtained, 1u);
}

TEST(out_of_memory_gives_everything_back_and_tries_again) {
  FakeRules rules;
  rules.limit_bytes = 10 * kMiB;
  Fixture f(rules);
  auto kept = f.pool->allocate(kMiB);
  std::vector<Block> blocks;
  for (int i = 0; i < 8; ++i) blocks.push_back(f.pool->allocate(kMiB));
  blocks.clear();  // 8 MiB cached in eight regions, below the peak
  const auto large = f.pool->allocate(8 * kMiB + kPage);
  CHECK_EQ(large->capacity(), 8 * kMiB + kPage);
  CHECK_THROWS(OutOfMemory, f.pool->allocate(2 * kMiB));
  f.pool->check_invariants();
  CHECK_EQ(f.pool->statistics().asked.count.current, 2u);
  const auto rest = f.pool->allocate(kMiB - kPage);
}

TEST(out_of_memory_for_a_chunk_takes_what_just_fits) {
  FakeRules rules;
  rules.limit_bytes = 3 * kPage;
  Fixture f(rules);
  const auto small = f.pool->allocate(64);
  const auto page = f.pool->allocate(kPage);
  const auto last = f.pool->allocate(kPage);
  CHECK_EQ(f.source->account().now(), 3 * kPage);
  CHECK_THROWS(OutOfMemory, f.pool->allocate(kPage));
  const auto message = CHECK_THROWS(OutOfMemory, f.pool->allocate(2 * kPage));
  CHECK_EQ(message, "obtain 8 KiB: the fake machine is full");
  f.pool->check_invariants();
}

TEST(other_errors_go_up_unchanged_and_leave_nothing) {
  Fixture f;
  f.source->on_obtain = [](size_t) { throw PlacementError("strict"); };
  CHECK_EQ(CHECK_THROWS(PlacementError, f.pool->allocate(kMiB)), "strict");
  f.pool->check_invariants();
  CHECK_EQ(f.pool->statistics().asked.count.total, 0u);
}

TEST(stripe_is_cut_only_where_its_shares_are_kept) {
  FakeRules rules;
  rules.cycle_bytes = 6 * kMiB;
  rules.odd_bytes = 7 * kMiB;
  Fixture f(rules);
  f.pool->allocate(36 * kMiB).reset();
  std::vector<Block> blocks;
  for (const size_t mib : {1, 7, 6, 5, 7, 2}) blocks.push_back(f.pool->allocate(mib * kMiB));
  for (const auto& block : blocks) {
    CHECK_EQ(block->offset() % rules.cycle_bytes, 0u);
    CHECK(block->region()->keeps_rule(block->offset(), block->capacity()));
  }
  CHECK(blocks[1]->region() != blocks[0]->region());  // 7 MiB: not at an offset
  CHECK(blocks[2]->region() == blocks[0]->region());
  f.pool->check_invariants();
  blocks.clear();
  f.pool->check_invariants();
  f.pool->trim();
  CHECK_EQ(f.source->account().now(), 0u);
}

TEST(stripe_of_the_same_size_is_reused_whole) {
  FakeRules rules;
  rules.cycle_bytes = 6 * kMiB;
  Fixture f(rules);
  for (int i = 0; i < 10; ++i) {
    const auto first = f.pool->allocate(7 * kMiB);
    const auto second = f.pool->allocate(13 * kMiB);
    CHECK_EQ(first->offset(), 0u);
  }
  CHECK_EQ(f.source->account().obtained, 2u);
  CHECK_EQ(f.pool->statistics().mapped.bytes.peak, 20 * kMiB);
}

TEST(region_that_keeps_no_rule_serves_once) {
  FakeRules rules;
  rules.keeps = false;
  Fixture f(rules);
  std::set<uintptr_t> seen;
  for (int i = 0; i < 50; ++i) {
    const auto large = f.pool->allocate(kMiB + i);
    const auto small = f.pool->allocate(100);
    CHECK(seen.insert(address_of(large)).second);
    f.pool->check_invariants();
  }
  CHECK_EQ(f.source->account().now(), 0u);
  CHECK_EQ(f.pool->statistics().mapped.count.current, 0u);
}

TEST(displaced_block_is_returned_and_never_used_again) {
  Fixture f;
  auto whole = f.pool->allocate(4 * kMiB);
  whole.reset();
  const auto before = f.pool->allocate(kMiB);
  auto moved = f.pool->allocate(kMiB);
  const auto after = f.pool->allocate(2 * kMiB);
  const uintptr_t address = address_of(moved);
  moved->displace();
  moved.reset();
  f.pool->check_invariants();
  CHECK_EQ(f.source->account().now(), 3 * kMiB);
  CHECK_EQ(f.pool->statistics().cached.bytes.current, 0u);
  const auto next = f.pool->allocate(kMiB);
  CHECK(address_of(next) != address);
}

TEST(displaced_block_that_cannot_be_returned_goes_with_its_region) {
  FakeRules rules;
  rules.refuse_release = true;
  Fixture f(rules);
  f.pool->allocate(2 * kMiB).reset();
  auto kept = f.pool->allocate(kMiB);
  auto moved = f.pool->allocate(kMiB);
  moved->displace();
  moved.reset();
  f.pool->check_invariants();
  CHECK_EQ(f.pool->statistics().lost.bytes.current, kMiB);
  kept.reset();
  f.pool->check_invariants();
  CHECK_EQ(f.pool->statistics().lost.bytes.current, 0u);
  CHECK_EQ(f.source->account().now(), 0u);
}

TEST(block_that_shares_its_page_cannot_be_displaced) {
  Fixture f;
  const auto small = f.pool->allocate(100);
  const auto message = CHECK_THROWS(InvalidArgument, small->displace());
  CHECK(message.find("only allocations of a page or more can move") != std::string::npos);
}

TEST(allocation_outlives_the_pool) {
  FakeRules rules;
  rules.backed = true;
  Fixture f(rules);
  auto block = f.pool->allocate(kMiB);
  f.pool->allocate(3 * kMiB).reset();
  f.pool.reset();
  std::memset(block->address(), 1, block->bytes());
  CHECK(f.source->account().now() >= kMiB);
  block.reset();
  CHECK_EQ(f.source->account().now(), 0u);
  CHECK_EQ(f.source->account().regions, 0u);
}

TEST(huge_pages_are_shared_by_what_is_smaller) {
  FakeRules rules;
  rules.page_bytes = 2 * kMiB;
  Fixture f(rules);
  const auto first = f.pool->allocate(kMiB);
  const auto second = f.pool->allocate(kMiB - 64);
  const auto large = f.pool->allocate(3 * kMiB);
  CHECK_EQ(f.source->account().now(), 6 * kMiB);
  CHECK_EQ(large->capacity(), 4 * kMiB);
  CHECK(!first->owns_pages());
  f.pool->check_invariants();
}

}  // namespace
}  // namespace cxl_offload::memory
