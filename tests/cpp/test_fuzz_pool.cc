// Replays the fuzz target without libFuzzer, over inputs that depend on their number alone.
#include "check.h"
#include "fuzz_pool.cc"
#include "fuzz_replay.h"

namespace cxl_offload {
namespace {

void replay_kind(uint64_t seed, uint8_t kind, size_t bytes) {
  std::vector<uint8_t> data = generated_input(seed, bytes);
  data[0] = kind;
  replay(std::move(data), std::to_string(seed));
}

TEST(generated_inputs_to_a_pool_equal_its_model) {
  for (uint64_t seed = 1; seed <= 400; ++seed) replay_kind(seed, 0, 1 + seed * 3);
}

TEST(generated_inputs_to_a_session_equal_its_model) {
  for (uint64_t seed = 1; seed <= 400; ++seed) replay_kind(seed, 1, 1 + seed * 2);
}

TEST(inputs_of_no_and_few_bytes_are_fine) {
  for (size_t bytes = 1; bytes < 12; ++bytes) {
    for (uint64_t seed = 1; seed <= 40; ++seed)
      replay_kind(seed, static_cast<uint8_t>(seed), bytes);
  }
}

}  // namespace
}  // namespace cxl_offload
