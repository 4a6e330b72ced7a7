// Measures latency by a chain of loads, each of which must finish before the next can begin.
#ifndef CXL_OFFLOAD_PROBE_CHASE_H_
#define CXL_OFFLOAD_PROBE_CHASE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "probe/team.h"

namespace cxl_offload::probe {

// Writes into the first word of every line the address of the next line of one cycle that visits
// all lines in random order, so that no prefetcher can guess it. Needs 4 bytes of other memory for
// each line while it works. Throws InvalidArgument for a buffer that is not made of whole lines,
// or of fewer than two.
void link_cycle(std::span<std::byte> buffer, uint64_t seed);

// Follows `steps` links and returns the last address.
const std::byte* follow(const std::byte* from, size_t steps);

struct ChaseResult {
  std::vector<double> ns_per_load;  // one mean for every batch of loads
  uint64_t loads = 0;
};

// Follows links from `start` on the calling thread: untimed during the warm-up, then in batches of
// `batch` loads until the window is over. It times at least one batch.
ChaseResult chase(const std::byte* from, size_t batch, Clock::time_point start,
                  const Window& window);

// Does the same over a linked buffer, on a thread of its own that is pinned to `cpu`, without other
// load.
ChaseResult idle_latency(std::span<const std::byte> linked, int cpu, size_t batch,
                         const Window& window);

}  // namespace cxl_offload::probe

#endif  // CXL_OFFLOAD_PROBE_CHASE_H_
