#include "transfer/copy_engine.h"

#include <algorithm>
#include <condition_variable>
#include <list>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/rounding.h"
#include "core/threads.h"
#include "transfer/staging.h"

namespace cxl_offload::transfer {
namespace {

using gpu::EventId;
using gpu::GpuDriver;
using gpu::StreamId;

struct Job {
  std::vector<Piece> chunks;
  std::vector<EventId> after;
  std::shared_ptr<CopyHandle> handle;
  bool staged = false;
};

size_t total_bytes(const std::vector<Piece>& pieces) {
  size_t bytes = 0;
  for (const Piece& piece : pieces) {
    if (piece.bytes > kMostBytes - bytes) {
      throw InvalidArgument("copy " + format_bytes(piece.bytes) + ": no memory is so large");
    }
    bytes += piece.bytes;
  }
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
        worker_(start_thread("copy engine", [this] { work(); })) {}
  ~Queue();

  std::shared_ptr<CopyHandle> submit(std::vector<Piece> pieces, const std::vector<StreamId>& after,
                                     bool may_wait);
  void drain();
  std::map<Lane, LinkUse> use() const;
  size_t unfinished_bytes() const;
  std::vector<StreamId> streams() const;

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
  const StreamId first_stream_;
  Staging staging_;  // used by the thread that has set `working_`

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::list<Job> todo_;
  std::list<std::shared_ptr<CopyHandle>> live_;  // the oldest first
  size_t unfinished_bytes_ = 0;
  bool working_ = false;  // a thread is handing a job to the GPU
  bool ending_ = false;
  std::map<Lane, StreamId> streams_;
  std::map<Lane, LinkUse> use_;

  std::jthread worker_;
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

// Long: one order of steps, each undone if late.
std::shared_ptr<CopyHandle> CopyEngine::Queue::submit(std::vector<Piece> pieces,
                                                      const std::vector<StreamId>& after,
                                                      bool may_wait) {
  const size_t bytes = total_bytes(pieces);
  std::list<Job> queued(1);
  Job& job = queued.front();
  job.staged = std::ranges::any_of(
      pieces, [](const Piece& piece) { return piece.bytes > 0 && !piece.pinned; });
  if (job.staged && staging_.slots() == 0) {
    throw InvalidArgument("copy " + format_bytes(bytes) +
                          " that are not pinned: the engine has no staging; allocate with pin=True "
                          "or give it staging of two chunks or more");
  }
  if (!pieces.empty()) job.chunks = plan_chunks(pieces, options_.chunk_bytes, options_.rates);
  // Everything that needs memory comes first. Once a transfer has room, it is listed or gives it
  // up.
  job.handle = std::make_shared<CopyHandle>(driver_, bytes);
  job.after.reserve(after.size());
  std::list<std::shared_ptr<CopyHandle>> listed{job.handle};
  if (!make_room(bytes, may_wait)) return nullptr;
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
  live_.splice(live_.end(), listed);
  if (job.staged || working_ || !todo_.empty()) {
    todo_.splice(todo_.end(), queued);
    lock.unlock();
    changed_.notify_all();
    return handle;
  }
  // No transfer is before it and no bytes go through slots, so the worker need not wake.
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
    std::list<Job> taken;
    taken.splice(taken.end(), todo_, todo_.begin());
    working_ = true;
    lock.unlock();
    run(taken.front());
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

// Copies that were queued before one failed may still run; the owner must not free their ends, nor
// anybody their slots.
void CopyEngine::Queue::settle_failed(const Job& job) {
  staging_.drop_received();
  std::vector<StreamId> used;
  {
    const std::lock_guard lock(mutex_);
    for (const Piece& chunk : job.chunks) {
      const auto stream = streams_.find(chunk.lane);
      if (stream == streams_.end()) continue;
      if (std::ranges::find(used, stream->second) == used.end()) used.push_back(stream->second);
    }
  }
  try {
    for (const StreamId stream : used) {
      const EventId event = driver_->record_event(stream);
      try {
        driver_->wait_event(event);
      } catch (...) {
        driver_->destroy_event(event);
        throw;
      }
      driver_->destroy_event(event);
    }
  } catch (...) {
    try {
      driver_->synchronize();
    } catch (...) {  // a context for which waiting fails runs nothing any more
    }
  }
}

StreamId CopyEngine::Queue::stream_of(Lane lane) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = streams_.find(lane); found != streams_.end()) return found->second;
    if (streams_.empty()) return streams_[lane] = first_stream_;
  }
  // Only the thread that has set `working_` comes here, so no other makes the same stream.
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

struct CopyEngine::Queues {
  Queue to_device;
  Queue to_host;

  Queue& of(Direction direction) { return direction == Direction::kToDevice ? to_device : to_host; }
};

CopyEngine::CopyEngine(std::shared_ptr<GpuDriver> driver, std::shared_ptr<HostCopier> copier,
                       std::span<std::byte> staging, EngineOptions options)
    : queues_(make_queues(std::move(driver), std::move(copier), staging, options)) {}

std::unique_ptr<CopyEngine::Queues> CopyEngine::make_queues(
    const std::shared_ptr<GpuDriver>& driver, const std::shared_ptr<HostCopier>& copier,
    std::span<std::byte> staging, const EngineOptions& options) {
  if (options.chunk_bytes == 0 || options.limit_bytes == 0) {
    throw InvalidArgument("copy engine with chunks of " + format_bytes(options.chunk_bytes) +
                          " and a limit of " + format_bytes(options.limit_bytes) +
                          ": both must be positive");
  }
  for (const auto& [lane, rate] : options.rates) {
    if (!(rate > 0)) throw InvalidArgument("copy engine: a lane's rate must be positive");
  }
  const size_t half = staging.size() / 2;
  // This divides, because the size of four enormous chunks would overflow to a few bytes.
  if (!staging.empty() && half / 2 < options.chunk_bytes) {
    throw InvalidArgument("copy engine with staging of " + format_bytes(staging.size()) +
                          ": each direction needs two chunks of " +
                          format_bytes(options.chunk_bytes) + "; give four chunks or none");
  }
  return std::unique_ptr<Queues>(
      new Queues{{Direction::kToDevice, driver, copier, staging.first(half), options},
                 {Direction::kToHost, driver, copier, staging.subspan(half, half), options}});
}

CopyEngine::~CopyEngine() = default;

std::shared_ptr<CopyHandle> CopyEngine::submit(Direction direction, std::vector<Piece> pieces,
                                               const std::vector<StreamId>& after, bool may_wait) {
  return queues_.use("copy with an engine")
      .of(direction)
      .submit(std::move(pieces), after, may_wait);
}

void CopyEngine::drain() {
  Queues& queues = queues_.use("wait for an engine's copies");
  queues.to_device.drain();
  queues.to_host.drain();
}

std::map<Lane, LinkUse> CopyEngine::use(Direction direction) const {
  return queues_.use("ask a copy engine").of(direction).use();
}

size_t CopyEngine::unfinished_bytes(Direction direction) const {
  return queues_.use("ask a copy engine").of(direction).unfinished_bytes();
}

std::vector<StreamId> CopyEngine::streams() const {
  Queues& queues = queues_.use("ask a copy engine");
  std::vector<StreamId> all = queues.to_device.streams();
  const auto more = queues.to_host.streams();
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace cxl_offload::transfer
