#include "memory/session.h"

#include <algorithm>

#include "core/error.h"
#include "core/rounding.h"
#include "memory/fault_in.h"
#include "memory/pinned.h"
#include "os/lost_ranges.h"

namespace cxl_offload::memory {
namespace {

// Unused pools are dropped once there are this many. Every pool costs a mapping, and a program that
// tunes its weights makes many.
constexpr size_t kLeastSweep = 64;

// A stripe that is too small for one cycle, or has one node only, becomes a rule of one node.
void simplify(Rule& rule, size_t bytes, std::vector<std::string>& notes) {
  if (rule.kind != RuleKind::kStripe) return;
  const Stripe stripe(rule.shares, rule.granule_bytes);
  if (rule.shares.size() > 1 && bytes >= stripe.cycle_bytes()) return;
  const Share heaviest = rule.shares[stripe.heaviest()];
  if (rule.shares.size() > 1) {
    notes.push_back(format_bytes(bytes) + " is less than one cycle of the interleave (" +
                    format_bytes(stripe.cycle_bytes()) + "), so all of it is on node " +
                    std::to_string(heaviest.node));
  }
  rule.kind = rule.strict ? RuleKind::kBind : RuleKind::kPreferred;
  rule.shares = {heaviest};
}

}  // namespace

PlacedBlock::PlacedBlock(std::shared_ptr<Session> session, std::shared_ptr<Allocation> memory,
                         Rule rule, std::vector<std::string> notes)
    : session_(std::move(session)),
      memory_(std::move(memory)),
      rule_(std::move(rule)),
      notes_(std::move(notes)) {}

PlacedBlock::~PlacedBlock() {
  count_out();
  // The block is forgotten before its memory goes back. Otherwise the next owner of the address
  // would be forgotten.
  session_->forget(memory_->address());
  os::settle({memory_->address(), memory_->capacity()});
}

std::string PlacedBlock::requested() const {
  session_->guard_.refuse_in_child("ask about an allocation");
  return rule().describe();
}

Rule PlacedBlock::rule() const {
  const std::lock_guard lock(mutex_);
  return rule_;
}

std::vector<Run> PlacedBlock::runs(size_t offset, size_t bytes) const {
  session_->guard_.refuse_in_child("ask about an allocation");
  if (bytes == 0) return {};
  if (offset > memory_->bytes() || bytes > memory_->bytes() - offset) {
    throw InvalidArgument("runs of " + format_bytes(bytes) + " at " + std::to_string(offset) +
                          " of an allocation of " + format_bytes(memory_->bytes()));
  }
  return memory_->region()->runs(memory_->offset() + offset, bytes);
}

void PlacedBlock::record_stream(gpu::StreamId stream) {
  session_->guard_.refuse_in_child("record a stream");
  memory_->record_stream(stream);
}

std::vector<std::string> PlacedBlock::notes() const {
  session_->guard_.refuse_in_child("ask about an allocation");
  const std::lock_guard lock(mutex_);
  std::vector<std::string> all = notes_;
  for (std::string& note : memory_->region()->notes()) all.push_back(std::move(note));
  return all;
}

// Only one thread at a time tries again, because two threads might each hold half of what one
// needs.
template <typename Attempt>
auto Session::with_all_memory(const Attempt& attempt) {
  try {
    return attempt();
  } catch (const OutOfMemory&) {
  }
  const std::lock_guard lock(last_attempt_);
  for (const auto& pool : pools()) pool->give_back();
  return attempt();
}

// Returns the region under a block that can move. Throws what stands in the way.
Region& PlacedBlock::movable(const std::string& what, const Rule& asked) const {
  session_->guard_.refuse_in_child(what);
  if (is_copy_) {
    throw InvalidArgument(what + ": it is " + requested() +
                          ", which do not move; copy it into a new allocation");
  }
  if (asked.kind == RuleKind::kReplicate) {
    throw InvalidArgument(what + " to " + asked.describe() +
                          ": pages that move stay one; copy it into a new allocation");
  }
  if (!memory_->owns_pages()) {
    throw InvalidArgument(what + ": smaller than a page (" + format_bytes(page_bytes()) +
                          "), it shares its page with others; copy it into a new allocation");
  }
  Region& region = *memory_->region();
  if (const std::string why = region.why_fixed(); !why.empty()) {
    throw InvalidArgument(what + ": " + why + "; copy it into a new allocation");
  }
  if (asked.kind == RuleKind::kDevice) {
    throw InvalidArgument(what + " to " + asked.describe() +
                          ": pages of nodes cannot move onto a device; copy it into a new " +
                          "allocation");
  }
  return region;
}

void PlacedBlock::move(Rule rule) {
  const std::string what = "move " + format_bytes(memory_->bytes());
  Region& region = movable(what, rule);
  if (region.pinned() && memory_->capacity() != region.range().size()) {
    throw InvalidArgument(what + ": it is pinned together with other small allocations, which " +
                          "may be in use; copy it into a new allocation");
  }
  std::vector<std::string> notes;
  rule.pages = this->rule().pages;
  simplify(rule, memory_->capacity(), notes);
  check_rule(rule, session_->kernel());
  const std::lock_guard moving(moving_);
  memory_->displace();
  const MoveRequest request{rule, this->rule(), memory_->streams()};
  const Moved moved = session_->with_all_memory(
      [&] { return region.move(memory_->offset(), memory_->capacity(), request); });
  notes.insert(notes.end(), moved.notes.begin(), moved.notes.end());
  if (moved.arrived) {
    const std::lock_guard lock(mutex_);
    rule_ = std::move(rule);
    notes_ = std::move(notes);
  }
  if (moved.failure) throw PlacementError(what + " of pinned memory: " + *moved.failure);
}

void PlacedBlock::move_part(size_t offset, size_t bytes, Rule rule) {
  const std::string what = "move " + format_bytes(bytes) + " at " + std::to_string(offset) +
                           " of an allocation of " + format_bytes(memory_->bytes());
  Region& region = movable(what, rule);
  if (region.pinned()) {
    throw InvalidArgument(what + ": it is pinned as a whole; move all of it");
  }
  const size_t unit = unit_bytes();
  const size_t all = memory_->bytes();
  if (bytes == 0 || offset > all || bytes > all - offset) {
    throw InvalidArgument(what + ": no part of it");
  }
  if (bytes == all - offset)
    bytes = memory_->capacity() - offset;  // the rest of its page moves too
  if (offset % unit != 0 || bytes % unit != 0) {
    throw InvalidArgument(what + ": a part begins and ends with pages of " + format_bytes(unit));
  }
  std::vector<std::string> notes;
  rule.pages = this->rule().pages;
  simplify(rule, bytes, notes);
  check_rule(rule, session_->kernel());
  const std::lock_guard moving(moving_);
  memory_->displace();
  session_->with_all_memory([&] { return region.move(memory_->offset() + offset, bytes, {rule}); });
  const std::lock_guard lock(mutex_);
  const std::string note = "parts of it were moved elsewhere";
  if (std::ranges::find(notes_, note) == notes_.end()) notes_.push_back(note);
}

Session::Session(Placer placer, std::map<std::string, uint64_t> device_capacities)
    : placer_(std::move(placer)),
      device_capacities_(std::move(device_capacities)),
      sweep_at_(kLeastSweep) {}

// The caller holds the lock of the pools. A device stays claimed as long as the session lives.
std::shared_ptr<RegionSource> Session::source_for(const Rule& rule) {
  if (rule.kind != RuleKind::kDevice) return std::make_shared<NumaSource>(placer_, rule);
  std::shared_ptr<DaxStore> store;
  if (const auto found = stores_.find(rule.device); found != stores_.end()) {
    store = found->second;
  } else {
    const auto capacity = device_capacities_.find(rule.device);
    store = std::make_shared<DaxStore>(placer_.kernel->open_dax(rule.device),
                                       capacity == device_capacities_.end()
                                           ? std::nullopt
                                           : std::optional<uint64_t>(capacity->second));
    stores_.emplace(rule.device, store);
  }
  return std::make_shared<DaxSource>(std::move(store));
}

std::shared_ptr<Pool> Session::make_pool(const Rule& rule,
                                         const std::shared_ptr<gpu::GpuDriver>& driver) {
  auto source = source_for(rule);
  if (driver) {
    source = std::make_shared<PinnedSource>(std::move(source), placer_.kernel, rule, driver);
  }
  return std::make_shared<Pool>(std::move(source), driver);
}

std::shared_ptr<Pool> Session::pool_for(const Rule& rule,
                                        const std::shared_ptr<gpu::GpuDriver>& driver) {
  std::vector<std::pair<os::NodeId, uint32_t>> shares;
  for (const Share& share : rule.shares) shares.emplace_back(share.node, share.weight);
  const PoolKey key{rule.kind,  shares,      rule.granule_bytes, rule.strict,
                    rule.pages, rule.device, driver.get()};
  // This outlives the lock, because destroying a pool may take a while.
  std::vector<std::shared_ptr<Pool>> unused;
  const std::lock_guard lock(pools_mutex_);
  const auto found = pools_.find(key);
  if (found != pools_.end()) return found->second;
  if (pools_.size() >= sweep_at_) {
    unused = take_unused_pools();
    sweep_at_ = std::max(kLeastSweep, 2 * pools_.size());
  }
  return pools_.emplace(key, make_pool(rule, driver)).first->second;
}

// The caller holds the lock. A pool with a single reference has no other user, because references
// are only handed out under the lock.
std::vector<std::shared_ptr<Pool>> Session::take_unused_pools() {
  std::vector<std::shared_ptr<Pool>> unused;
  for (auto at = pools_.begin(); at != pools_.end();) {
    const bool waits = at->second->statistics().waiting.count.current > 0;
    if (waits || at->second.use_count() > 1) {
      ++at;
      continue;
    }
    past_ += at->second->statistics().past();
    unused.push_back(std::move(at->second));
    at = pools_.erase(at);
  }
  return unused;
}

std::shared_ptr<PlacedBlock> Session::allocate(size_t bytes, Rule rule,
                                               const std::shared_ptr<gpu::GpuDriver>& driver) {
  if (bytes == 0) throw InvalidArgument("allocate 0 bytes; ask for at least one");
  guard_.refuse_in_child("allocate");
  std::call_once(known_, [this] { remember(weak_from_this()); });
  check_rule(rule, *placer_.kernel);
  if (rule.kind != RuleKind::kReplicate) {
    auto block = allocate_one(bytes, std::move(rule), driver);
    make_known(block);
    return block;
  }
  if (driver) {
    throw InvalidArgument("pin " + format_bytes(bytes) + " with " + rule.describe() +
                          ": a GPU would read one of them only; bind it to a node");
  }
  return allocate_copies(bytes, rule);
}

std::shared_ptr<PlacedBlock> Session::allocate_one(size_t bytes, Rule rule,
                                                   const std::shared_ptr<gpu::GpuDriver>& driver) {
  std::vector<std::string> notes;
  simplify(rule, bytes, notes);
  // A block smaller than a huge page would share one, and could not be moved by itself.
  const bool is_part = bytes < unit_bytes(*placer_.kernel, rule.pages);
  if (is_part && rule.pages == os::PageKind::kTransparentHuge) rule.pages = os::PageKind::kBase;
  const auto pool = pool_for(rule, driver);
  auto memory = with_all_memory([&] { return pool->allocate(bytes); });
  // Bytes that were lost while nobody owned them are no loss.
  os::settle({memory->address(), memory->capacity()});
  return std::make_shared<PlacedBlock>(shared_from_this(), std::move(memory), std::move(rule),
                                       std::move(notes));
}

void Session::make_known(const std::shared_ptr<PlacedBlock>& block) {
  const std::lock_guard lock(blocks_mutex_);
  blocks_[block->range().data()] = block;
}

std::vector<std::string> Session::place(const Parts& parts, Rule rule) const {
  guard_.refuse_in_child("place memory");
  std::vector<std::string> notes;
  check_rule(rule, *placer_.kernel);
  simplify(rule, checked_product(parts.count, parts.part_bytes).value_or(SIZE_MAX), notes);
  for (std::string& note : place_outside(placer_, rule, parts)) notes.push_back(std::move(note));
  return notes;
}

std::shared_ptr<PlacedBlock> Session::find(const std::byte* address) const {
  if (guard_.in_child()) return nullptr;
  // The block is dropped outside the lock, because dropping the last reference takes the lock too.
  std::shared_ptr<PlacedBlock> block;
  {
    const std::lock_guard lock(blocks_mutex_);
    const auto after = blocks_.upper_bound(address);
    if (after == blocks_.begin()) return nullptr;
    block = std::prev(after)->second.lock();
  }
  if (!block || address >= block->range().data() + block->range().size()) return nullptr;
  return block;
}

void Session::forget(const std::byte* address) noexcept {
  if (guard_.in_child()) return;
  const std::lock_guard lock(blocks_mutex_);
  blocks_.erase(address);
}

NodeBytes Session::bytes_per_node(std::span<const std::byte> range) const {
  const auto owner = find(range.data());
  if (owner && !owner->memory().region()->device().empty()) return {};
  const size_t page = owner ? owner->page_bytes() : kernel().page_bytes(os::PageKind::kBase);
  return query_bytes(kernel(), range, page);
}

std::vector<std::shared_ptr<Pool>> Session::pools() const {
  std::vector<std::shared_ptr<Pool>> result;
  if (guard_.in_child()) return result;
  const std::lock_guard lock(pools_mutex_);
  for (const auto& [key, pool] : pools_) result.push_back(pool);
  return result;
}

std::map<os::NodeId, NodeUse> Session::node_use() const {
  if (guard_.in_child()) return {};
  return placer_.budget->use();
}

std::map<std::string, NodeUse> Session::device_use() const {
  std::map<std::string, NodeUse> result;
  if (guard_.in_child()) return result;
  const std::lock_guard lock(pools_mutex_);
  for (const auto& [name, store] : stores_) result.emplace(name, store->use());
  return result;
}

Statistics Session::statistics() const {
  Statistics total;
  if (guard_.in_child()) return total;
  const std::lock_guard lock(pools_mutex_);
  total = past_;
  for (const auto& [key, pool] : pools_) total += pool->statistics();
  return total;
}

Trimmed Session::trim() {
  Trimmed total;
  if (guard_.in_child()) return total;
  for (const auto& pool : pools()) {
    Trimmed trimmed = pool->trim();
    total.bytes += trimmed.bytes;
    if (total.kept_because.empty()) total.kept_because = std::move(trimmed.kept_because);
  }
  std::vector<std::shared_ptr<Pool>> unused;
  const std::lock_guard lock(pools_mutex_);
  unused = take_unused_pools();
  return total;
}

}  // namespace cxl_offload::memory
