#include "transfer/staging.h"

#include <utility>

namespace cxl_offload::transfer {

Staging::Staging(std::shared_ptr<gpu::GpuDriver> driver, std::shared_ptr<HostCopier> copier,
                 std::span<std::byte> memory, size_t slot_bytes)
    : driver_(std::move(driver)), copier_(std::move(copier)) {
  for (size_t at = 0; at + slot_bytes <= memory.size(); at += slot_bytes) {
    slots_.push_back({memory.data() + at, 0, nullptr, 0});
  }
}

Staging::~Staging() {
  for (const Slot& slot : slots_) {
    if (slot.event != 0) driver_->destroy_event(slot.event);
  }
}

void Staging::send(uint64_t device, const std::byte* host, size_t bytes, gpu::StreamId stream) {
  Slot& slot = take();
  copier_->copy(slot.at, host, bytes);
  driver_->copy(device, reinterpret_cast<uint64_t>(slot.at), bytes, stream);
  slot.event = driver_->record_event(stream);
}

void Staging::receive(std::byte* host, uint64_t device, size_t bytes, gpu::StreamId stream) {
  Slot& slot = take();
  driver_->copy(reinterpret_cast<uint64_t>(slot.at), device, bytes, stream);
  slot.event = driver_->record_event(stream);
  slot.host = host;
  slot.bytes = bytes;
}

// Returns the oldest slot, because slots are used in turn.
Staging::Slot& Staging::take() {
  Slot& slot = slots_[next_];
  settle(slot);
  next_ = (next_ + 1) % slots_.size();
  return slot;
}

void Staging::settle(Slot& slot) {
  if (slot.event == 0) return;
  driver_->wait_event(slot.event);
  driver_->destroy_event(slot.event);
  slot.event = 0;
  if (slot.host != nullptr) copier_->copy(slot.host, slot.at, slot.bytes);
  slot.host = nullptr;
}

void Staging::land() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[(next_ + i) % slots_.size()];
    if (slot.host != nullptr) settle(slot);
  }
}

void Staging::drop_received() noexcept {
  for (Slot& slot : slots_) slot.host = nullptr;
}

}  // namespace cxl_offload::transfer
