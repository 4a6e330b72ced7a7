#include "memory/numa_region.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/rounding.h"

namespace cxl_offload::memory {
namespace {

NodeBytes sum(const std::vector<Run>& runs) {
  NodeBytes total;
  for (const Run& run : runs) total[run.node] += run.bytes;
  return total;
}

size_t whole_units(const Placer& placer, const Rule& rule, size_t bytes) {
  return round_up(bytes, unit_bytes(*placer.kernel, rule.pages));
}

Layout lay_out_pages(const Placer& placer, const Rule& rule, size_t bytes) {
  return lay_out(rule, bytes, *placer.kernel, *placer.budget, placer.reserve);
}

// Returns the bytes that `wanted` has beyond `held`.
NodeBytes excess(const NodeBytes& wanted, const NodeBytes& held) {
  NodeBytes extra;
  for (const auto& [node, amount] : wanted) {
    const auto own = held.find(node);
    if (own == held.end()) {
      extra[node] = amount;
    } else if (own->second < amount) {
      extra[node] = amount - own->second;
    }
  }
  return extra;
}

std::vector<Run> present(const std::vector<Run>& runs) {
  std::vector<Run> there;
  std::ranges::copy_if(runs, std::back_inserter(there),
                       [](const Run& run) { return run.node >= 0; });
  return there;
}

// Returns, for each node, the bytes that were wanted there and are elsewhere.
NodeBytes missing(const std::vector<Run>& wanted, const std::vector<Run>& actual) {
  const RunMap wanted_map(wanted);
  NodeBytes lacking;
  for (const Run& run : actual) {
    for (const Run& target : wanted_map.slice(run.offset, run.bytes)) {
      if (target.node != run.node) lacking[target.node] += target.bytes;
    }
  }
  return lacking;
}

uint64_t total(const NodeBytes& bytes) {
  uint64_t sum = 0;
  for (const auto& [node, amount] : bytes) sum += amount;
  return sum;
}

// Pages that moved away late may have made room for pages that found none before: these are asked
// to move again, as long as some do.
Placed move_the_rest(os::Kernel& kernel, std::span<std::byte> pages, const std::vector<Run>& wanted,
                     size_t page_bytes, Placed placed) {
  uint64_t left_before = UINT64_MAX;
  for (uint64_t left = total(missing(wanted, placed.runs)); left > 0 && left < left_before;
       left = total(missing(wanted, placed.runs))) {
    left_before = left;
    placed = move_to_runs(kernel, pages, wanted, page_bytes);
  }
  return placed;
}

// Pages that come back later (from swap, by copy on write) prefer their node. If they were bound to
// it and the node was full, the kernel would kill processes that read the range after a fork.
os::Policy later_policy(const Rule& rule, const std::vector<Run>& runs) {
  if (rule.kind == RuleKind::kFirstTouch) return {os::PolicyMode::kLocal, {}};
  os::NodeSet nodes;
  for (const Run& run : runs) nodes.insert(run.node);
  return {os::PolicyMode::kPreferredMany, nodes};
}

}  // namespace

void check_places(const Rule& rule, const std::vector<Run>& wanted, const Placed& placed,
                  std::vector<std::string>& notes) {
  const NodeBytes lacking = missing(wanted, placed.runs);
  if (lacking.empty()) return;
  std::string text;
  for (const auto& [node, amount] : lacking) {
    text += (text.empty() ? "" : ", ") + std::string("node ") + std::to_string(node) +
            " filled up with " + format_bytes(amount) + " still to be placed";
  }
  const bool may_spill =
      rule.kind == RuleKind::kPreferred || (rule.kind == RuleKind::kStripe && !rule.strict);
  const bool is_absent =
      std::ranges::any_of(placed.runs, [](const Run& run) { return run.node < 0; });
  if (placed.shared_bytes > 0) {
    text = format_bytes(placed.shared_bytes) +
           " stay where they are, for a forked child has them as well";
    if (!may_spill) {
      throw SystemError(EACCES, "place pages (" + rule.describe() + "): " + text +
                                    "; move them before the fork, or when the child has ended");
    }
  }
  if (!may_spill || is_absent) {
    throw OutOfMemory("place pages (" + rule.describe() + "): " + text +
                      " while they were faulted in; free memory there or add a spill node");
  }
  notes.push_back(format_bytes(total(lacking)) + " landed on other nodes: " + text);
}

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

void Charge::exchange(const NodeBytes& out, const NodeBytes& in) {
  for (const auto& [node, amount] : in) held_[node];
  budget_->exchange(out, in);
  for (const auto& [node, amount] : out) {
    const auto held = held_.find(node);
    if (held != held_.end()) held->second -= std::min(held->second, amount);
  }
  for (const auto& [node, amount] : in) held_[node] += amount;
}

NumaRegion::NumaRegion(const Placer& placer, const Rule& rule, size_t bytes)
    : NumaRegion(placer, rule, lay_out_pages(placer, rule, whole_units(placer, rule, bytes)),
                 whole_units(placer, rule, bytes)) {}

NumaRegion::NumaRegion(const Placer& placer, const Rule& rule, Layout layout, size_t bytes)
    : placer_(placer),
      rule_(rule),
      page_bytes_(placer.kernel->page_bytes(rule.pages)),
      unit_bytes_(memory::unit_bytes(*placer.kernel, rule.pages)),
      notes_(std::move(layout.notes)),
      mapping_(placer.kernel, bytes, unit_bytes_, rule.pages) {
  if (rule.kind == RuleKind::kStripe) stripe_.emplace(rule.shares, rule.granule_bytes);
  os::Kernel& kernel = *placer_.kernel;
  charge_.emplace(placer_.budget, sum(layout.runs));
  const Placed placed = fault_in(kernel, range(), layout.runs, page_bytes_, placer_.max_threads);
  const std::vector<Run>& actual = placed.runs;
  check_places(rule, layout.runs, placed, notes_);
  if (!notes_.empty()) {
    follows_rule_ = false;
    charge_->refund(sum(layout.runs));
    charge_->add(sum(actual));
  }
  kernel.set_policy(range(), later_policy(rule, actual));
  runs_ = RunMap(actual);
}

bool NumaRegion::keeps_rule(size_t offset, size_t bytes) const {
  // A region that spilled, or that remembers who touched it first, is not what the next caller
  // asks for, even as a whole.
  if (!follows_rule_ || rule_.kind == RuleKind::kFirstTouch) return false;
  return !stripe_ || stripe_->cut_keeps_shares(range().size(), offset, bytes);
}

size_t NumaRegion::next_cut(size_t offset) const {
  return round_up(offset, stripe_ ? stripe_->cycle_bytes() : unit_bytes_);
}

void NumaRegion::release(size_t offset, size_t bytes) {
  const std::lock_guard lock(mutex_);
  mapping_.release(offset, bytes);
  charge_->refund(runs_.erase(offset, bytes));
}

Moved NumaRegion::move(size_t offset, size_t bytes, const MoveRequest& request) {
  const Rule& rule = request.rule;
  if (rule.kind == RuleKind::kFirstTouch) {
    throw InvalidArgument("move to first touch: the pages are touched already; name nodes");
  }
  os::Kernel& kernel = *placer_.kernel;
  const auto pages = range().subspan(offset, bytes);
  const auto before = look_for_runs(kernel, pages, page_bytes_);
  Layout layout =
      lay_out(rule, bytes, kernel, *placer_.budget, placer_.reserve, sum(present(before)));
  NodeBytes charged;
  NodeBytes extra;
  {
    const std::lock_guard lock(mutex_);
    charged = sum(runs_.slice(offset, bytes));
    extra = charge_more(sum(layout.runs), charged);
  }
  try {
    const Placed placed = place(pages, before, layout.runs);
    const std::vector<Run>& actual = placed.runs;
    check_places(rule, layout.runs, placed, layout.notes);
    {
      // Pages that could not leave a node lie beside those that came: its capacity holds for both.
      const std::lock_guard lock(mutex_);
      for (const auto& [node, amount] : charge_more(sum(actual), charged)) extra[node] += amount;
    }
    kernel.set_policy(pages, later_policy(rule, actual));
    account(offset, bytes, extra, actual);
  } catch (...) {
    const auto actual = put_back(pages, before);
    // Pages of first touch are counted neither before nor after the move.
    account(offset, bytes, extra,
            rule_.kind == RuleKind::kFirstTouch ? std::vector<Run>{} : actual);
    throw;
  }
  return {.notes = std::move(layout.notes)};
}

NodeBytes NumaRegion::charge_more(const NodeBytes& needed, NodeBytes& charged) {
  NodeBytes more = excess(needed, charged);
  charge_->add(more);
  for (const auto& [node, amount] : more) charged[node] += amount;
  return more;
}

std::vector<Run> NumaRegion::runs(size_t offset, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  return runs_.slice(offset, bytes);
}

Placed NumaRegion::place(std::span<std::byte> pages, const std::vector<Run>& before,
                         const std::vector<Run>& wanted) {
  os::Kernel& kernel = *placer_.kernel;
  // Pages that were never touched, or that are swapped out, cannot move before they are there.
  const bool all_there = present(before).size() == before.size();
  return move_the_rest(kernel, pages, wanted, page_bytes_,
                       all_there
                           ? move_to_runs(kernel, pages, wanted, page_bytes_)
                           : fault_in(kernel, pages, wanted, page_bytes_, placer_.max_threads));
}

std::vector<Run> NumaRegion::put_back(std::span<std::byte> pages,
                                      const std::vector<Run>& before) const {
  const InterruptScope to_the_end({});
  const auto origin = present(before);
  try {
    move_the_rest(*placer_.kernel, pages, origin, page_bytes_,
                  move_to_runs(*placer_.kernel, pages, origin, page_bytes_));
  } catch (...) {  // the error of the move itself is the one to report
  }
  // Where a failed move left its pages must be known, or accounts are wrong until Session.check().
  // A kernel that is short of memory at one moment may answer at the next.
  constexpr int kMostTimes = 4;
  for (int time = 0; time < kMostTimes; ++time) {
    try {
      return present(look_for_runs(*placer_.kernel, pages, page_bytes_));
    } catch (...) {
    }
  }
  return origin;
}

// Counts a block's pages where they are now, and gives back what was charged ahead of a move.
void NumaRegion::account(size_t offset, size_t bytes, const NodeBytes& extra,
                         const std::vector<Run>& actual) {
  const std::lock_guard lock(mutex_);
  NodeBytes out = runs_.erase(offset, bytes);
  for (const auto& [node, amount] : extra) out[node] += amount;
  charge_->exchange(out, sum(actual));
  runs_.assign(offset, actual);
}

StrayBytes NumaRegion::strays() const {
  std::vector<Run> runs;
  {
    const std::lock_guard lock(mutex_);
    runs = runs_.slice(0, range().size());
  }
  StrayBytes strays;
  for (const Run& run : runs) {
    const auto pages = range().subspan(run.offset, run.bytes);
    for (const Run& found : look_for_runs(*placer_.kernel, pages, page_bytes_)) {
      if (found.node != run.node) strays[{run.node, found.node}] += found.bytes;
    }
  }
  return strays;
}

void NumaRegion::accept_strays() {
  const auto actual = present(look_for_runs(*placer_.kernel, range(), page_bytes_));
  follows_rule_ = false;
  account(0, range().size(), {}, actual);
}

NumaSource::NumaSource(Placer placer, Rule rule)
    : placer_(std::move(placer)), rule_(std::move(rule)) {
  check_rule(rule_, *placer_.kernel);
}

size_t NumaSource::page_bytes() const { return unit_bytes(*placer_.kernel, rule_.pages); }

std::unique_ptr<Region> NumaSource::obtain(size_t bytes) {
  return std::make_unique<NumaRegion>(placer_, rule_, bytes);
}

}  // namespace cxl_offload::memory
