#include "memory/extent_map.h"

namespace cxl_offload::memory {

void ExtentMap::reserve(size_t extents) {
  while (spares_ < extents) {
    // An entry can only be made inside a map.
    Index maker;
    maker.try_emplace({0, nullptr}, nullptr);
    Slot& slot = slots_.emplace_back();
    slot.entry = maker.extract(maker.begin());
    retire(&slot);
  }
}

ExtentMap::Slot* ExtentMap::fresh() noexcept {
  auto* slot = static_cast<Slot*>(spare_);
  spare_ = slot->next;
  --spares_;
  return slot;
}

void ExtentMap::retire(Extent* extent) noexcept {
  extent->next = spare_;
  spare_ = extent;
  ++spares_;
}

void ExtentMap::link_after(Extent* extent, Extent* left) noexcept {
  Extent* right = left == nullptr ? extent->arena->first : left->next;
  extent->previous = left;
  extent->next = right;
  if (right != nullptr) right->previous = extent;
  (left == nullptr ? extent->arena->first : left->next) = extent;
}

void ExtentMap::unlink(Extent* extent) noexcept {
  Extent* left = extent->previous;
  Extent* right = extent->next;
  if (right != nullptr) right->previous = left;
  (left == nullptr ? extent->arena->first : left->next) = right;
}

void ExtentMap::enter(Extent* extent) noexcept {
  auto* slot = static_cast<Slot*>(extent);
  slot->state = ExtentState::kFree;
  slot->entry.key() = {slot->bytes, slot->begin};
  slot->entry.mapped() = slot;
  index_.insert(std::move(slot->entry));
  free_bytes_ += slot->bytes;
}

void ExtentMap::leave(Extent* extent) noexcept {
  static_cast<Slot*>(extent)->entry = index_.extract({extent->bytes, extent->begin});
  free_bytes_ -= extent->bytes;
}

Extent* ExtentMap::add(Arena* arena) {
  reserve(1);
  Extent* extent = fresh();
  extent->begin = arena->begin;
  extent->bytes = arena->bytes;
  extent->arena = arena;
  extent->state = ExtentState::kHeld;
  link_after(extent, nullptr);
  ++arena->taken;
  return extent;
}

void ExtentMap::remove(Arena* arena) noexcept {
  while (Extent* extent = arena->first) {
    if (extent->state == ExtentState::kFree) {
      leave(extent);
      ++arena->taken;
    }
    remove(extent);
  }
}

Extent* ExtentMap::take(Extent* extent, size_t offset, size_t bytes) {
  reserve(2);
  leave(extent);
  const auto leave_free = [&](Extent* left, std::byte* begin, size_t length) {
    Extent* part = fresh();
    part->begin = begin;
    part->bytes = length;
    part->arena = extent->arena;
    link_after(part, left);
    enter(part);
  };
  const size_t after = extent->bytes - offset - bytes;
  if (offset > 0) leave_free(extent->previous, extent->begin, offset);
  if (after > 0) leave_free(extent, extent->end() - after, after);
  extent->begin += offset;
  extent->bytes = bytes;
  extent->state = ExtentState::kHeld;
  ++extent->arena->taken;
  return extent;
}

Extent* ExtentMap::split(Extent* extent, size_t bytes) {
  reserve(1);
  Extent* rest = fresh();
  rest->begin = extent->begin + bytes;
  rest->bytes = extent->bytes - bytes;
  rest->arena = extent->arena;
  rest->state = extent->state;
  link_after(rest, extent);
  extent->bytes = bytes;
  ++extent->arena->taken;
  return rest;
}

Extent* ExtentMap::give_back(Extent* extent) noexcept {
  --extent->arena->taken;
  const auto absorb = [&](Extent* neighbour) {
    leave(neighbour);
    extent->bytes += neighbour->bytes;
    unlink(neighbour);
    retire(neighbour);
  };
  Extent* right = extent->next;
  if (right != nullptr && right->state == ExtentState::kFree && right->begin == extent->end()) {
    absorb(right);
  }
  Extent* left = extent->previous;
  if (left != nullptr && left->state == ExtentState::kFree && left->end() == extent->begin) {
    extent->begin = left->begin;
    absorb(left);
  }
  enter(extent);
  return extent;
}

void ExtentMap::remove(Extent* extent) noexcept {
  --extent->arena->taken;
  unlink(extent);
  retire(extent);
}

}  // namespace cxl_offload::memory
