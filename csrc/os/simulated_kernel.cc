#include "os/simulated_kernel.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "core/error.h"

namespace cxl_offload::os {
namespace {

[[noreturn]] void throw_fault(const Fault& fault, size_t bytes) {
  const std::string what = std::string(operation_name(fault.operation)) + " of " +
                           format_bytes(bytes) + " (fault injected into call " +
                           std::to_string(fault.call) + "): " + std::strerror(fault.code);
  if (fault.code == ENOMEM) throw OutOfMemory(what);
  throw SystemError(fault.code, what);
}

}  // namespace

SimulatedKernel::SimulatedKernel(const SimulatedMachine& machine)
    : base_page_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))),
      initiator_(machine.initiator),
      reserves_huge_pages_(machine.reserves_huge_pages),
      dax_(machine.dax, faults_),
      ledger_(machine, base_page_bytes_) {}

SimulatedKernel::~SimulatedKernel() {
  for (auto& [address, mapping] : mappings_) {
    munmap(const_cast<std::byte*>(address), mapping.bytes);
  }
}

std::unique_lock<std::mutex> SimulatedKernel::locked() const {
  guard_.refuse_in_child("use simulated nodes");
  return std::unique_lock(mutex_);
}

NodeSet SimulatedKernel::allowed_nodes() const { return ledger_.allowed(); }

size_t SimulatedKernel::page_bytes(PageKind kind) const {
  if (kind == PageKind::kHuge2MiB) return kHugePageBytes;
  if (kind == PageKind::kHuge1GiB) return kGiganticPageBytes;
  return base_page_bytes_;
}

Headroom SimulatedKernel::node_headroom(NodeId node, PageKind kind) const {
  const size_t page = page_bytes(kind);
  const auto lock = locked();
  const std::string text = "node " + std::to_string(node);
  const bool is_pool = page != base_page_bytes_;
  return {ledger_.total_bytes(node, page), ledger_.free_bytes(node, page),
          is_pool ? "the " + format_bytes(page) + " huge-page pool of " + text : text};
}

Headroom SimulatedKernel::process_headroom() const {
  const auto lock = locked();
  return ledger_.process_headroom();
}

std::vector<NodeId> SimulatedKernel::fallback_order(NodeId node) const {
  return ledger_.fallback_order(node);
}

std::vector<NodeId> SimulatedKernel::order_from(NodeId node) const {
  std::vector<NodeId> order{node};
  for (NodeId other : ledger_.fallback_order(node)) order.push_back(other);
  return order;
}

std::byte* SimulatedKernel::map(size_t bytes, size_t alignment, PageKind kind) {
  const size_t page = page_bytes(kind);
  const auto lock = locked();
  if (const auto fault = faults_.begin_call(Operation::kMap)) throw_fault(*fault, bytes);
  const bool reserved = page != base_page_bytes_ && reserves_huge_pages_;
  if (reserved && !ledger_.reserve(page, bytes / page)) {
    throw OutOfMemory("map " + format_bytes(bytes) + ": the " + format_bytes(page) +
                      " huge-page pools of the simulated machine are too small");
  }
  const size_t slack = std::max(alignment, page);
  void* raw = mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    if (reserved) ledger_.cancel_reservation(page, bytes / page);
    throw OutOfMemory("map " + format_bytes(bytes) +
                      ": no address space left for simulated memory");
  }
  auto* begin = static_cast<std::byte*>(raw);
  const size_t skip = (slack - reinterpret_cast<uintptr_t>(begin) % slack) % slack;
  if (skip > 0) munmap(begin, skip);
  munmap(begin + skip + bytes, slack - skip);
  begin += skip;
  madvise(begin, bytes, MADV_NOHUGEPAGE);  // so that a touch is seen page by page
  const bool transparent = kind == PageKind::kTransparentHuge;
  mappings_.emplace(begin, Mapping{bytes, page, reserved, transparent, PageMap(bytes / page)});
  return begin;
}

SimulatedKernel::Pages SimulatedKernel::find(std::span<const std::byte> range) const {
  auto at = mappings_.upper_bound(range.data());
  if (at == mappings_.begin()) return {mappings_.end(), 0, 0};
  --at;
  const auto offset = static_cast<size_t>(range.data() - at->first);
  if (offset >= at->second.bytes || offset + range.size() > at->second.bytes) {
    return {mappings_.end(), 0, 0};
  }
  return {at, offset / at->second.page_bytes, range.size() / at->second.page_bytes};
}

void SimulatedKernel::forget(const Pages& pages) {
  Mapping& mapping = pages.at->second;
  break_huge(pages);
  mapping.pages.for_each_run(pages.first, pages.count, [&](size_t first, size_t count, int state) {
    if (state >= 0) {
      ledger_.give_back(state, mapping.page_bytes, count);
      mapping.pages.fill(first, count, kPageAbsent);
      // A reserved mapping may fault its dropped pages in again.
      if (mapping.reserved && !ledger_.reserve(mapping.page_bytes, count)) mapping.reserved = false;
    }
  });
}

// Cuts [first, first + count) out of a mapping. All pages of that part are absent.
void SimulatedKernel::split(Mappings::iterator at, size_t first, size_t count) {
  Mapping& whole = at->second;
  const size_t page = whole.page_bytes;
  const auto part = [&](size_t from, size_t pages) {
    Mapping piece{pages * page, page, whole.reserved, whole.transparent, PageMap(pages)};
    whole.pages.for_each_run(from, pages, [&](size_t run, size_t length, int state) {
      piece.pages.fill(run - from, length, state);
    });
    return piece;
  };
  const size_t end = first + count;
  const std::byte* base = at->first;
  const size_t total = whole.pages.size();
  if (end < total) mappings_.emplace(base + end * page, part(end, total - end));
  Mapping front = part(0, first);
  mappings_.erase(at);
  if (first > 0) mappings_.emplace(base, std::move(front));
}

void SimulatedKernel::unmap(std::span<std::byte> range) noexcept {
  if (guard_.in_child()) return;
  const auto lock = locked();
  const Pages pages = find(range);
  if (pages.at == mappings_.end()) return;
  forget(pages);
  const Mapping& mapping = pages.at->second;
  if (mapping.reserved) ledger_.cancel_reservation(mapping.page_bytes, pages.count);
  split(pages.at, pages.first, pages.count);
  munmap(range.data(), range.size());
}

void SimulatedKernel::set_policy(std::span<std::byte> range, const Policy& policy) {
  const auto lock = locked();
  if (const auto fault = faults_.begin_call(Operation::kSetPolicy)) {
    throw_fault(*fault, range.size());
  }
  for (NodeId node : policy.nodes.nodes()) ledger_.check_node(node);
}

// Places huge pages on `node` over the absent pages. A huge page may reach beyond the given ones.
void SimulatedKernel::place_huge(const Pages& pages, NodeId node) {
  Mapping& mapping = pages.at->second;
  const size_t length = kHugePageBytes / mapping.page_bytes;
  const size_t lead = reinterpret_cast<uintptr_t>(pages.at->first) / mapping.page_bytes % length;
  const size_t begin = (pages.first + lead) / length * length;
  for (size_t at = begin; at < pages.first + pages.count + lead; at += length) {
    if (at < lead || at - lead + length > mapping.pages.size()) continue;
    const size_t first = at - lead;
    if (mapping.pages.get(first) >= 0 || mapping.pages.run_length(first, length) < length) continue;
    const uint64_t taken = ledger_.take(node, mapping.page_bytes, length);
    if (taken < length) return ledger_.give_back(node, mapping.page_bytes, taken);
    mapping.pages.fill(first, length, node);
    huge_.insert(pages.at->first + first * mapping.page_bytes);
  }
}

// Turns every huge page that the range touches into base pages.
void SimulatedKernel::break_huge(const Pages& pages) {
  const size_t page = pages.at->second.page_bytes;
  const std::byte* begin = pages.at->first + pages.first * page;
  auto at = huge_.upper_bound(begin - kHugePageBytes);
  while (at != huge_.end() && *at < begin + pages.count * page) at = huge_.erase(at);
}

// What moves together with a page: the page alone, or the huge page that it is a part of.
SimulatedKernel::Pages SimulatedKernel::whole_page(Mappings::iterator at, size_t page) const {
  const std::byte* address = at->first + page * at->second.page_bytes;
  const auto after = huge_.upper_bound(address);
  if (after == huge_.begin()) return {at, page, 1};
  const std::byte* huge = *std::prev(after);
  if (address >= huge + kHugePageBytes) return {at, page, 1};
  const auto offset = static_cast<size_t>(huge - at->first);
  return {at, offset / at->second.page_bytes, kHugePageBytes / at->second.page_bytes};
}

// Puts every absent page on the first node of the order that has room; throws when none has.
void SimulatedKernel::place(const Pages& pages, const std::vector<NodeId>& order) {
  Mapping& mapping = pages.at->second;
  if (mapping.transparent) place_huge(pages, order.front());
  mapping.pages.for_each_run(pages.first, pages.count, [&](size_t first, size_t count, int state) {
    if (state >= 0) return;
    for (NodeId node : order) {
      const uint64_t taken = ledger_.take(node, mapping.page_bytes, count);
      if (mapping.reserved) ledger_.cancel_reservation(mapping.page_bytes, taken);
      mapping.pages.fill(first, taken, node);
      first += taken;
      count -= taken;
      if (count == 0) return;
    }
    throw OutOfMemory("fault in " + format_bytes(pages.count * mapping.page_bytes) + " on node " +
                      std::to_string(order.front()) + ": the simulated machine has no page left");
  });
}

void SimulatedKernel::populate(std::span<std::byte> range, NodeId node) {
  const auto lock = locked();
  const auto fault = faults_.begin_call(Operation::kPopulate);
  if (fault && fault->effect == FaultEffect::kRefuse) throw_fault(*fault, range.size());
  ledger_.check_node(node);
  Pages pages = find(range);
  if (pages.at == mappings_.end()) throw InvalidArgument("populate a range that is not mapped");
  auto order = order_from(node);
  if (fault && fault->effect == FaultEffect::kStray) {
    order.erase(order.begin());
    if (fault->stray >= 0) order.insert(order.begin(), fault->stray);
    if (order.empty()) order.push_back(node);
  }
  if (fault && fault->effect == FaultEffect::kPartial) pages.count /= 2;
  place(pages, order);
  if (fault && fault->effect == FaultEffect::kPartial) throw_fault(*fault, range.size());
}

void SimulatedKernel::discard(std::span<std::byte> range) {
  const auto lock = locked();
  if (const auto fault = faults_.begin_call(Operation::kDiscard)) throw_fault(*fault, range.size());
  const Pages pages = find(range);
  if (pages.at == mappings_.end()) throw InvalidArgument("discard a range that is not mapped");
  forget(pages);
  madvise(range.data(), range.size(), MADV_DONTNEED);
}

// Places absent pages that somebody has written to meanwhile, where first touch would put them.
void SimulatedKernel::take_in_touched(const Pages& pages) const {
  Mapping& mapping = pages.at->second;
  const size_t base_pages = mapping.page_bytes / base_page_bytes_;
  const auto order = order_from(initiator_);
  mapping.pages.for_each_run(pages.first, pages.count, [&](size_t first, size_t count, int state) {
    if (state >= 0) return;
    std::vector<unsigned char> resident(count * base_pages);
    auto* begin = const_cast<std::byte*>(pages.at->first) + first * mapping.page_bytes;
    if (mincore(begin, count * mapping.page_bytes, resident.data()) != 0) return;
    for (size_t i = 0; i < count; ++i) {
      const auto from = resident.begin() + static_cast<ptrdiff_t>(i * base_pages);
      const bool touched = std::any_of(from, from + static_cast<ptrdiff_t>(base_pages),
                                       [](unsigned char byte) { return (byte & 1) != 0; });
      if (!touched) continue;
      for (NodeId node : order) {
        if (ledger_.take(node, mapping.page_bytes, 1) == 0) continue;
        if (mapping.reserved) ledger_.cancel_reservation(mapping.page_bytes, 1);
        mapping.pages.fill(first + i, 1, node);
        break;
      }
    }
  });
}

void SimulatedKernel::query(std::span<const std::byte> range, size_t page_bytes,
                            std::span<int> nodes) const {
  const auto lock = locked();
  const auto fault = faults_.begin_call(Operation::kQuery);
  const bool hidden = fault && fault->effect == FaultEffect::kHidden;
  if (fault && !hidden) throw_fault(*fault, range.size());
  const Pages pages = find(range);
  if (hidden || pages.at == mappings_.end()) {
    std::ranges::fill(nodes, kPageAbsent);
    return;
  }
  const Mapping& mapping = pages.at->second;
  const auto begin = static_cast<size_t>(range.data() - pages.at->first);
  const size_t end = begin + nodes.size() * page_bytes;
  const size_t last =
      std::min((end + mapping.page_bytes - 1) / mapping.page_bytes, mapping.pages.size());
  take_in_touched({pages.at, pages.first, last - pages.first});
  for (size_t i = 0; i < nodes.size(); ++i) {
    nodes[i] = mapping.pages.get((begin + i * page_bytes) / mapping.page_bytes);
  }
}

bool SimulatedKernel::move_page(Mappings::iterator at, size_t page, NodeId target) {
  Mapping& mapping = at->second;
  const int from = mapping.pages.get(page);
  if (from < 0 || from == target) return from == target;
  const Pages whole = whole_page(at, page);
  // Give back first, so that a process at its limit can still move pages.
  ledger_.give_back(from, mapping.page_bytes, whole.count);
  const uint64_t taken = ledger_.take(target, mapping.page_bytes, whole.count);
  if (taken == whole.count) {
    mapping.pages.fill(whole.first, whole.count, target);
    return true;
  }
  ledger_.give_back(target, mapping.page_bytes, taken);
  ledger_.take(from, mapping.page_bytes, whole.count);
  if (whole.count == 1) return false;
  break_huge(whole);
  return move_page(at, page, target);
}

void SimulatedKernel::move(std::span<std::byte> range, size_t page_bytes,
                           std::span<const NodeId> targets, std::span<int> states) {
  const auto lock = locked();
  const auto fault = faults_.begin_call(Operation::kMove);
  if (fault && fault->effect == FaultEffect::kRefuse) throw_fault(*fault, range.size());
  const Pages pages = find(range);
  if (pages.at == mappings_.end()) throw InvalidArgument("move a range that is not mapped");
  if (fault && fault->effect == FaultEffect::kShared) {
    std::ranges::fill(states, kPageShared);
    return;
  }
  Mapping& mapping = pages.at->second;
  const bool half = fault && fault->effect == FaultEffect::kPartial;
  const size_t count = half ? targets.size() / 2 : targets.size();
  for (size_t i = 0; i < count; ++i) {
    ledger_.check_node(targets[i]);
    if (is_pinned(range.data() + i * page_bytes)) continue;
    move_page(pages.at, pages.first + i * page_bytes / mapping.page_bytes, targets[i]);
  }
  if (half) throw_fault(*fault, range.size());
  for (size_t i = 0; i < states.size(); ++i) {
    states[i] = mapping.pages.get(pages.first + i * page_bytes / mapping.page_bytes);
  }
}

uint64_t SimulatedKernel::movable_bytes(NodeId node) const {
  const auto lock = locked();
  return ledger_.is_movable(node) ? ledger_.total_bytes(node, base_page_bytes_) : 0;
}

void SimulatedKernel::pin(std::span<const std::byte> range) {
  const auto lock = locked();
  const Pages pages = find(range);
  if (pages.at == mappings_.end()) throw InvalidArgument("pin a range that is not mapped");
  Mapping& mapping = pages.at->second;
  for (size_t page = pages.first; page < pages.first + pages.count; ++page) {
    const int from = mapping.pages.get(page);
    if (from >= 0 && !ledger_.is_movable(from)) continue;
    auto order = from < 0 ? order_from(initiator_) : ledger_.fallback_order(from);
    std::erase_if(order, [&](NodeId node) { return ledger_.is_movable(node); });
    if (from < 0) {
      place({pages.at, page, 1}, order);  // pinning faults in
    } else if (std::ranges::none_of(order,
                                    [&](NodeId to) { return move_page(pages.at, page, to); })) {
      throw OutOfMemory("pin " + format_bytes(range.size()) + ": no room outside ZONE_MOVABLE");
    }
  }
  pins_.emplace(range.data(), range.size());
}

void SimulatedKernel::unpin(const std::byte* address) noexcept {
  if (guard_.in_child()) return;
  const auto lock = locked();
  pins_.erase(address);
}

bool SimulatedKernel::is_pinned(const std::byte* address) const {
  const auto after = pins_.upper_bound(address);
  return after != pins_.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

uint64_t SimulatedKernel::used_bytes(NodeId node) const {
  const auto lock = locked();
  return ledger_.used_bytes(node);
}

size_t SimulatedKernel::mapping_count() const {
  const auto lock = locked();
  return mappings_.size();
}

void SimulatedKernel::set_used_by_others(NodeId node, uint64_t bytes) {
  const auto lock = locked();
  ledger_.set_used_by_others(node, bytes);
}

void SimulatedKernel::set_pool(NodeId node, size_t page_bytes, uint64_t pages) {
  const auto lock = locked();
  ledger_.set_pool(node, page_bytes, pages);
}

}  // namespace cxl_offload::os
