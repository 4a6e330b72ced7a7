// Replays the fuzz target of optimizer updates.
#include "check.h"
#include "fuzz_replay.h"
#include "fuzz_updates.cc"

namespace cxl_offload {
namespace {

TEST(generated_updates_equal_the_scalar_loop) {
  for (uint64_t seed = 1; seed <= 400; ++seed) replay_generated(seed, 64);
}

TEST(short_inputs_to_updates_are_fine) {
  for (size_t bytes = 0; bytes < 12; ++bytes) {
    for (uint64_t seed = 1; seed <= 10; ++seed) replay_generated(seed, bytes);
  }
}

}  // namespace
}  // namespace cxl_offload
