// Replays the fuzz target of linear layers.
#include "check.h"
#include "fuzz_linear.cc"
#include "fuzz_replay.h"

namespace cxl_offload {
namespace {

TEST(generated_calls_of_linear_layers_follow_the_formula) {
  for (uint64_t seed = 1; seed <= 150; ++seed) replay_generated(seed, 96);
}

TEST(short_inputs_to_linear_layers_are_fine) {
  for (size_t bytes = 0; bytes < 12; ++bytes) {
    for (uint64_t seed = 1; seed <= 5; ++seed) replay_generated(seed, bytes);
  }
}

}  // namespace
}  // namespace cxl_offload
