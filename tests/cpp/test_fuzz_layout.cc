// Replays the fuzz target of layouts.
#include "check.h"
#include "fuzz_layout.cc"
#include "fuzz_replay.h"

namespace cxl_offload {
namespace {

TEST(generated_layouts_follow_the_definitions) {
  for (uint64_t seed = 1; seed <= 4000; ++seed) replay_generated(seed, 1 + seed % 120);
}

TEST(short_inputs_to_layouts_are_fine) {
  for (size_t bytes = 0; bytes < 12; ++bytes) {
    for (uint64_t seed = 1; seed <= 40; ++seed) replay_generated(seed, bytes);
  }
}

}  // namespace
}  // namespace cxl_offload
