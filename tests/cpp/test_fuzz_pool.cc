// Replays the fuzz target without libFuzzer, over inputs that depend on their number alone.
#include <random>

#include "check.h"
#include "fuzz_pool.cc"

namespace cxl_offload {
namespace {

void replay(uint64_t seed, uint8_t kind, size_t bytes) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> data(bytes);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random() >> 32);
  data[0] = kind;
  try {
    LLVMFuzzerTestOneInput(data.data(), data.size());
  } catch (const std::exception& error) {
    throw std::runtime_error("input " + std::to_string(seed) + ": " + error.what());
  }
}

TEST(generated_inputs_to_a_pool_equal_its_model) {
  for (uint64_t seed = 1; seed <= 400; ++seed) replay(seed, 0, 1 + seed * 3);
}

TEST(generated_inputs_to_a_session_equal_its_model) {
  for (uint64_t seed = 1; seed <= 400; ++seed) replay(seed, 1, 1 + seed * 2);
}

TEST(inputs_of_no_and_few_bytes_are_fine) {
  for (size_t bytes = 1; bytes < 12; ++bytes) {
    for (uint64_t seed = 1; seed <= 40; ++seed) replay(seed, static_cast<uint8_t>(seed), bytes);
  }
}

}  // namespace
}  // namespace cxl_offload
