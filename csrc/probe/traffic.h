// Measures bandwidth with pinned threads that each go over their own slice of a buffer.
#ifndef CXL_OFFLOAD_PROBE_TRAFFIC_H_
#define CXL_OFFLOAD_PROBE_TRAFFIC_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "probe/chase.h"
#include "probe/stream.h"
#include "probe/team.h"

namespace cxl_offload::probe {

struct Traffic {
  Mix mix;
  Isa isa = Isa::kScalar;
  // What pure stores write. Not zero: see probe/random.h.
  uint64_t value = 0x9E3779B97F4A7C15u;
  // A pause after every burst of 64 lines of each stream.
  uint64_t delay_ns = 0;
  // Above 0: make this many whole passes over the slice, instead of running for a window of time.
  uint64_t passes = 0;
};

// The part of a buffer that one thread works on: mix.lines() streams of `lines` lines each,
// `stride_bytes` apart. Reads come first, the written stream last.
struct Slice {
  std::byte* base = nullptr;
  size_t stride_bytes = 0;
  size_t lines = 0;
};

struct ThreadTraffic {
  int cpu = -1;  // where the thread was found running at the end
  Slice slice;
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t sum = 0;  // the wrapping sum of all 64-bit words read inside the window
  double seconds = 0;
  // How long of that the thread ran. It is less when other work used the CPU.
  double cpu_seconds = 0;
};

struct LoadedResult {
  ChaseResult chase;
  std::vector<ThreadTraffic> traffic;
};

// Cuts the buffer into equal slices. Slices of large buffers leave a few lines out, so that their
// streams do not start at the same offset in a page. On many processors a load waits for an earlier
// store to the same offset in another page. Throws InvalidArgument for a buffer that is not aligned
// to lines or too small for a line of every stream.
std::vector<Slice> cut_slices(std::span<std::byte> buffer, const Mix& mix, size_t threads);

// One thread on each of `cpus`. The bytes are those of the program's own loads and stores.
std::vector<ThreadTraffic> run_traffic(std::span<std::byte> buffer, const Traffic& traffic,
                                       const std::vector<int>& cpus, const Window& window);

// Follows the links of `linked` on chaser_cpu while the traffic runs, in the same window.
LoadedResult run_loaded(std::span<const std::byte> linked, int chaser_cpu, size_t batch,
                        std::span<std::byte> buffer, const Traffic& traffic,
                        const std::vector<int>& cpus, const Window& window);

}  // namespace cxl_offload::probe

#endif  // CXL_OFFLOAD_PROBE_TRAFFIC_H_
