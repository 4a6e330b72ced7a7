// Replays a fuzz target without libFuzzer, over inputs that depend on their number alone.
#ifndef CXL_OFFLOAD_TESTS_FUZZ_REPLAY_H_
#define CXL_OFFLOAD_TESTS_FUZZ_REPLAY_H_

#include <exception>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "fuzz_input.h"

namespace cxl_offload {

inline void replay(std::vector<uint8_t> data, const std::string& name) {
  try {
    LLVMFuzzerTestOneInput(data.data(), data.size());
  } catch (const std::exception& error) {
    throw std::runtime_error("input " + name + ": " + error.what());
  }
}

inline std::vector<uint8_t> generated_input(uint64_t seed, size_t bytes) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> data(bytes);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random() >> 32);
  return data;
}

inline void replay_generated(uint64_t seed, size_t bytes) {
  replay(generated_input(seed, bytes), std::to_string(seed));
}

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_TESTS_FUZZ_REPLAY_H_
