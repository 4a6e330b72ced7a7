// Replays the fuzz target of packing and conversions.
#include "check.h"
#include "fuzz_packing.cc"
#include "fuzz_replay.h"

namespace cxl_offload {
namespace {

TEST(generated_numbers_are_packed_and_converted) {
  for (uint64_t seed = 1; seed <= 400; ++seed) replay_generated(seed, 64);
}

TEST(short_inputs_to_packing_are_fine) {
  for (size_t bytes = 0; bytes < 12; ++bytes) {
    for (uint64_t seed = 1; seed <= 5; ++seed) replay_generated(seed, bytes);
  }
}

}  // namespace
}  // namespace cxl_offload
