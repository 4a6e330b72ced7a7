// Sequential traffic: the inner loops of the bandwidth probe.
#ifndef CXL_OFFLOAD_PROBE_STREAM_H_
#define CXL_OFFLOAD_PROBE_STREAM_H_

#include <cstddef>
#include <cstdint>

#include "core/cpu_features.h"
#include "core/sizes.h"

namespace cxl_offload::probe {

inline constexpr size_t kLineWords = kLineBytes / sizeof(uint64_t);

// Lines read for every line written, e.g. 2:1. Loads are 1:0, stores 0:1, a copy is 1:1.
struct Mix {
  int reads = 1;   // 0 to 3
  int writes = 0;  // 0 or 1
  // Stores that go past the caches. A cached store first reads its line, so that the memory sees
  // one more read than the program makes; these do not.
  bool non_temporal = false;

  int lines() const { return reads + writes; }
  bool operator==(const Mix&) const = default;
};

// Goes once over `lines` lines of every stream: stream k begins at base + k * stride_bytes, the
// read ones first, the written one last. With reads, what is written is the sum of the lines read,
// word by word (64 bits, wrapping): a copy for 1:1; without reads every word becomes `value`.
// Returns the sum of all words read. `base` and `stride_bytes` are multiples of kLineBytes. Stores
// are globally visible on return.
using StreamPass = uint64_t (*)(std::byte* base, size_t stride_bytes, size_t lines, uint64_t value);

// Whether this architecture's build has non-temporal stores.
bool has_non_temporal_stores();
// Throws InvalidArgument for a mix that is not listed above, or an absent kind of store.
StreamPass stream_pass(const Mix& mix, Isa isa);

}  // namespace cxl_offload::probe

#endif  // CXL_OFFLOAD_PROBE_STREAM_H_
