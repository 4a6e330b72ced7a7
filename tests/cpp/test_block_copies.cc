// Blocks with a copy on each of several nodes: simulated nodes, and accounts against the kernel's.
#include <cstring>

#include "check.h"
#include "core/error.h"
#include "memory/block_copies.h"
#include "memory/outside_pages.h"
#include "simulated_ground.h"

namespace cxl_offload::memory {
namespace {

std::shared_ptr<Session> session_on(const Ground& ground) {
  return std::make_shared<Session>(ground.placer());
}

Rule copies_on(std::vector<Share> shares) {
  return rule_of(RuleKind::kReplicate, std::move(shares));
}

TEST(every_node_has_and_is_charged_a_whole_copy) {
  const Ground ground;
  const auto session = session_on(ground);
  for (size_t bytes : {size_t{200}, 8 * kMiB}) {
    auto block = session->allocate(bytes, copies_on({{1}, {0}}), nullptr);
    const auto copies = block->copies();
    CHECK_EQ(copies.size(), size_t{2});
    CHECK(copies.front() == block);
    CHECK(copies.back()->copies() == copies);
    for (os::NodeId node : {0, 1}) {
      const auto range = copies[node == 1 ? 0 : 1]->range();
      CHECK_EQ(range.size(), bytes);
      CHECK((session->bytes_per_node(range) == NodeBytes{{node, bytes}}));
      CHECK(ground.charged(node) >= bytes);
    }
    CHECK(ground.accounts_agree());
    CHECK(any_copies());
  }
  CHECK(!any_copies());
  session->trim();
  CHECK(ground.all_returned());
}

TEST(a_node_is_near_to_the_copy_on_it_or_else_to_the_nearest) {
  const Ground ground;
  const auto session = session_on(ground);
  const auto block = session->allocate(kMiB, copies_on({{1}, {0}}), nullptr);
  const auto copies = block->copies();
  const std::byte* at = block->range().data() + 4321;
  CHECK(block->near_copy(at, 1) == at);
  CHECK(block->near_copy(at, 0) == copies[1]->range().data() + 4321);
  CHECK(block->near_copy(at, 2) == block->near_copy(at, 0));  // where node 2 is near to
  CHECK(block->near_copy(at, 77) == at);
  CHECK(find_first_copy(at) == block);
  CHECK(find_first_copy(copies[1]->range().data()) == nullptr);
  CHECK(find_first_copy(nullptr) == nullptr);
}

TEST(what_has_no_room_for_all_copies_has_none) {
  const Ground ground;
  const auto session = session_on(ground);
  const auto held = session->allocate(40 * kMiB, rule_of(RuleKind::kBind, {{1}}), nullptr);
  CHECK_THROWS(OutOfMemory, session->allocate(40 * kMiB, copies_on({{0}, {1}}), nullptr));
  CHECK_EQ(ground.charged(0), uint64_t{0});
  CHECK(ground.accounts_agree());
  CHECK(!any_copies());
}

TEST(the_first_copy_gone_the_others_stay_as_ordinary_blocks) {
  const Ground ground;
  const auto session = session_on(ground);
  auto first = session->allocate(kMiB, copies_on({{0}, {2}}), nullptr);
  const auto second = first->copies().back();
  first.reset();
  CHECK(!any_copies());
  CHECK(second->copies().empty());
  CHECK((session->bytes_per_node(second->range()) == NodeBytes{{2, kMiB}}));
  CHECK_THROWS(InvalidArgument, second->move(rule_of(RuleKind::kBind, {{0}})));
}

TEST(copies_do_not_move_and_pages_become_no_copies) {
  const Ground ground;
  const auto session = session_on(ground);
  const auto block = session->allocate(kMiB, copies_on({{0}, {1}}), nullptr);
  const auto one = session->allocate(kMiB, rule_of(RuleKind::kBind, {{0}}), nullptr);
  for (const auto& copy : block->copies()) {
    CHECK_THROWS(InvalidArgument, copy->move(rule_of(RuleKind::kBind, {{2}})));
    CHECK_THROWS(InvalidArgument, copy->move_part(0, kPage, rule_of(RuleKind::kBind, {{2}})));
  }
  CHECK_THROWS(InvalidArgument, one->move(copies_on({{0}, {1}})));
  CHECK_THROWS(InvalidArgument, session->place({}, copies_on({{0}, {1}})));
  CHECK((session->bytes_per_node(one->range()) == NodeBytes{{0, kMiB}}));
}

TEST(pages_that_stray_come_back_in_every_copy) {
  const Ground ground;
  const auto session = session_on(ground);
  const auto block = session->allocate(kMiB, copies_on({{0}, {1}}), nullptr);
  for (const auto& copy : block->copies()) {
    move_to_runs(*ground.kernel, copy->range(), {{0, kMiB, 2}}, kPage);
    const AskedPages asked = copy->ask_pages(true);
    CHECK(!asked.strays.empty() && asked.strays.front().is_back);
  }
  CHECK((session->bytes_per_node(block->copies()[1]->range()) == NodeBytes{{1, kMiB}}));
  CHECK(ground.accounts_agree());
}

}  // namespace
}  // namespace cxl_offload::memory
