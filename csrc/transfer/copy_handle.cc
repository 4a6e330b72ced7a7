#include "transfer/copy_handle.h"

#include <algorithm>
#include <utility>

namespace cxl_offload::transfer {

using gpu::EventId;

CopyHandle::~CopyHandle() {
  if (guard_.in_child()) return;
  for (const EventId event : events_) driver_->destroy_event(event);
}

bool CopyHandle::query() {
  guard_.refuse_in_child("ask for a transfer");
  const std::lock_guard lock(mutex_);
  if (state_ == State::kFailed) std::rethrow_exception(reason_);
  if (state_ == State::kIssued &&
      std::ranges::all_of(events_, [&](EventId event) { return driver_->event_done(event); })) {
    state_ = State::kDone;
  }
  return state_ == State::kDone;
}

void CopyHandle::await_issue(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [&] { return state_ != State::kQueued; });
  if (state_ == State::kFailed) std::rethrow_exception(reason_);
}

void CopyHandle::wait() {
  guard_.refuse_in_child("wait for a transfer");
  {
    std::unique_lock lock(mutex_);
    await_issue(lock);
    if (state_ == State::kDone) return;
  }
  // The events stay until the handle goes, and no longer change.
  try {
    for (const EventId event : events_) driver_->wait_event(event);
  } catch (...) {  // after a fault of the GPU nothing runs any more
    failed(std::current_exception());
    throw;
  }
  const std::lock_guard lock(mutex_);
  state_ = State::kDone;
}

void CopyHandle::stream_wait(gpu::StreamId stream) {
  guard_.refuse_in_child("wait for a transfer");
  std::unique_lock lock(mutex_);
  await_issue(lock);
  if (state_ == State::kDone) return;
  for (const EventId event : events_) driver_->stream_wait(stream, event);
}

void CopyHandle::issued(std::vector<EventId> events) {
  const std::lock_guard lock(mutex_);
  events_ = std::move(events);
  state_ = State::kIssued;
  changed_.notify_all();
}

void CopyHandle::failed(std::exception_ptr reason) {
  const std::lock_guard lock(mutex_);
  reason_ = std::move(reason);
  state_ = State::kFailed;
  changed_.notify_all();
}

bool CopyHandle::finished() noexcept {
  try {
    return query();
  } catch (...) {
    return true;
  }
}

void CopyHandle::wait_quietly() noexcept {
  try {
    wait();
  } catch (...) {  // its owner is told
  }
}

}  // namespace cxl_offload::transfer
