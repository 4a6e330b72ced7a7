// Copies in host memory: pieces, teams and blocks, for the sanitizers. Values against numpy and
// torch are in tests/transfer.
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "core/cpus.h"
#include "core/error.h"
#include "transfer/host_copy.h"

namespace cxl_offload::transfer {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = std::byte(random() & 255);
  return bytes;
}

std::vector<int> helpers() { return {allowed_cpus().back(), allowed_cpus().front()}; }

TEST(every_piece_is_worked_on_once) {
  CopyTeam team(helpers());
  for (const size_t pieces : {0, 1, 2, 3, 100, 1000}) {
    std::vector<std::atomic<int>> runs(pieces);
    team.share_out(pieces, 3, [&](size_t i) { ++runs[i]; });
    for (const auto& each : runs) CHECK_EQ(each.load(), 1);
  }
}

TEST(team_serves_many_threads_one_after_the_other) {
  CopyTeam team(helpers());
  std::vector<std::jthread> callers;
  std::atomic<int> wrong = 0;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int turn = 0; turn < 200; ++turn) {
        std::vector<std::atomic<int>> runs(7);
        team.share_out(7, 3, [&](size_t i) { ++runs[i]; });
        for (const auto& each : runs) wrong += each.load() != 1;
      }
    });
  }
  callers.clear();
  CHECK_EQ(wrong.load(), 0);
}

TEST(copies_of_every_way_and_level_are_whole) {
  const Bytes source = random_bytes(1 << 20, 1);
  for (const Isa isa : supported_isas()) {
    for (const CopyWay way : {CopyWay{false, 3}, CopyWay{true, 1}, CopyWay{true, 3}}) {
      HostCopier copier(helpers(), {{0, {}}, {4096, way}}, isa);
      for (const size_t bytes : {0, 100, 4096, 65537, 1000003}) {
        Bytes target(bytes + 2, std::byte{0xee});
        copier.copy(target.data() + 1, source.data() + 3, bytes);
        CHECK(std::memcmp(target.data() + 1, source.data() + 3, bytes) == 0);
        CHECK(target.front() == std::byte{0xee} && target.back() == std::byte{0xee});
      }
    }
  }
}

TEST(blocks_that_do_not_match_are_refused) {
  HostCopier copier({}, HostCopier::default_rules(1));
  const std::vector<uint64_t> one(1), two(2);
  const std::vector<size_t> sizes(1, 8);
  CHECK_THROWS(InvalidArgument, copier.copy_blocks(one, two, sizes));
  StridedShape shape{{2}, {1}, {}, 1};
  CHECK_THROWS(InvalidArgument, copier.copy_strided(nullptr, nullptr, shape));
}

}  // namespace
}  // namespace cxl_offload::transfer
