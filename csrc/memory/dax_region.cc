#include "memory/dax_region.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/error.h"
#include "core/rounding.h"
#include "os/lost_ranges.h"
#include "os/watched_ranges.h"

namespace cxl_offload::memory {

using os::DaxPiece;

DaxStore::DaxStore(std::unique_ptr<os::DaxDevice> device, std::optional<uint64_t> capacity_bytes)
    : device_(std::move(device)),
      capacity_(std::min<uint64_t>(capacity_bytes.value_or(UINT64_MAX), device_->size_bytes())),
      holes_{{0, device_->size_bytes()}} {
  use_.capacity_bytes = capacity_;
}

std::vector<DaxPiece> DaxStore::take(size_t bytes) {
  const std::lock_guard lock(mutex_);
  const uint64_t left = capacity_ - use_.current_bytes;
  if (bytes > left) {
    throw OutOfMemory("map " + format_bytes(bytes) + " of " + device_->name() + ": " +
                      format_bytes(left) + " of its " + format_bytes(capacity_) +
                      " are free; ask for less, or place a share elsewhere");
  }
  auto best = holes_.end();
  for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
    const bool fits = hole->second >= bytes;
    if (fits && (best == holes_.end() || hole->second < best->second)) best = hole;
  }
  std::vector<DaxPiece> pieces;
  pieces.reserve(best == holes_.end() ? holes_.size() : 1);
  size_t missing = bytes;
  for (auto hole = best == holes_.end() ? holes_.begin() : best; missing > 0;) {
    const size_t taken = std::min(missing, hole->second);
    pieces.push_back({hole->first, taken});
    missing -= taken;
    if (taken < hole->second) {
      auto rest = holes_.extract(hole);
      rest.key() += taken;
      rest.mapped() -= taken;
      holes_.insert(std::move(rest));
      break;
    }
    hole = holes_.erase(hole);
  }
  use_.current_bytes += bytes;
  use_.total_bytes += bytes;
  use_.peak_bytes = std::max(use_.peak_bytes, use_.current_bytes);
  return pieces;
}

void DaxStore::give_back(DaxPiece piece) noexcept {
  const std::lock_guard lock(mutex_);
  auto hole = holes_.end();
  try {
    hole = holes_.emplace(piece.offset, piece.bytes).first;
  } catch (...) {  // there is no memory to record the hole, so it counts as taken from now on
    return;
  }
  use_.current_bytes -= piece.bytes;
  const auto next = std::next(hole);
  if (next != holes_.end() && next->first == hole->first + hole->second) {
    hole->second += next->second;
    holes_.erase(next);
  }
  if (hole == holes_.begin()) return;
  const auto previous = std::prev(hole);
  if (previous->first + previous->second == hole->first) {
    previous->second += hole->second;
    holes_.erase(hole);
  }
}

NodeUse DaxStore::use() const {
  const std::lock_guard lock(mutex_);
  return use_;
}

size_t DaxStore::hole_count() const {
  const std::lock_guard lock(mutex_);
  return holes_.size();
}

DaxRegion::DaxRegion(std::shared_ptr<DaxStore> store, size_t bytes)
    : store_(std::move(store)), bytes_(round_up(bytes, store_->device().align_bytes())) {
  const auto taken = store_->take(bytes_);
  try {
    address_ = store_->device().map(taken);
    size_t offset = 0;
    for (const DaxPiece& piece : taken) {
      pieces_.emplace(offset, piece);
      offset += piece.bytes;
    }
    os::watch({range(), page_bytes(), true});
  } catch (...) {
    if (address_ != nullptr) store_->device().unmap(range());
    for (const DaxPiece& piece : taken) store_->give_back(piece);
    throw;
  }
}

DaxRegion::~DaxRegion() {
  // What was released has gone already.
  for (const auto& [offset, piece] : pieces_) {
    unmap(offset, piece);
  }
}

void DaxRegion::unmap(size_t offset, const DaxPiece& piece) noexcept {
  const auto part = range().subspan(offset, piece.bytes);
  os::unwatch(part);
  os::settle(part);
  store_->device().unmap(part);
  store_->give_back(piece);
}

size_t DaxRegion::next_cut(size_t offset) const { return round_up(offset, page_bytes()); }

void DaxRegion::release(size_t offset, size_t bytes) {
  const std::lock_guard lock(mutex_);
  const size_t end = offset + bytes;
  // Pieces are cut at both ends first, because nothing may fail once pages are gone.
  cut_at(offset);
  cut_at(end);
  for (auto at = pieces_.lower_bound(offset); at != pieces_.end() && at->first < end;) {
    const auto [begin, piece] = *at;
    at = pieces_.erase(at);
    unmap(begin, piece);
  }
}

// Makes a piece begin at `offset`, unless it lies in none.
void DaxRegion::cut_at(size_t offset) {
  const auto after = pieces_.upper_bound(offset);
  if (after == pieces_.begin()) return;
  auto& [begin, piece] = *std::prev(after);
  const size_t kept = offset - begin;
  if (kept == 0 || kept >= piece.bytes) return;
  pieces_.emplace(offset, DaxPiece{piece.offset + kept, piece.bytes - kept});
  piece.bytes = kept;
}

}  // namespace cxl_offload::memory
