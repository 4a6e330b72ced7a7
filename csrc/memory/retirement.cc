#include "memory/retirement.h"

#include <algorithm>
#include <cstdint>

namespace cxl_offload::memory {
namespace {

// A query costs about a microsecond.
constexpr int kMaxPending = 32;

}  // namespace

Retirement::~Retirement() {
  for (auto* blocks : {&fenced_, &unfenced_}) {
    for (Retired& block : *blocks) destroy_events(block);
  }
}

void Retirement::destroy_events(Retired& block) noexcept {
  for (const gpu::EventId event : block.events) driver_->destroy_event(event);
  block.events.clear();
}

void Retirement::add(std::list<Retired>& block) noexcept {
  Retired& retired = block.front();
  try {
    for (const gpu::StreamId stream : retired.streams) {
      retired.events.push_back(driver_->record_event(stream));
    }
  } catch (...) {  // a stream, or the driver, is gone; go on as if no stream had been named
    destroy_events(retired);
  }
  const std::lock_guard lock(mutex_);
  auto& blocks = retired.events.empty() ? unfenced_ : fenced_;
  blocks.splice(blocks.end(), block);
}

bool Retirement::done(Retired& block) noexcept {
  while (!block.events.empty()) {
    if (!driver_->event_done(block.events.back())) return false;
    driver_->destroy_event(block.events.back());
    block.events.pop_back();
  }
  return true;
}

void Retirement::wait_for(Retired& block) {
  while (!block.events.empty()) {
    driver_->wait_event(block.events.back());
    driver_->destroy_event(block.events.back());
    block.events.pop_back();
  }
}

std::list<Retired> Retirement::poll() {
  std::list<Retired> pending;
  {
    const std::lock_guard lock(mutex_);
    pending.swap(fenced_);
  }
  std::list<Retired> ready;
  int unready = 0;
  for (auto block = pending.begin(); block != pending.end() && unready < kMaxPending;) {
    const auto next = std::next(block);
    if (done(*block)) {
      ready.splice(ready.end(), pending, block);
    } else {
      ++unready;
    }
    block = next;
  }
  const std::lock_guard lock(mutex_);
  fenced_.splice(fenced_.begin(), pending);
  return ready;
}

std::list<Retired> Retirement::wait(size_t least, size_t most) {
  const auto fits = [&](const Retired& block) {
    return block.bytes >= least && block.bytes <= most;
  };
  std::list<Retired> waited;
  {
    const std::lock_guard lock(mutex_);
    const auto block = std::find_if(fenced_.begin(), fenced_.end(), fits);
    if (block != fenced_.end()) {
      waited.splice(waited.end(), fenced_, block);
      ++event_waits_;
    } else if (std::none_of(unfenced_.begin(), unfenced_.end(), fits)) {
      return waited;
    }
  }
  if (waited.empty()) return synchronize();
  try {
    wait_for(waited.front());
  } catch (...) {
    const std::lock_guard lock(mutex_);
    fenced_.splice(fenced_.begin(), waited);
    throw;
  }
  return waited;
}

std::list<Retired> Retirement::synchronize() {
  std::list<Retired> waited;
  {
    const std::lock_guard lock(mutex_);
    waited.swap(unfenced_);
    ++synchronizations_;
  }
  try {
    driver_->synchronize();
  } catch (...) {
    const std::lock_guard lock(mutex_);
    unfenced_.splice(unfenced_.begin(), waited);
    throw;
  }
  return waited;
}

std::list<Retired> Retirement::wait_all() {
  std::list<Retired> waited;
  std::list<Retired> pending;
  size_t unfenced = 0;
  {
    const std::lock_guard lock(mutex_);
    pending.swap(fenced_);
    unfenced = unfenced_.size();
  }
  try {
    for (Retired& block : pending) wait_for(block);
    if (unfenced > 0) waited = synchronize();
  } catch (...) {
    const std::lock_guard lock(mutex_);
    fenced_.splice(fenced_.begin(), pending);
    throw;
  }
  waited.splice(waited.end(), pending);
  return waited;
}

std::list<Retired> Retirement::abandon() noexcept {
  std::list<Retired> blocks;
  {
    const std::lock_guard lock(mutex_);
    blocks.swap(fenced_);
    blocks.splice(blocks.end(), unfenced_);
  }
  for (Retired& block : blocks) destroy_events(block);
  return blocks;
}

uint64_t Retirement::synchronizations() const {
  const std::lock_guard lock(mutex_);
  return synchronizations_;
}

uint64_t Retirement::event_waits() const {
  const std::lock_guard lock(mutex_);
  return event_waits_;
}

}  // namespace cxl_offload::memory
