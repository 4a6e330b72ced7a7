#include "gpu/fake_driver.h"

#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "core/error.h"

namespace cxl_offload::gpu {

std::unique_lock<std::mutex> FakeDriver::locked() const {
  refuse_in_child();
  return std::unique_lock(mutex_);
}

void FakeDriver::register_host(std::span<std::byte> range) {
  const auto lock = locked();
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
  if (in_child()) return;
  const auto lock = locked();
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
  const auto lock = locked();
  pinning_ = std::move(pinning);
}

EventId FakeDriver::record_event(StreamId stream) {
  const auto lock = locked();
  if (broken_) throw SystemError(EIO, "record event: the context is broken, as the test asked");
  events_.emplace(++last_event_, Event{stream, streams_[stream].queued});
  ++counts_.events;
  return last_event_;
}

bool FakeDriver::event_done(EventId event) noexcept {
  if (in_child()) return true;
  const auto lock = locked();
  ++counts_.event_queries;
  const auto found = events_.find(event);
  if (found == events_.end()) return true;
  return is_done(found->second);
}

void FakeDriver::wait_event(EventId event) {
  auto lock = locked();
  if (broken_) throw SystemError(EIO, "wait for event: the context is broken, as the test asked");
  const Event waited = events_.at(event);
  if (hold_) {
    ++counts_.waiters;
    ran_.wait(lock, [&] { return !hold_ || broken_ || is_done(waited); });
    --counts_.waiters;
  }
  run_until(waited);
  ++counts_.event_waits;
}

void FakeDriver::destroy_event(EventId event) noexcept {
  if (in_child()) return;
  const auto lock = locked();
  counts_.events -= events_.erase(event);
}

void FakeDriver::synchronize() {
  const auto lock = locked();
  if (broken_) throw SystemError(EIO, "synchronize: the context is broken, as the test asked");
  for (auto& [id, stream] : streams_) run_until({id, stream.queued});
  ++counts_.synchronizations;
}

StreamId FakeDriver::create_stream() {
  const auto lock = locked();
  streams_.emplace(++last_stream_, Stream{});
  ++counts_.streams;
  return last_stream_;
}

void FakeDriver::destroy_stream(StreamId) noexcept {
  if (in_child()) return;
  const auto lock = locked();
  --counts_.streams;
}

void FakeDriver::stream_wait(StreamId stream, EventId event) {
  const auto lock = locked();
  if (broken_) throw SystemError(EIO, "stream wait: the context is broken, as the test asked");
  const auto found = events_.find(event);
  if (found != events_.end()) queue(stream, {0, 0, 0, found->second});
}

void FakeDriver::copy(uint64_t target, uint64_t source, size_t bytes, StreamId stream) {
  if (bytes == 0) return;
  const auto lock = locked();
  if (broken_) throw SystemError(EIO, "copy: the context is broken, as the test asked");
  if (fail_copy_in_ > 0 && --fail_copy_in_ == 0) {
    throw SystemError(EIO, "copy " + format_bytes(bytes) + ": refused, as the test asked");
  }
  queue(stream, {target, source, bytes, {0, 0}});
  ++counts_.copies;
}

void FakeDriver::copy_batch(std::span<const uint64_t> targets, std::span<const uint64_t> sources,
                            std::span<const size_t> sizes, StreamId stream) {
  if (targets.size() != sources.size() || targets.size() != sizes.size()) {
    throw InvalidArgument("copy " + std::to_string(sources.size()) + " sources of " +
                          std::to_string(sizes.size()) + " sizes to " +
                          std::to_string(targets.size()) + " targets");
  }
  for (size_t i = 0; i < sizes.size(); ++i) copy(targets[i], sources[i], sizes[i], stream);
}

void FakeDriver::queue(StreamId stream, const Work& work) {
  Stream& queued = streams_[stream];
  queued.work.push_back(work);
  ++queued.queued;
}

bool FakeDriver::is_done(const Event& event) const {
  const auto stream = streams_.find(event.stream);
  return stream == streams_.end() || stream->second.done >= event.behind;
}

void FakeDriver::run_next(Stream& stream) {
  const Work work = stream.work.front();
  if (work.bytes > 0) {
    std::memmove(reinterpret_cast<void*>(work.target), reinterpret_cast<void*>(work.source),
                 work.bytes);
    counts_.copied_bytes += work.bytes;
  }
  stream.work.pop_front();
  ++stream.done;
  ran_.notify_all();
}

// The recursion ends, because only work that was queued after an event waits for it.
void FakeDriver::run_until(const Event& event) {
  const auto found = streams_.find(event.stream);
  if (found == streams_.end()) return;
  Stream& stream = found->second;
  while (stream.done < event.behind) {
    run_until(stream.work.front().wait);
    run_next(stream);
  }
}

void FakeDriver::launch(StreamId stream) {
  const auto lock = locked();
  queue(stream, {});
}

void FakeDriver::finish(StreamId stream) {
  const auto lock = locked();
  run_until({stream, streams_[stream].queued});
}

size_t FakeDriver::step(StreamId stream, size_t count) {
  const auto lock = locked();
  Stream& stepped = streams_[stream];
  size_t ran = 0;
  while (ran < count && !stepped.work.empty() && is_done(stepped.work.front().wait)) {
    run_next(stepped);
    ++ran;
  }
  return ran;
}

void FakeDriver::hold_waiters(bool hold) {
  const auto lock = locked();
  hold_ = hold;
  ran_.notify_all();
}

size_t FakeDriver::pending(StreamId stream) const {
  const auto lock = locked();
  const auto found = streams_.find(stream);
  return found == streams_.end() ? 0 : found->second.work.size();
}

void FakeDriver::fail_copy(uint64_t nth) {
  const auto lock = locked();
  fail_copy_in_ = nth;
}

void FakeDriver::fail_registration(uint64_t nth) {
  const auto lock = locked();
  fail_in_ = nth;
}

void FakeDriver::break_context() {
  const auto lock = locked();
  broken_ = true;
  ran_.notify_all();
}

FakeDriver::Counts FakeDriver::counts() const {
  const auto lock = locked();
  return counts_;
}

bool FakeDriver::is_registered(const std::byte* address) const {
  const auto lock = locked();
  auto after = ranges_.upper_bound(const_cast<std::byte*>(address));
  if (after == ranges_.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return address < begin + bytes;
}

}  // namespace cxl_offload::gpu
