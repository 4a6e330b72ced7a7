// Pages of others on simulated nodes: parts of one range are laid out as one.
#include "check.h"
#include "core/error.h"
#include "memory/fault_in.h"
#include "memory/outside_pages.h"
#include "simulated_ground.h"

namespace cxl_offload::memory {
namespace {

// A range that this package did not place.
struct Mapped {
  explicit Mapped(const Ground& ground, size_t bytes)
      : kernel(ground.kernel), range(kernel->map(bytes, kPage, os::PageKind::kBase), bytes) {}
  ~Mapped() { kernel->unmap(range); }

  NodeBytes bytes(size_t offset, size_t count) const {
    return query_bytes(*kernel, range.subspan(offset, count), kPage);
  }

  std::shared_ptr<os::SimulatedKernel> kernel;
  std::span<std::byte> range;
};

TEST(stripe_of_outside_pages_has_the_weights_of_its_rule) {
  const Ground ground;
  const Mapped mapped(ground, 8 * kMiB);
  Rule rule = rule_of(RuleKind::kStripe, {{0, 3}, {2, 1}});
  rule.granule_bytes = 16 * kPage;
  CHECK(place_outside(ground.placer(), rule, {mapped.range, 8 * kMiB, 8 * kMiB, 1}).empty());
  CHECK((mapped.bytes(0, 8 * kMiB) == NodeBytes{{0, 6 * kMiB}, {2, 2 * kMiB}}));
  CHECK((mapped.bytes(3 * 16 * kPage, 16 * kPage) == NodeBytes{{2, 16 * kPage}}));
}

TEST(parts_go_to_their_nodes_and_what_lies_between_is_left_alone) {
  const Ground ground;
  const Mapped mapped(ground, 64 * kPage);
  const Rule first = rule_of(RuleKind::kBind, {{0, 1}});
  const Rule second = rule_of(RuleKind::kBind, {{1, 1}});
  place_outside(ground.placer(), first, {mapped.range, 2 * kPage, 8 * kPage, 8});
  place_outside(ground.placer(), second,
                {mapped.range.subspan(2 * kPage), 2 * kPage, 8 * kPage, 8});
  for (size_t row = 0; row < 8; ++row) {
    CHECK((mapped.bytes(row * 8 * kPage, 2 * kPage) == NodeBytes{{0, 2 * kPage}}));
    CHECK((mapped.bytes((row * 8 + 2) * kPage, 2 * kPage) == NodeBytes{{1, 2 * kPage}}));
    CHECK((mapped.bytes((row * 8 + 4) * kPage, 4 * kPage) == NodeBytes{{-1, 4 * kPage}}));
  }
}

TEST(stripe_goes_on_from_part_to_part) {
  const Ground ground;
  const Mapped mapped(ground, 64 * kPage);
  Rule rule = rule_of(RuleKind::kStripe, {{0, 1}, {1, 1}});
  rule.granule_bytes = 3 * kPage;
  place_outside(ground.placer(), rule, {mapped.range, 2 * kPage, 8 * kPage, 6});
  CHECK((mapped.bytes(0, 2 * kPage) == NodeBytes{{0, 2 * kPage}}));
  CHECK((mapped.bytes(8 * kPage, 2 * kPage) == NodeBytes{{0, kPage}, {1, kPage}}));
  CHECK((mapped.bytes(16 * kPage, 2 * kPage) == NodeBytes{{1, 2 * kPage}}));
}

TEST(outside_pages_on_a_full_node_are_refused_before_any_is_faulted_in) {
  const Ground ground;
  const Mapped mapped(ground, 80 * kMiB);
  const Rule rule = rule_of(RuleKind::kBind, {{2, 1}});
  CHECK_THROWS(OutOfMemory,
               place_outside(ground.placer(), rule, {mapped.range, 80 * kMiB, 80 * kMiB, 1}));
  CHECK_EQ(ground.kernel->used_bytes(2), 0u);
  const Rule spills = rule_of(RuleKind::kPreferred, {{2, 1}});
  const auto notes =
      place_outside(ground.placer(), spills, {mapped.range, 80 * kMiB, 80 * kMiB, 1});
  CHECK_EQ(notes.size(), 1u);
  CHECK((mapped.bytes(0, 80 * kMiB) == NodeBytes{{0, 16 * kMiB}, {2, 64 * kMiB}}));
}

TEST(parts_that_are_no_whole_pages_or_leave_their_range_are_refused) {
  const Ground ground;
  const Mapped mapped(ground, 64 * kPage);
  const Rule rule = rule_of(RuleKind::kBind, {{0, 1}});
  const auto place = [&](size_t part, size_t stride, size_t count) {
    place_outside(ground.placer(), rule, {mapped.range, part, stride, count});
  };
  CHECK_THROWS(InvalidArgument, place(kPage / 2, kPage, 1));
  CHECK_THROWS(InvalidArgument, place(kPage, kPage / 2, 1));
  CHECK_THROWS(InvalidArgument, place(2 * kPage, kPage, 2));
  CHECK_THROWS(InvalidArgument, place(kPage, 8 * kPage, 9));
  CHECK_THROWS(InvalidArgument, place(0, kPage, 1));
  CHECK_THROWS(InvalidArgument, place(kPage, kPage, 0));
  Rule device = rule_of(RuleKind::kDevice, {});
  device.device = "dax0.0";
  CHECK_THROWS(InvalidArgument,
               place_outside(ground.placer(), device, {mapped.range, kPage, kPage, 1}));
  CHECK_EQ(ground.kernel->used_bytes(0), 0u);
}

TEST(parts_that_wrap_round_are_refused) {
  const Ground ground;
  const Mapped mapped(ground, 8 * kPage);
  const Rule rule = rule_of(RuleKind::kBind, {{0, 1}});
  const auto place = [&](size_t part, size_t stride, size_t count) {
    place_outside(ground.placer(), rule, {mapped.range, part, stride, count});
  };
  const size_t wraps = (SIZE_MAX / 2 + 1);  // twice that is nothing
  CHECK_THROWS(InvalidArgument, place(kPage, wraps, 3));
  CHECK_THROWS(InvalidArgument, place(kPage, kPage, SIZE_MAX / kPage + 2));
  CHECK_THROWS(InvalidArgument, place(SIZE_MAX - kPage + 1, SIZE_MAX - kPage + 1, 2));
  CHECK_EQ(mapped.bytes(0, 8 * kPage).at(-1), 8 * kPage);
}

}  // namespace
}  // namespace cxl_offload::memory
