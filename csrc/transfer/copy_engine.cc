#include "transfer/copy_engine.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <list>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "core/error.h"
#include "transfer/staging.h"

namespace cxl_offload {
namespace {

struct Job {
  std::vector<Piece> chunks;
  std::vector<EventId> after;
  std::shared_ptr<CopyHandle> handle;
  bool staged = false;
};

size_t total_bytes(const std::vector<Piece>& pieces) {
  size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

}  // namespace

class CopyEngine::Queue {
 public:
  Queue(Direction direction, std::shared_ptr<GpuDriver> driver, std::shared_ptr<HostCopier> copier,
        std::span<std::byte> staging, const EngineOptions& options)
      : direction_(direction),
        driver_(std::move(driver)),
        options_(options),
        first_stream_(driver_->create_stream()),
        staging_(driver_, std::move(copier), staging, options.chunk_bytes),
        worker_([this] { work(); }) {}
  ~Queue();

  std::shared_ptr<CopyHandle> submit(std::vector<Piece> pieces, const std::vector<StreamId>& after,
                                     bool may_wait);
  void drain();
  std::map<Lane, LinkUse> use() const;
  size_t unfinished_bytes() const;
  std::vector<StreamId> streams() const;
  bool in_child() const { return getpid() != owner_; }

 private:
  bool make_room(size_t bytes, bool may_wait);
  void forget_finished();
  void work();
  void run(Job& job);
  void issue(Job& job, std::vector<EventId>& events);
  void copy_chunk(const Piece& chunk, StreamId stream);
  void settle_failed(const Job& job);
  StreamId stream_of(Lane lane);

  const Direction direction_;
  const std::shared_ptr<GpuDriver> driver_;
  const EngineOptions options_;
  const pid_t owner_ = getpid();
  const StreamId first_stream_;
  Staging staging_;  // used by who has set `working_`

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Job> todo_;
  std::list<std::shared_ptr<CopyHandle>> live_;  // the oldest first
  size_t unfinished_bytes_ = 0;
  bool working_ = false;  // some thread hands a job to the GPU
  bool ending_ = false;
  std::map<Lane, StreamId> streams_;
  std::map<Lane, LinkUse> use_;

  std::thread worker_;
};

CopyEngine::Queue::~Queue() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  worker_.join();
  drain();
  // The streams stay: pinned memory that was copied remembers them until it is dropped, and a
  // handle of a destroyed stream must not be asked for anything.
}

std::shared_ptr<CopyHandle> CopyEngine::Queue::submit(std::vector<Piece> pieces,
                                                      const std::vector<StreamId>& after,
                                                      bool may_wait) {
  Job job;
  const size_t bytes = total_bytes(pieces);
  job.staged = std::ranges::any_of(
      pieces, [](const Piece& piece) { return piece.bytes > 0 && !piece.pinned; });
  if (job.staged && staging_.slots() == 0) {
    throw InvalidArgument("copy " + format_bytes(bytes) +
                          " that are not pinned: the engine has no staging; allocate with pin=True "
                          "or give it staging of two chunks or more");
  }
  if (!pieces.empty()) job.chunks = plan_chunks(pieces, options_.chunk_bytes, options_.rates);
  if (!make_room(bytes, may_wait)) return nullptr;
  job.handle = std::make_shared<CopyHandle>(driver_, bytes);
  try {
    for (const StreamId stream : after) job.after.push_back(driver_->record_event(stream));
  } catch (...) {
    for (const EventId event : job.after) driver_->destroy_event(event);
    const std::lock_guard lock(mutex_);
    unfinished_bytes_ -= bytes;
    throw;
  }
  auto handle = job.handle;
  std::unique_lock lock(mutex_);
  live_.push_back(handle);
  if (job.staged || working_ || !todo_.empty()) {
    todo_.push_back(std::move(job));
    lock.unlock();
    changed_.notify_all();
    return handle;
  }
  // Nobody is before it and nothing has to be copied by hand: no need to wake the worker.
  working_ = true;
  lock.unlock();
  run(job);
  lock.lock();
  working_ = false;
  lock.unlock();
  changed_.notify_all();
  return handle;
}

bool CopyEngine::Queue::make_room(size_t bytes, bool may_wait) {
  for (;;) {
    forget_finished();
    std::shared_ptr<CopyHandle> oldest;
    {
      const std::lock_guard lock(mutex_);
      if (unfinished_bytes_ == 0 || bytes + unfinished_bytes_ <= options_.limit_bytes) {
        unfinished_bytes_ += bytes;
        return true;
      }
      if (!may_wait) return false;
      if (!live_.empty()) oldest = live_.front();
    }
    // Without one, another thread has made room for itself and is about to list its transfer.
    if (oldest != nullptr) {
      oldest->wait_quietly();
    } else {
      std::this_thread::yield();
    }
  }
}

void CopyEngine::Queue::forget_finished() {
  const std::lock_guard lock(mutex_);
  live_.remove_if([&](const std::shared_ptr<CopyHandle>& handle) {
    const bool finished = handle->finished();
    if (finished) unfinished_bytes_ -= handle->bytes();
    return finished;
  });
}

void CopyEngine::Queue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return (ending_ || !todo_.empty()) && !working_; });
    if (todo_.empty()) return;
    Job job = std::move(todo_.front());
    todo_.pop_front();
    working_ = true;
    lock.unlock();
    run(job);
    lock.lock();
    working_ = false;
  }
}

void CopyEngine::Queue::run(Job& job) {
  std::vector<EventId> events;
  try {
    issue(job, events);
    job.handle->issued(std::move(events));
  } catch (...) {
    const auto reason = std::current_exception();
    for (const EventId event : events) driver_->destroy_event(event);
    settle_failed(job);
    job.handle->failed(reason);
  }
  for (const EventId event : job.after) driver_->destroy_event(event);
}

void CopyEngine::Queue::issue(Job& job, std::vector<EventId>& events) {
  std::map<Lane, StreamId> used;
  for (const Piece& chunk : job.chunks) {
    auto [at, is_new] = used.try_emplace(chunk.lane, 0);
    if (is_new) {
      at->second = stream_of(chunk.lane);
      for (const EventId event : job.after) driver_->stream_wait(at->second, event);
    }
    copy_chunk(chunk, at->second);
  }
  if (direction_ == Direction::kToHost && job.staged) staging_.land();
  events.reserve(used.size());
  for (const auto& [lane, stream] : used) events.push_back(driver_->record_event(stream));
}

void CopyEngine::Queue::copy_chunk(const Piece& chunk, StreamId stream) {
  const auto host = reinterpret_cast<uint64_t>(chunk.host);
  const bool to_device = direction_ == Direction::kToDevice;
  if (chunk.pinned) {
    driver_->copy(to_device ? chunk.device : host, to_device ? host : chunk.device, chunk.bytes,
                  stream);
  } else if (to_device) {
    staging_.send(chunk.device, chunk.host, chunk.bytes, stream);
  } else {
    staging_.receive(chunk.host, chunk.device, chunk.bytes, stream);
  }
  const std::lock_guard lock(mutex_);
  LinkUse& use = use_[chunk.lane];
  use.bytes += chunk.bytes;
  use.copies += 1;
  use.staged_bytes += chunk.pinned ? 0 : chunk.bytes;
}

// Copies that were queued before one failed may still run; the owner must not free their ends.
void CopyEngine::Queue::settle_failed(const Job& job) {
  std::set<Lane> lanes;
  for (const Piece& chunk : job.chunks) lanes.insert(chunk.lane);
  for (const Lane lane : lanes) {
    try {
      const EventId event = driver_->record_event(stream_of(lane));
      driver_->wait_event(event);
      driver_->destroy_event(event);
    } catch (...) {  // a context that cannot be waited for runs nothing any more
    }
  }
  staging_.forget();
}

StreamId CopyEngine::Queue::stream_of(Lane lane) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = streams_.find(lane); found != streams_.end()) return found->second;
    if (streams_.empty()) return streams_[lane] = first_stream_;
  }
  // Only who has set `working_` comes here, so nobody makes the same one meanwhile.
  const StreamId made = driver_->create_stream();
  const std::lock_guard lock(mutex_);
  return streams_[lane] = made;
}

void CopyEngine::Queue::drain() {
  std::list<std::shared_ptr<CopyHandle>> handles;
  {
    const std::lock_guard lock(mutex_);
    handles = live_;
  }
  for (const auto& handle : handles) handle->wait_quietly();
  forget_finished();
}

std::map<Lane, LinkUse> CopyEngine::Queue::use() const {
  const std::lock_guard lock(mutex_);
  return use_;
}

size_t CopyEngine::Queue::unfinished_bytes() const {
  const std::lock_guard lock(mutex_);
  return unfinished_bytes_;
}

std::vector<StreamId> CopyEngine::Queue::streams() const {
  const std::lock_guard lock(mutex_);
  std::vector<StreamId> all;
  for (const auto& [lane, stream] : streams_) all.push_back(stream);
  return all;
}

CopyEngine::CopyEngine(std::shared_ptr<GpuDriver> driver, std::shared_ptr<HostCopier> copier,
                       std::span<std::byte> staging, EngineOptions options) {
  if (options.chunk_bytes == 0 || options.limit_bytes == 0) {
    throw InvalidArgument("copy engine with chunks of " + format_bytes(options.chunk_bytes) +
                          " and a limit of " + format_bytes(options.limit_bytes) +
                          ": both must be positive");
  }
  for (const auto& [lane, rate] : options.rates) {
    if (!(rate > 0)) throw InvalidArgument("copy engine: a lane's rate must be positive");
  }
  const size_t half = staging.size() / 2;
  if (!staging.empty() && half < 2 * options.chunk_bytes) {
    throw InvalidArgument("copy engine with staging of " + format_bytes(staging.size()) +
                          ": each direction needs two chunks of " +
                          format_bytes(options.chunk_bytes) + "; give four chunks or none");
  }
  queues_[0] =
      std::make_unique<Queue>(Direction::kToDevice, driver, copier, staging.first(half), options);
  queues_[1] = std::make_unique<Queue>(Direction::kToHost, std::move(driver), std::move(copier),
                                       staging.subspan(half, half), options);
}

CopyEngine::~CopyEngine() {
  for (auto& queue : queues_) {
    // The threads and the GPU belong to the parent.
    if (queue->in_child()) static_cast<void>(queue.release());
  }
}

std::shared_ptr<CopyHandle> CopyEngine::submit(Direction direction, std::vector<Piece> pieces,
                                               const std::vector<StreamId>& after, bool may_wait) {
  Queue& queue = *queues_[static_cast<size_t>(direction)];
  if (queue.in_child()) {
    throw InvalidArgument(
        "copy with an engine of the parent process in a forked child: make one "
        "of the child's own");
  }
  return queue.submit(std::move(pieces), after, may_wait);
}

void CopyEngine::drain() {
  for (auto& queue : queues_) queue->drain();
}

std::map<Lane, LinkUse> CopyEngine::use(Direction direction) const {
  return queues_[static_cast<size_t>(direction)]->use();
}

size_t CopyEngine::unfinished_bytes(Direction direction) const {
  return queues_[static_cast<size_t>(direction)]->unfinished_bytes();
}

std::vector<StreamId> CopyEngine::streams() const {
  std::vector<StreamId> all = queues_[0]->streams();
  const auto more = queues_[1]->streams();
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace cxl_offload
