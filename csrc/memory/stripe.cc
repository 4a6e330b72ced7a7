#include "memory/stripe.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "core/error.h"
#include "core/rounding.h"

namespace cxl_offload::memory {
namespace {

// Appends granules to the layout; a run that continues the one before joins it.
void append_joined(std::vector<Run>& runs, size_t bytes, os::NodeId node) {
  if (bytes == 0) return;
  if (!runs.empty() && runs.back().node == node) {
    runs.back().bytes += bytes;
    return;
  }
  const size_t offset = runs.empty() ? 0 : runs.back().offset + runs.back().bytes;
  runs.push_back({offset, bytes, node});
}

}  // namespace

Stripe::Stripe(std::vector<Share> shares, size_t granule_bytes)
    : shares_(std::move(shares)), granule_bytes_(granule_bytes) {
  if (shares_.empty()) throw InvalidArgument("interleave over no node; give at least one");
  if (granule_bytes_ == 0) throw InvalidArgument("interleave with a granule of 0 bytes");
  uint32_t divisor = 0;
  os::NodeSet seen;
  for (const Share& share : shares_) {
    const std::string node = "node " + std::to_string(share.node);
    if (share.weight == 0) {
      throw InvalidArgument("interleave with weight 0 for " + node + "; leave the node out");
    }
    if (seen.contains(share.node)) throw InvalidArgument("interleave names " + node + " twice");
    seen.insert(share.node);
    divisor = std::gcd(divisor, share.weight);
  }
  for (Share& share : shares_) {
    share.weight /= divisor;
    weight_sum_ += share.weight;
  }
  if (granule_bytes_ > kMostBytes / weight_sum_) {
    throw InvalidArgument("interleave with a granule of " + format_bytes(granule_bytes_) +
                          ": a cycle of " + std::to_string(weight_sum_) +
                          " is more than an address space holds; give a smaller granule");
  }
}

std::vector<size_t> Stripe::tail_granules(size_t tail) const {
  std::vector<size_t> counts;
  std::vector<std::pair<size_t, size_t>> remainders;  // (weight_sum - remainder, share): ascending
  size_t given = 0;
  for (size_t i = 0; i < shares_.size(); ++i) {
    const size_t scaled = tail * shares_[i].weight;
    counts.push_back(scaled / weight_sum_);
    given += counts.back();
    remainders.emplace_back(weight_sum_ - scaled % weight_sum_, i);
  }
  std::ranges::sort(remainders);
  for (size_t i = 0; given < tail; ++i, ++given) ++counts[remainders[i].second];
  return counts;
}

std::vector<size_t> Stripe::prefix_granules(size_t granules, size_t count) const {
  const size_t cycles = granules / weight_sum_;
  const bool in_tail = count / weight_sum_ >= cycles;
  const size_t whole = in_tail ? cycles : count / weight_sum_;
  size_t rest = count - whole * weight_sum_;
  const auto tail = tail_granules(granules % weight_sum_);
  std::vector<size_t> counts;
  for (size_t i = 0; i < shares_.size(); ++i) {
    const size_t here = std::min(rest, in_tail ? tail[i] : size_t{shares_[i].weight});
    counts.push_back(whole * shares_[i].weight + here);
    rest -= here;
  }
  return counts;
}

bool Stripe::cut_keeps_shares(size_t total, size_t offset, size_t bytes) const {
  if (offset % granule_bytes_ != 0) return false;
  const size_t granules = granules_in(total);
  const size_t first = offset / granule_bytes_;
  const size_t count = granules_in(bytes);
  const auto before = prefix_granules(granules, first);
  const auto through = prefix_granules(granules, first + count);
  const auto fresh = prefix_granules(count, count);
  for (size_t i = 0; i < shares_.size(); ++i) {
    if (through[i] - before[i] != fresh[i]) return false;
  }
  return true;
}

size_t Stripe::heaviest() const {
  const auto by_weight = [](const Share& a, const Share& b) { return a.weight < b.weight; };
  return std::ranges::max_element(shares_, by_weight) - shares_.begin();
}

std::vector<size_t> Stripe::allocation_bytes(size_t bytes) const {
  if (bytes >= cycle_bytes()) return bytes_of_shares(bytes);
  std::vector<size_t> placed(shares_.size());
  placed[heaviest()] = bytes;
  return placed;
}

// The last granule, which may be a part of one, belongs to the last share that has any in the
// tail, or to the last of all where there is no tail.
std::vector<size_t> Stripe::bytes_of_shares(size_t bytes) const {
  const size_t granules = granules_in(bytes);
  auto counts = prefix_granules(granules, granules);
  const auto tail = tail_granules(granules % weight_sum_);
  size_t last = shares_.size() - 1;
  while (granules % weight_sum_ > 0 && tail[last] == 0) --last;
  for (size_t& count : counts) count *= granule_bytes_;
  if (granules > 0) counts[last] -= granules * granule_bytes_ - bytes;
  return counts;
}

std::vector<Run> Stripe::runs(size_t bytes) const {
  if (bytes > kMostBytes) {
    throw InvalidArgument("interleave " + format_bytes(bytes) + ": no memory is so large");
  }
  const size_t granules = granules_in(bytes);
  const size_t cycles = granules / weight_sum_;
  std::vector<Run> runs;
  for (size_t cycle = 0; cycle < cycles; ++cycle) {
    for (const Share& share : shares_)
      append_joined(runs, share.weight * granule_bytes_, share.node);
  }
  const auto tail = tail_granules(granules % weight_sum_);
  for (size_t i = 0; i < shares_.size(); ++i)
    append_joined(runs, tail[i] * granule_bytes_, shares_[i].node);
  if (!runs.empty()) runs.back().bytes -= granules * granule_bytes_ - bytes;
  return runs;
}

}  // namespace cxl_offload::memory
