#include "memory/numa_region.h"

#include <algorithm>

#include "core/error.h"
#include "memory/fault_in.h"

namespace cxl_offload {
namespace {

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Transparent huge pages can only be found in ranges that start on their boundary.
size_t alignment_of(const Rule& rule, size_t bytes, size_t page_bytes) {
  const bool huge = rule.pages == PageKind::kTransparentHuge && bytes >= kHugePageBytes;
  return huge ? kHugePageBytes : page_bytes;
}

NodeBytes sum(const std::vector<Run>& runs) {
  NodeBytes total;
  for (const Run& run : runs) total[run.node] += run.bytes;
  return total;
}

// Where the pages of a range go that come back later (swap, copy on write): preferred, because a
// range bound to a full node gets its readers killed after a fork.
Policy later_policy(const Rule& rule, const std::vector<Run>& runs) {
  if (rule.kind == RuleKind::kFirstTouch) return {PolicyMode::kLocal, {}};
  NodeSet nodes;
  for (const Run& run : runs) nodes.insert(run.node);
  return {PolicyMode::kPreferredMany, nodes};
}

}  // namespace

Charge::Charge(std::shared_ptr<NodeBudget> budget, const NodeBytes& bytes)
    : budget_(std::move(budget)) {
  add(bytes);
}

Charge::~Charge() { budget_->refund(held_); }

void Charge::add(const NodeBytes& bytes) {
  budget_->charge(bytes);
  for (const auto& [node, amount] : bytes) held_[node] += amount;
}

void Charge::refund(const NodeBytes& bytes) noexcept {
  budget_->refund(bytes);
  for (const auto& [node, amount] : bytes) {
    const auto held = held_.find(node);
    if (held != held_.end()) held->second -= std::min(held->second, amount);
  }
}

NumaRegion::NumaRegion(const Placer& placer, const Rule& rule, size_t bytes)
    : placer_(placer),
      rule_(rule),
      page_bytes_(placer.kernel->page_bytes(rule.pages)),
      mapping_(placer.kernel, round_up(bytes, page_bytes_), alignment_of(rule, bytes, page_bytes_),
               rule.pages) {
  if (rule.kind == RuleKind::kStripe) stripe_.emplace(rule.shares, rule.granule_bytes);
  Kernel& kernel = *placer_.kernel;
  Layout layout = lay_out(rule, range().size(), kernel, *placer_.budget, placer_.reserve);
  notes_ = std::move(layout.notes);
  charge_.emplace(placer_.budget, sum(layout.runs));
  auto actual = fault_in(kernel, range(), layout.runs, page_bytes_, placer_.max_threads);
  actual = checked(rule, layout.runs, std::move(actual), notes_);
  if (notes_.empty() == false) {
    follows_rule_ = false;
    charge_->refund(sum(layout.runs));
    charge_->add(sum(actual));
  }
  kernel.set_policy(range(), later_policy(rule, actual));
  runs_ = RunMap(actual);
}

std::vector<Run> NumaRegion::checked(const Rule& rule, const std::vector<Run>& wanted,
                                     std::vector<Run> actual, std::vector<std::string>& notes) {
  const RunMap wanted_map(wanted);
  std::map<NodeId, uint64_t> missing;
  uint64_t missing_bytes = 0;
  for (const Run& run : actual) {
    for (const Run& target : wanted_map.slice(run.offset, run.bytes)) {
      if (target.node == run.node) continue;
      missing[target.node] += target.bytes;
      missing_bytes += target.bytes;
    }
  }
  if (missing.empty()) return actual;
  std::string text;
  for (const auto& [node, amount] : missing) {
    text += (text.empty() ? "" : ", ") + std::string("node ") + std::to_string(node) +
            " filled up with " + format_bytes(amount) + " still to be placed";
  }
  const bool may_spill =
      rule.kind == RuleKind::kPreferred || (rule.kind == RuleKind::kStripe && !rule.strict);
  if (!may_spill) {
    throw OutOfMemory("place pages (" + rule.describe() + "): " + text +
                      " while they were faulted in; free memory there or add a spill node");
  }
  notes.push_back(format_bytes(missing_bytes) + " landed on other nodes: " + text);
  return actual;
}

bool NumaRegion::keeps_rule(size_t offset, size_t bytes) const {
  // A region that spilled, or that remembers who touched it first, is not what the next caller
  // asks for, even as a whole.
  if (!follows_rule_ || rule_.kind == RuleKind::kFirstTouch) return false;
  return !stripe_ || stripe_->cut_keeps_shares(range().size(), offset, bytes);
}

size_t NumaRegion::next_cut(size_t offset) const {
  return round_up(offset, stripe_ ? stripe_->cycle_bytes() : page_bytes_);
}

void NumaRegion::release(size_t offset, size_t bytes) {
  const std::lock_guard lock(mutex_);
  mapping_.release(offset, bytes);
  charge_->refund(runs_.erase(offset, bytes));
}

void NumaRegion::move(size_t offset, size_t bytes, const Rule& rule) {
  if (rule.kind == RuleKind::kFirstTouch) {
    throw InvalidArgument("move to first touch: the pages are touched already; name nodes");
  }
  Kernel& kernel = *placer_.kernel;
  const auto pages = range().subspan(offset, bytes);
  const Layout layout = lay_out(rule, bytes, kernel, *placer_.budget, placer_.reserve);
  std::vector<Run> before;
  {
    const std::lock_guard lock(mutex_);
    before = runs_.slice(offset, bytes);
    charge_->add(sum(layout.runs));
  }
  const auto settle_charge = [&](const std::vector<Run>& actual) {
    const std::lock_guard lock(mutex_);
    charge_->refund(sum(layout.runs));
    charge_->refund(runs_.erase(offset, bytes));
    charge_->add(sum(actual));
    runs_.assign(offset, actual);
  };
  auto actual = move_to_runs(kernel, pages, layout.runs, page_bytes_);
  try {
    std::vector<std::string> notes;
    actual = checked(rule, layout.runs, std::move(actual), notes);
  } catch (...) {
    settle_charge(move_to_runs(kernel, pages, before, page_bytes_));
    throw;
  }
  settle_charge(actual);
  kernel.set_policy(pages, later_policy(rule, actual));
}

std::vector<Run> NumaRegion::runs(size_t offset, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  return runs_.slice(offset, bytes);
}

uint64_t NumaRegion::strayed_bytes() const {
  std::vector<Run> runs;
  {
    const std::lock_guard lock(mutex_);
    runs = runs_.slice(0, range().size());
  }
  uint64_t strayed = 0;
  for (const Run& run : runs) {
    const auto pages = range().subspan(run.offset, run.bytes);
    for (const auto& [node, amount] : query_bytes(*placer_.kernel, pages, page_bytes_)) {
      if (node != run.node) strayed += amount;
    }
  }
  return strayed;
}

NumaSource::NumaSource(Placer placer, Rule rule)
    : placer_(std::move(placer)), rule_(std::move(rule)) {
  check_rule(rule_, *placer_.kernel);
}

size_t NumaSource::page_bytes() const { return placer_.kernel->page_bytes(rule_.pages); }

std::unique_ptr<Region> NumaSource::obtain(size_t bytes) { return obtain_numa(bytes); }

std::unique_ptr<NumaRegion> NumaSource::obtain_numa(size_t bytes) {
  return std::make_unique<NumaRegion>(placer_, rule_, bytes);
}

}  // namespace cxl_offload
