#include "probe/traffic.h"

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <string>

#include "core/error.h"

namespace cxl_offload::probe {
namespace {

// How many lines of every stream lie between two readings of the clock. That is 64 KiB a stream,
// which takes a few microseconds at full speed and about a millisecond on memory of 100 MB/s.
constexpr size_t kBurstLines = 1024;
// With injected delays the bursts are short, so that the rate is smooth over the window.
constexpr size_t kDelayedBurstLines = 64;
constexpr size_t kPageLines = kBasePageBytes / kLineBytes;
// Streams of at least this many lines start at different offsets in a page.
constexpr size_t kShiftedLines = 4096;

// Goes over a slice again and again, a burst at a time.
class Walker {
 public:
  Walker(const Slice& slice, const Traffic& traffic)
      : slice_(slice),
        value_(traffic.value),
        burst_(traffic.delay_ns > 0 ? kDelayedBurstLines : kBurstLines),
        delay_(std::chrono::nanoseconds(traffic.delay_ns)),
        pass_(stream_pass(traffic.mix, traffic.isa)) {}

  // Returns the lines of each stream that it went over.
  size_t burst(uint64_t& sum) {
    const size_t lines = std::min(burst_, slice_.lines - at_);
    sum += pass_(slice_.base + at_ * kLineBytes, slice_.stride_bytes, lines, value_);
    at_ = at_ + lines == slice_.lines ? 0 : at_ + lines;
    return lines;
  }
  void pause() const {
    if (delay_.count() == 0) return;
    const auto until = Clock::now() + delay_;
    while (Clock::now() < until) {
    }
  }
  bool at_begin() const { return at_ == 0; }

 private:
  Slice slice_;
  uint64_t value_;
  size_t burst_;
  std::chrono::nanoseconds delay_;
  StreamPass pass_;
  size_t at_ = 0;
};

// Seconds that the calling thread has run.
double thread_cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

ThreadTraffic drive(const Slice& slice, const Traffic& traffic, Clock::time_point start,
                    const Window& window) {
  ThreadTraffic done;
  done.slice = slice;
  Walker walker(slice, traffic);
  const bool timed = traffic.passes == 0;
  const auto warm = start + from_seconds(timed ? window.warmup_s : 0);
  uint64_t unused = 0;
  while (timed && Clock::now() < warm) {
    walker.burst(unused);
    walker.pause();
  }
  const double cpu_begin = thread_cpu_seconds();
  const auto begin = Clock::now();
  const auto end = warm + from_seconds(window.seconds);
  uint64_t lines = 0;
  uint64_t passes = 0;
  bool more = true;
  while (more) {
    lines += walker.burst(done.sum);
    walker.pause();
    if (walker.at_begin()) ++passes;
    more = timed ? Clock::now() < end : passes < traffic.passes;
  }
  done.seconds = seconds_between(begin, Clock::now());
  done.cpu_seconds = thread_cpu_seconds() - cpu_begin;
  done.bytes_read = lines * kLineBytes * static_cast<uint64_t>(traffic.mix.reads);
  done.bytes_written = lines * kLineBytes * static_cast<uint64_t>(traffic.mix.writes);
  done.cpu = sched_getcpu();
  return done;
}

}  // namespace

std::vector<Slice> cut_slices(std::span<std::byte> buffer, const Mix& mix, size_t threads) {
  const bool aligned = reinterpret_cast<uintptr_t>(buffer.data()) % kLineBytes == 0;
  const auto streams = static_cast<size_t>(mix.lines());
  const size_t parts = threads * streams;
  size_t lines = parts == 0 ? 0 : buffer.size() / kLineBytes / parts;
  if (!aligned || lines == 0) {
    throw InvalidArgument("traffic of " + std::to_string(threads) + " threads with " +
                          std::to_string(streams) + " streams each over " +
                          format_bytes(buffer.size()) +
                          ": needs an address that is a multiple of 64 and 64 bytes a stream");
  }
  if (lines >= kShiftedLines && streams > 1) {
    // A length of whole pages and 3/8 of a page gives four streams four different offsets.
    lines = (lines - kPageLines) / kPageLines * kPageLines + kPageLines * 3 / 8;
  }
  std::vector<Slice> slices(threads);
  for (size_t i = 0; i < threads; ++i) {
    slices[i] = {buffer.data() + i * streams * lines * kLineBytes, lines * kLineBytes, lines};
  }
  return slices;
}

std::vector<ThreadTraffic> run_traffic(std::span<std::byte> buffer, const Traffic& traffic,
                                       const std::vector<int>& cpus, const Window& window) {
  check_window(window);
  stream_pass(traffic.mix, traffic.isa);  // refuses before any thread runs
  const auto slices = cut_slices(buffer, traffic.mix, cpus.size());
  std::vector<ThreadTraffic> done(cpus.size());
  run_team(cpus, [&](size_t i, Clock::time_point start) {
    done[i] = drive(slices[i], traffic, start, window);
  });
  return done;
}

LoadedResult run_loaded(std::span<const std::byte> linked, int chaser_cpu, size_t batch,
                        std::span<std::byte> buffer, const Traffic& traffic,
                        const std::vector<int>& cpus, const Window& window) {
  check_window(window);
  if (traffic.passes > 0) throw InvalidArgument("loaded latency is timed: give passes = 0");
  stream_pass(traffic.mix, traffic.isa);
  const auto slices = cut_slices(buffer, traffic.mix, cpus.size());
  std::vector<int> all = cpus;
  all.push_back(chaser_cpu);
  LoadedResult result;
  result.traffic.resize(cpus.size());
  run_team(all, [&](size_t i, Clock::time_point start) {
    if (i < cpus.size()) {
      result.traffic[i] = drive(slices[i], traffic, start, window);
    } else {
      result.chase = chase(linked.data(), batch, start, window);
    }
  });
  return result;
}

}  // namespace cxl_offload::probe
