// What every fuzz target has in common. Bytes become decisions; anything wrong ends in an
// exception, and libFuzzer keeps the input.
#ifndef CXL_OFFLOAD_TESTS_FUZZ_INPUT_H_
#define CXL_OFFLOAD_TESTS_FUZZ_INPUT_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace cxl_offload {

inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error("fuzz: " + what);
}

// Takes its decisions from the input, and zeros when that is used up.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), left_(size) {}

  bool empty() const { return left_ == 0; }
  size_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  size_t below(size_t count) { return byte() % count; }
  bool one_in(size_t count) { return byte() % count == 1; }
  template <class T>
  T any_of(const std::vector<T>& choices) {
    return choices[below(choices.size())];
  }
  // Every order of magnitude up to `most` alike, with all low bits.
  size_t size(size_t most) {
    const size_t bits = byte() % 40;
    const size_t value = (byte() << 16 | byte() << 8 | byte()) | size_t{1} << 24;
    return 1 + (bits < 24 ? value >> (24 - bits) : value << (bits - 24)) % most;
  }
  uint64_t number() {
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return value;
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

}  // namespace cxl_offload

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // CXL_OFFLOAD_TESTS_FUZZ_INPUT_H_
