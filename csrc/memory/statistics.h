// What a pool holds and has held, as plain values: a session adds those of its pools.
#ifndef CXL_OFFLOAD_MEMORY_STATISTICS_H_
#define CXL_OFFLOAD_MEMORY_STATISTICS_H_

#include <cstdint>

namespace cxl_offload::memory {

// A level that rises and falls.
struct Gauge {
  uint64_t current = 0;
  uint64_t peak = 0;   // the highest level so far
  uint64_t total = 0;  // the sum of all rises

  void add(uint64_t amount);
  void subtract(uint64_t amount) { current -= amount; }
  void set(uint64_t level);
  // Currents and totals add up. Peaks are added too, which gives an upper bound, because the peaks
  // of two pools need not have been at the same time.
  Gauge& operator+=(const Gauge& other);
  bool operator==(const Gauge&) const = default;
};

struct Tally {
  Gauge bytes;
  Gauge count;

  void add(uint64_t amount);
  void subtract(uint64_t amount);
  Tally& operator+=(const Tally& other);
  bool operator==(const Tally&) const = default;
};

// At any time mapped = held + waiting + cached + lost, in bytes.
struct Statistics {
  Tally asked;    // live allocations, in the bytes their owners asked for
  Tally held;     // the same allocations, in the bytes their blocks occupy
  Tally waiting;  // freed blocks that a GPU may still be using
  Tally cached;   // free for the next allocation; counted in free extents
  Tally lost;     // moved off their rule and not yet returned; they go with their region
  Tally mapped;   // regions

  uint64_t reuses = 0;            // allocations served from the cache
  uint64_t growths = 0;           // allocations that needed a new region
  uint64_t synchronizations = 0;  // waits for all work of the GPU
  uint64_t event_waits = 0;       // waits for one block's events

  Statistics& operator+=(const Statistics& other);
  // The statistics of a pool that holds nothing any more.
  Statistics past() const;
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_STATISTICS_H_
