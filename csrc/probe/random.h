// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014): small, the
// same on every platform, and able to start anywhere in its sequence.
#ifndef CXL_OFFLOAD_PROBE_RANDOM_H_
#define CXL_OFFLOAD_PROBE_RANDOM_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace cxl_offload::probe {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  void skip(uint64_t words) { state_ += words * kStep; }
  uint64_t next() {
    state_ += kStep;
    uint64_t word = state_;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    return word ^ (word >> 31);
  }
  // With 64 bits the remainder's bias is below bound / 2^64.
  uint64_t below(uint64_t bound) { return next() % bound; }

 private:
  static constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;

  uint64_t state_;
};

// Writes random words, with one pinned thread for each CPU. The contents depend on the seed only.
// Call it before any measurement, because fresh pages are zero, and zeros are not like other data
// (on an AMD EPYC of family 26 non-temporal stores of zeros were measured twice as fast as of
// anything else; Downs, Hardware Store Elimination, 2020, has the like on Intel). Throws
// InvalidArgument for a buffer that is not made of whole 64-bit words at a multiple of 8.
void fill_random(std::span<std::byte> buffer, uint64_t seed, const std::vector<int>& cpus);

}  // namespace cxl_offload::probe

#endif  // CXL_OFFLOAD_PROBE_RANDOM_H_
