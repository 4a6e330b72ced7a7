// Weights -> granules -> nodes: exact shares, and cuts that keep them.
#include <algorithm>
#include <map>
#include <random>

#include "check.h"
#include "core/error.h"
#include "memory/run_map.h"
#include "memory/stripe.h"

namespace cxl_offload::memory {
namespace {

using os::NodeId;

std::map<NodeId, size_t> sum(const std::vector<Run>& runs) {
  std::map<NodeId, size_t> total;
  for (const Run& run : runs) total[run.node] += run.bytes;
  return total;
}

std::string text(const std::vector<Run>& runs) {
  std::string result;
  for (const Run& run : runs) {
    result += std::to_string(run.offset) + "+" + std::to_string(run.bytes) + "@" +
              std::to_string(run.node) + " ";
  }
  return result;
}

std::vector<Share> random_shares(std::mt19937& random) {
  std::vector<Share> shares;
  const int nodes = 1 + static_cast<int>(random() % 4);
  for (int node = 0; node < nodes; ++node) shares.push_back({node, 1 + uint32_t(random() % 9)});
  return shares;
}

}  // namespace

TEST(stripe_lays_whole_cycles_out_in_the_order_of_the_nodes) {
  const Stripe stripe({{0, 4}, {1, 2}, {2, 1}}, 10);
  CHECK_EQ(stripe.cycle_bytes(), 70u);
  CHECK_EQ(text(stripe.runs(140)), "0+40@0 40+20@1 60+10@2 70+40@0 110+20@1 130+10@2 ");
}

TEST(stripe_divides_weights_by_their_common_divisor) {
  const Stripe stripe({{0, 200}, {3, 100}}, 4);
  CHECK_EQ(stripe.cycle_bytes(), 12u);
  CHECK_EQ(text(stripe.runs(12)), "0+8@0 8+4@3 ");
}

TEST(stripe_merges_neighbours_on_one_node) {
  CHECK_EQ(text(Stripe({{5, 7}}, 4096).runs(100000)), "0+100000@5 ");
}

TEST(stripe_ends_in_a_part_of_a_granule) {
  CHECK_EQ(text(Stripe({{0, 1}, {1, 1}}, 8).runs(13)), "0+8@0 8+5@1 ");
  CHECK_EQ(text(Stripe({{0, 1}, {1, 1}}, 8).runs(0)), "");
}

TEST(stripe_counts_the_bytes_of_its_runs_and_puts_less_than_a_cycle_on_the_heaviest) {
  std::mt19937 random(2);
  for (int round = 0; round < 20000; ++round) {
    const Stripe stripe(random_shares(random), 1 + random() % 9);
    const size_t bytes = random() % 700;
    auto expected = sum(stripe.runs(bytes));
    if (bytes < stripe.cycle_bytes()) {
      NodeId first = 0;
      uint32_t most = 0;
      for (const Share& share : stripe.shares()) {
        if (share.weight > most) first = share.node, most = share.weight;
      }
      expected = {{first, bytes}};
    }
    const auto placed = stripe.allocation_bytes(bytes);
    for (size_t i = 0; i < placed.size(); ++i) {
      CHECK_EQ(placed[i], expected[stripe.shares()[i].node]);
    }
  }
}

// Largest remainder (Hamilton) of all granules, by the definition, ties to the earlier node.
TEST(stripe_shares_are_the_largest_remainder_shares_for_random_weights) {
  std::mt19937 random(1);
  for (int round = 0; round < 20000; ++round) {
    const auto shares = random_shares(random);
    const size_t granules = random() % 200;
    size_t weights = 0;
    for (const Share& share : shares) weights += share.weight;
    std::map<NodeId, size_t> expected;
    std::vector<std::pair<double, NodeId>> remainders;
    size_t given = 0;
    for (const Share& share : shares) {
      const double quota = double(granules) * share.weight / double(weights);
      const auto whole = granules * share.weight / weights;
      if (whole > 0) expected[share.node] = whole;
      given += whole;
      remainders.emplace_back(-(quota - double(whole)), share.node);
    }
    std::stable_sort(remainders.begin(), remainders.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first - 1e-9; });
    for (size_t i = 0; given < granules; ++i, ++given) ++expected[remainders[i].second];
    const auto runs = Stripe(shares, 1).runs(granules);
    CHECK(sum(runs) == expected);
    size_t offset = 0;
    for (const Run& run : runs) {
      CHECK_EQ(run.offset, offset);
      offset += run.bytes;
    }
    CHECK_EQ(offset, granules);
  }
}

TEST(stripe_cut_keeps_shares_exactly_when_the_granules_count_alike) {
  std::mt19937 random(2);
  for (int round = 0; round < 20000; ++round) {
    const Stripe stripe(random_shares(random), 4);
    const size_t total = 4 * (1 + random() % 120);
    const size_t offset = 4 * (random() % (total / 4));
    const size_t bytes = 4 * (1 + random() % ((total - offset) / 4));
    RunMap whole(stripe.runs(total));
    const bool alike = sum(whole.slice(offset, bytes)) == sum(stripe.runs(bytes));
    CHECK_EQ(stripe.cut_keeps_shares(total, offset, bytes), alike);
  }
}

TEST(stripe_says_the_bytes_of_its_shares_without_the_layout) {
  std::mt19937 random(11);
  for (int turn = 0; turn < 3000; ++turn) {
    const Stripe stripe(random_shares(random), 1 + random() % 12);
    const size_t bytes = random() % 400;
    auto laid_out = sum(stripe.runs(bytes));
    const auto direct = stripe.bytes_of_shares(bytes);
    for (size_t i = 0; i < direct.size(); ++i) {
      CHECK_EQ(direct[i], laid_out[stripe.shares()[i].node]);
    }
  }
  const Stripe fine({{0, 1}, {2, 1}}, size_t{2} << 20);
  CHECK(fine.bytes_of_shares(size_t{1} << 60) == std::vector<size_t>(2, size_t{1} << 59));
}

TEST(stripe_refuses_sizes_that_no_memory_has) {
  const size_t largest = size_t{1} << 61;  // of two
  CHECK_EQ(Stripe({{0, 1}, {2, 1}}, largest).cycle_bytes(), 2 * largest);
  CHECK_THROWS(InvalidArgument, Stripe({{0, 1}, {2, 1}}, largest + 1));
  CHECK_THROWS(InvalidArgument, Stripe({{0, 1}, {2, 1}}, size_t{1} << 63));
  CHECK_THROWS(InvalidArgument, Stripe({{0, 1}, {2, 1}}, 4096).runs(SIZE_MAX));
}

TEST(stripe_refuses_what_means_nothing) {
  CHECK_THROWS(InvalidArgument, Stripe({}, 4));
  CHECK_THROWS(InvalidArgument, Stripe({{0, 0}}, 4));
  CHECK_THROWS(InvalidArgument, Stripe({{0, 1}, {0, 1}}, 4));
  CHECK_THROWS(InvalidArgument, Stripe({{0, 1}}, 0));
}

TEST(run_map_follows_a_byte_by_byte_model) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    constexpr size_t kBytes = 60;
    std::vector<int> model(kBytes, 0);
    RunMap map({{0, kBytes, 0}});
    for (int step = 0; step < 12; ++step) {
      const size_t offset = random() % kBytes;
      const size_t bytes = 1 + random() % (kBytes - offset);
      const int node = int(random() % 3);
      if (random() % 3 == 0) {
        NodeBytes gone;
        for (size_t i = offset; i < offset + bytes; ++i) {
          if (model[i] >= 0) ++gone[model[i]];
          model[i] = -1;
        }
        CHECK(map.erase(offset, bytes) == gone);
      } else {
        std::fill_n(model.begin() + long(offset), bytes, node);
        map.assign(offset, {{0, bytes, node}});
      }
      NodeBytes expected;
      for (int where : model) {
        if (where >= 0) ++expected[where];
      }
      CHECK(map.bytes_per_node() == expected);
      for (const Run& run : map.slice(offset, bytes)) {
        for (size_t i = 0; i < run.bytes; ++i) CHECK_EQ(model[offset + run.offset + i], run.node);
      }
    }
  }
}

}  // namespace cxl_offload::memory
