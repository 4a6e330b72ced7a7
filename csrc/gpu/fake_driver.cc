#include "gpu/fake_driver.h"

#include <cerrno>
#include <iterator>
#include <utility>

#include "core/error.h"

namespace cxl_offload {

void FakeDriver::register_host(std::span<std::byte> range) {
  const std::lock_guard lock(mutex_);
  if (fail_in_ > 0 && --fail_in_ == 0) {
    throw SystemError(EIO, "pin " + format_bytes(range.size()) + ": refused, as the test asked");
  }
  if (range.size() > limit_bytes_ - counts_.registered_bytes) {
    throw OutOfMemory("pin " + format_bytes(range.size()) + ": " +
                      format_bytes(counts_.registered_bytes) + " of " + format_bytes(limit_bytes_) +
                      " are pinned already");
  }
  const auto after = ranges_.lower_bound(range.data());
  const bool meets_next = after != ranges_.end() && after->first < range.data() + range.size();
  const bool meets_previous =
      after != ranges_.begin() && std::prev(after)->first + std::prev(after)->second > range.data();
  if (meets_next || meets_previous) {
    throw SystemError(EEXIST, "pin " + format_bytes(range.size()) + ": pinned already");
  }
  if (pinning_.pin) pinning_.pin(range);
  ranges_.emplace(range.data(), range.size());
  ++counts_.registrations;
  ++counts_.registered_ranges;
  counts_.registered_bytes += range.size();
}

void FakeDriver::unregister_host(std::byte* address) noexcept {
  const std::lock_guard lock(mutex_);
  const auto range = ranges_.find(address);
  if (range == ranges_.end()) {
    ++counts_.wrong_unregisters;
    return;
  }
  counts_.registered_bytes -= range->second;
  --counts_.registered_ranges;
  ranges_.erase(range);
  if (pinning_.unpin) pinning_.unpin(address);
}

void FakeDriver::set_pinning(Pinning pinning) {
  const std::lock_guard lock(mutex_);
  pinning_ = std::move(pinning);
}

EventId FakeDriver::record_event(StreamId stream) {
  const std::lock_guard lock(mutex_);
  if (broken_) throw SystemError(EIO, "record event: the context is broken, as the test asked");
  events_.emplace(++last_event_, Event{stream, streams_[stream].queued});
  ++counts_.events;
  return last_event_;
}

bool FakeDriver::event_done(EventId event) noexcept {
  const std::lock_guard lock(mutex_);
  ++counts_.event_queries;
  const auto found = events_.find(event);
  if (found == events_.end()) return true;
  const auto stream = streams_.find(found->second.stream);
  return stream->second.done >= found->second.behind;
}

void FakeDriver::wait_event(EventId event) {
  const std::lock_guard lock(mutex_);
  if (broken_) throw SystemError(EIO, "wait for event: the context is broken, as the test asked");
  const Event& waited = events_.at(event);
  Stream& stream = streams_.at(waited.stream);
  if (stream.done < waited.behind) stream.done = waited.behind;
  ++counts_.event_waits;
}

void FakeDriver::destroy_event(EventId event) noexcept {
  const std::lock_guard lock(mutex_);
  counts_.events -= events_.erase(event);
}

void FakeDriver::synchronize() {
  const std::lock_guard lock(mutex_);
  if (broken_) throw SystemError(EIO, "synchronize: the context is broken, as the test asked");
  for (auto& [id, stream] : streams_) stream.done = stream.queued;
  ++counts_.synchronizations;
}

void FakeDriver::launch(StreamId stream) {
  const std::lock_guard lock(mutex_);
  ++streams_[stream].queued;
}

void FakeDriver::finish(StreamId stream) {
  const std::lock_guard lock(mutex_);
  Stream& finished = streams_[stream];
  finished.done = finished.queued;
}

void FakeDriver::fail_registration(uint64_t nth) {
  const std::lock_guard lock(mutex_);
  fail_in_ = nth;
}

void FakeDriver::break_context() {
  const std::lock_guard lock(mutex_);
  broken_ = true;
}

FakeDriver::Counts FakeDriver::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

bool FakeDriver::is_registered(const std::byte* address) const {
  const std::lock_guard lock(mutex_);
  auto after = ranges_.upper_bound(const_cast<std::byte*>(address));
  if (after == ranges_.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return address < begin + bytes;
}

}  // namespace cxl_offload
