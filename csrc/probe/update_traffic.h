// The traffic of an optimizer update without its arithmetic. No such update can be faster on this
// memory.
#ifndef CXL_OFFLOAD_PROBE_UPDATE_TRAFFIC_H_
#define CXL_OFFLOAD_PROBE_UPDATE_TRAFFIC_H_

#include <cstddef>
#include <vector>

#include "core/cpu_features.h"

namespace cxl_offload::probe {

// Every block of a stream is `lines` whole lines. They are read, and written back when `written`.
struct TrafficStream {
  std::byte* base = nullptr;
  size_t lines = 1;  // 1 or 2
  bool written = false;
};

// Goes once over `blocks` blocks of all streams side by side. The blocks are cut into one
// contiguous part for every CPU, and a thread pinned to it does that part. A written line is XORed
// with the lines of its block that were read so far from streams that are not written. Returns the
// seconds from the common start to the end of the last thread. `ahead_bytes` is the distance of
// software prefetch, 0 for none. Throws InvalidArgument for no stream, more than 8, other counts of
// lines, or a base that is not aligned to lines.
double update_traffic(const std::vector<TrafficStream>& streams, size_t blocks,
                      const std::vector<int>& cpus, size_t ahead_bytes, Isa isa);

}  // namespace cxl_offload::probe

#endif  // CXL_OFFLOAD_PROBE_UPDATE_TRAFFIC_H_
