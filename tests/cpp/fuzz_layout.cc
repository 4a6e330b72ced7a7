// What libFuzzer drives, and test_fuzz_layout.cc replays: stripes, maps of runs, layouts of any
// rule on nodes with any room, and pages of others, against models that know only the definitions.
// Sizes of which no machine has the memory are refused, quickly.
#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "core/error.h"
#include "fuzz_input.h"
#include "memory/layout.h"
#include "memory/outside_pages.h"
#include "memory/run_map.h"
#include "memory/session.h"
#include "simulated_ground.h"

namespace cxl_offload::memory {
namespace {

using os::NodeId;
using os::PageKind;

constexpr size_t kMostRuns = 20000;  // of a stripe that is compared granule by granule

// Small numbers, and those around powers of two up to the greatest.
size_t any_amount(Input& input, size_t unit) {
  const size_t kind = input.below(8);
  if (kind < 4) return input.byte() * unit;
  if (kind < 6) return input.size(size_t{1} << 36) / unit * unit;
  const size_t power = size_t{1} << (kind == 6 ? input.below(64) : 48 + input.below(16));
  return kind == 6 ? power + input.below(3) - 1 : power / unit * unit;
}

// Mostly sound: small weights on different nodes.
std::vector<Share> any_shares(Input& input) {
  std::vector<Share> shares;
  const size_t kind = input.byte();
  const size_t count = kind < 4 ? kind : 1 + kind % 3;
  for (size_t i = 0; i < count; ++i) {
    const size_t each = input.byte();
    const size_t node = each < 8 ? each : (kind / 16 + i) % 3;
    const size_t weight = each < 16 ? input.number() : each < 24 ? 0 : 1 + each % 4;
    shares.push_back({static_cast<NodeId>(node), static_cast<uint32_t>(weight)});
  }
  return shares;
}

size_t weight_sum(const std::vector<Share>& shares) {
  size_t sum = 0;
  for (const Share& share : shares) sum += share.weight;
  return sum;
}

// How many of `granules` are each share's, by largest remainder, ties to the earlier.
std::vector<size_t> shares_of(const std::vector<Share>& shares, size_t granules) {
  __extension__ using Wide = unsigned __int128;
  const Wide sum = weight_sum(shares);
  std::vector<size_t> counts;
  std::vector<std::pair<Wide, size_t>> rests;
  size_t given = 0;
  for (size_t i = 0; i < shares.size(); ++i) {
    const Wide scaled = Wide{granules} * shares[i].weight;
    counts.push_back(static_cast<size_t>(scaled / sum));
    rests.emplace_back(sum - scaled % sum, i);
    given += counts.back();
  }
  std::ranges::sort(rests);
  for (size_t i = 0; given < granules; ++i, ++given) ++counts[rests[i].second];
  return counts;
}

void require_in_line(const std::vector<Run>& runs, size_t bytes) {
  size_t end = 0;
  for (const Run& run : runs) {
    require(run.offset == end && run.bytes > 0, "runs that do not follow each other");
    end += run.bytes;
  }
  require(end == bytes, "runs that are not the whole range");
}

NodeBytes per_node(const std::vector<Run>& runs) {
  NodeBytes total;
  for (const Run& run : runs) total[run.node] += run.bytes;
  return total;
}

void fuzz_stripe(Input& input) {
  const auto shares = any_shares(input);
  const size_t granule = any_amount(input, 1);
  const size_t bytes = any_amount(input, 1);
  std::optional<Stripe> stripe;
  try {
    stripe.emplace(shares, granule);
  } catch (const InvalidArgument&) {
    return;
  }
  const size_t granules = bytes / granule + (bytes % granule != 0 ? 1 : 0);
  if (granules > kMostRuns) return;  // see fuzz_allocations
  std::vector<Run> runs;
  try {
    runs = stripe->runs(bytes);
  } catch (const InvalidArgument&) {
    return require(bytes > size_t{1} << 47, "a size that exists was refused");
  }
  require_in_line(runs, bytes);
  const auto counts = shares_of(shares, granules);
  const NodeBytes total = per_node(runs);
  size_t off = 0;
  for (size_t i = 0; i < shares.size(); ++i) {
    const auto found = total.find(shares[i].node);
    const size_t is = found == total.end() ? 0 : found->second;
    require(is <= counts[i] * granule && counts[i] * granule - is < granule, "shares of a stripe");
    off += is < counts[i] * granule ? 1 : 0;
  }
  require(off <= 1, "more than one granule is cut");
  if (bytes < 2 * granule || bytes > kMostRuns * granule) return;
  const size_t from = granule * (input.number() % (bytes / granule));
  const size_t cut = 1 + input.number() % (bytes - from);
  const RunMap whole(runs);
  const auto part = whole.slice(from, cut);
  require_in_line(part, cut);
  if (cut % granule != 0) return;
  const bool alike = per_node(part) == per_node(stripe->runs(cut));
  require(stripe->cut_keeps_shares(bytes, from, cut) == alike, "a cut that keeps the shares");
}

void fuzz_run_map(Input& input) {
  constexpr size_t kBytes = 90;
  std::vector<int> model(kBytes, 0);
  RunMap map({{0, kBytes, 0}});
  while (!input.empty()) {
    const size_t from = input.below(kBytes);
    const size_t bytes = input.below(kBytes - from + 1);
    const auto node = static_cast<NodeId>(input.below(4));
    if (bytes == 0) continue;
    NodeBytes gone;
    for (size_t i = from; i < from + bytes; ++i) {
      if (model[i] >= 0) ++gone[model[i]];
      model[i] = node == 3 ? -1 : node;
    }
    if (node == 3) {
      require(map.erase(from, bytes) == gone, "what an erased range held");
    } else {
      map.assign(from, {{0, bytes, node}});
    }
    NodeBytes expected;
    for (int each : model) {
      if (each >= 0) ++expected[each];
    }
    require(map.bytes_per_node() == expected, "bytes of the nodes");
    std::vector<int> sliced(bytes, -1);
    for (const Run& run : map.slice(from, bytes)) {
      require(run.offset + run.bytes <= bytes, "a slice that is too long");
      std::fill_n(sliced.begin() + static_cast<std::ptrdiff_t>(run.offset), run.bytes, run.node);
    }
    require(
        std::equal(sliced.begin(), sliced.end(), model.begin() + static_cast<std::ptrdiff_t>(from)),
        "a slice");
  }
}

Rule any_rule(Input& input, size_t page) {
  Rule rule = rule_of(input.any_of<RuleKind>({RuleKind::kBind, RuleKind::kPreferred,
                                              RuleKind::kStripe, RuleKind::kStripe}),
                      any_shares(input));
  rule.granule_bytes = any_amount(input, page);
  rule.strict = input.below(2) == 0;
  if (input.one_in(4))
    rule.pages = input.any_of<PageKind>(
        {PageKind::kTransparentHuge, PageKind::kHuge2MiB, PageKind::kHuge1GiB});
  return rule;
}

// Whether a layout on the small machine is over soon: runs are many only where bytes are few.
bool takes_long(const Rule& rule, size_t bytes) {
  return rule.kind == RuleKind::kStripe && bytes < 300 * kMiB &&
         bytes / std::max<size_t>(rule.granule_bytes, 1) > kMostRuns;
}

void fuzz_layout(Input& input) {
  os::SimulatedMachine machine = ground_machine();
  if (input.one_in(4)) machine.process_limit_bytes = input.size(200 * kMiB);
  const size_t pooled = input.below(20);
  for (auto& node : machine.nodes) node.pools = {{os::kHugePageBytes, pooled}};
  std::map<NodeId, uint64_t> capacities;
  if (input.one_in(3)) capacities[1] = input.size(70 * kMiB);
  const Ground ground(machine, capacities);
  std::map<NodeId, uint64_t> room;
  for (NodeId node : {0, 1, 2}) {
    if (input.one_in(3))
      ground.kernel->set_used_by_others(node, input.size((64 - 2 * pooled) * kMiB));
  }
  const Rule rule = any_rule(input, kPage);
  const size_t bytes = any_amount(input, kPage) / kPage * kPage;
  try {
    check_rule(rule, *ground.kernel);
    if (takes_long(rule, bytes)) return;
  } catch (const InvalidArgument&) {
    return;
  }
  const size_t unit = unit_bytes(*ground.kernel, rule.pages);
  for (NodeId node : {0, 1, 2}) {
    room[node] = ground.kernel->node_headroom(node, rule.pages).free_bytes;
    if (const auto left = ground.budget->room(node)) room[node] = std::min(room[node], *left);
  }
  Layout layout;
  try {
    layout = lay_out(rule, bytes / unit * unit, *ground.kernel, *ground.budget, {0.0, 0, 0});
  } catch (const OutOfMemory&) {
    return;
  } catch (const InvalidArgument&) {
    return require(bytes > size_t{1} << 40, "a size that exists was refused");
  }
  require_in_line(layout.runs, bytes / unit * unit);
  const os::NodeSet listed = rule.nodes();
  for (const auto& [node, amount] : per_node(layout.runs)) {
    require(amount <= room[node], "more than a node has");
    const bool strict =
        rule.kind == RuleKind::kBind || (rule.kind == RuleKind::kStripe && rule.strict);
    require(listed.contains(node) || !strict, "a node that was not listed");
    require(listed.contains(node) || !layout.notes.empty(), "a spill without a note");
  }
  for (const Run& run : layout.runs) require(run.bytes % unit == 0, "a part of a page");
}

// Of any size, with any rule: placed as its pages say, or refused.
void fuzz_allocations(Input& input) {
  const Ground ground(ground_machine(), {{1, 40 * kMiB}});
  const auto session = std::make_shared<Session>(ground.placer());
  while (!input.empty()) {
    const Rule rule = any_rule(input, kPage);
    const size_t bytes = any_amount(input, 1);
    if (takes_long(rule, bytes)) continue;
    try {
      const auto block = session->allocate(bytes, rule, nullptr);
      uint64_t placed = 0;
      for (const auto& [node, amount] : session->bytes_per_node(block->range())) placed += amount;
      require(placed >= bytes, "bytes placed");
    } catch (const OutOfMemory&) {
    } catch (const InvalidArgument&) {
    }
    require(ground.accounts_agree(), "the budget and the kernel");
  }
  session->trim();
  require(ground.all_returned(), "memory that never came back");
}

void fuzz_outside(Input& input) {
  const Ground ground;
  const size_t bytes = (1 + input.below(64)) * kPage;
  const std::span<std::byte> range(ground.kernel->map(bytes, kPage, PageKind::kBase), bytes);
  Rule rule = any_rule(input, kPage);
  rule.pages = PageKind::kBase;
  const size_t part = any_amount(input, kPage);
  const size_t stride =
      input.below(2) == 0 ? part + input.below(4) * kPage : any_amount(input, kPage);
  const size_t count = input.below(2) == 0 ? input.below(20) : any_amount(input, 1);
  __extension__ using Wide = unsigned __int128;
  const bool fits = count > 0 && part > 0 && part % kPage == 0 && stride % kPage == 0 &&
                    stride >= part && Wide{count - 1} * stride + part <= bytes;
  bool placed = false;
  try {
    place_outside(ground.placer(), rule, {range, part, stride, count});
    placed = true;
  } catch (const InvalidArgument&) {
  } catch (const OutOfMemory&) {
  }
  require(fits || !placed, "parts that are not inside of the range were placed");
  ground.kernel->unmap(range);
}

}  // namespace
}  // namespace cxl_offload::memory

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  cxl_offload::Input input(data, size);
  using Target = void (*)(cxl_offload::Input&);
  constexpr Target kTargets[] = {
      &cxl_offload::memory::fuzz_stripe, &cxl_offload::memory::fuzz_run_map,
      &cxl_offload::memory::fuzz_layout, &cxl_offload::memory::fuzz_allocations,
      &cxl_offload::memory::fuzz_outside};
  kTargets[input.below(std::size(kTargets))](input);
  return 0;
}
