// Arrays for fuzzing kernels: of exactly their size, so that the address sanitizer sees an access
// beyond the end, at any offset of elements from a page, behind bytes that must stay as they are.
#ifndef CXL_OFFLOAD_TESTS_FUZZ_ARRAYS_H_
#define CXL_OFFLOAD_TESTS_FUZZ_ARRAYS_H_

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <utility>

#include "core/float8.h"
#include "core/half.h"
#include "core/tensor_view.h"
#include "fuzz_input.h"
#include "kernels/worker_team.h"

namespace cxl_offload::kernels {

// Random enough, and fast enough for megabytes of it an input.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state_(seed * 2 + 1) {}

  uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  // Between -1 and 1.
  float unit() {
    return static_cast<float>(static_cast<int64_t>(next() >> 40) - (1 << 23)) * 0x1p-23f;
  }

 private:
  uint64_t state_;
};

// What an array is filled with.
enum class Filling { kUnit, kWide, kTiny, kAnyBits };

class GuardedArray {
 public:
  GuardedArray(Dtype dtype, size_t count, size_t offset)
      : dtype_(dtype),
        guard_(offset * dtype_bytes(dtype)),
        bytes_(count * dtype_bytes(dtype)),
        all_(static_cast<std::byte*>(::operator new(guard_ + bytes_, kAlignment))) {
    std::memset(all_.get(), kGuard, guard_);
  }
  GuardedArray(const GuardedArray& other)
      : GuardedArray(other.dtype_, other.count(), other.guard_ / dtype_bytes(other.dtype_)) {
    if (bytes_ > 0) std::memcpy(data(), other.data(), bytes_);
  }
  // The same numbers, elsewhere.
  GuardedArray(const GuardedArray& other, size_t offset)
      : GuardedArray(other.dtype_, other.count(), offset) {
    if (bytes_ > 0) std::memcpy(data(), other.data(), bytes_);
  }
  GuardedArray(GuardedArray&&) = default;

  void fill(Filling filling, bool positive, Numbers& numbers) {
    for (size_t i = 0; i < count(); ++i) put(i, number(filling, positive, numbers));
    if (filling != Filling::kAnyBits) return;
    for (size_t i = 0; i < bytes_; ++i) data()[i] = static_cast<std::byte>(numbers.next() >> 56);
  }
  void put(size_t index, float value) {
    std::byte* at = data() + index * dtype_bytes(dtype_);
    const auto write = [at](auto number) { std::memcpy(at, &number, sizeof number); };
    if (dtype_ == Dtype::kFloat32) write(value);
    if (dtype_ == Dtype::kBfloat16) write(to_bf16(value));
    if (dtype_ == Dtype::kFloat16) write(to_f16(value));
    if (dtype_bytes(dtype_) == 1) write(static_cast<uint8_t>(std::bit_cast<uint32_t>(value) >> 16));
  }

  std::byte* data() { return all_.get() + guard_; }
  const std::byte* data() const { return all_.get() + guard_; }
  size_t count() const { return bytes_ / dtype_bytes(dtype_); }
  size_t bytes() const { return bytes_; }
  Dtype dtype() const { return dtype_; }
  TensorView view() {
    return make_view(reinterpret_cast<uintptr_t>(data()), dtype_, {static_cast<int64_t>(count())},
                     {1});
  }
  bool guard_is_whole() const {
    return std::all_of(all_.get(), all_.get() + guard_,
                       [](std::byte each) { return each == static_cast<std::byte>(kGuard); });
  }
  bool same_bytes(const GuardedArray& other) const {
    return bytes_ == other.bytes_ &&
           (bytes_ == 0 || std::memcmp(data(), other.data(), bytes_) == 0);
  }

 private:
  static constexpr std::align_val_t kAlignment{4096};
  static constexpr int kGuard = 0xa5;
  struct Free {
    void operator()(std::byte* at) const { ::operator delete(at, kAlignment); }
  };

  static float number(Filling filling, bool positive, Numbers& numbers) {
    const float unit = numbers.unit();
    const float value = positive ? std::abs(unit) : unit;
    if (filling == Filling::kTiny) return value * 1e-38f;
    if (filling == Filling::kUnit) return value;
    return std::ldexp(value, static_cast<int>(numbers.next() >> 58) - 32);
  }

  Dtype dtype_;
  size_t guard_;
  size_t bytes_;
  std::unique_ptr<std::byte, Free> all_;
};

// Element `index` of an array of any type but codes.
inline double number_at(const std::byte* data, Dtype dtype, int64_t index) {
  const std::byte* at = data + index * static_cast<int64_t>(dtype_bytes(dtype));
  const auto read = [at](auto number) {
    std::memcpy(&number, at, sizeof number);
    return static_cast<double>(to_float(number));
  };
  if (dtype == Dtype::kFloat32) return read(0.0f);
  if (dtype == Dtype::kBfloat16) return read(Bf16{});
  if (dtype == Dtype::kFloat16) return read(F16{});
  if (dtype == Dtype::kInt8) return std::to_integer<int8_t>(*at);
  return dtype == Dtype::kFloat8E4m3 ? read(E4m3{}) : read(E5m2{});
}

// Teams are kept: their threads would take longer to start than an input takes to run.
inline WorkerTeam& team_of(const std::vector<size_t>& groups) {
  static std::map<std::vector<size_t>, std::unique_ptr<WorkerTeam>> teams;
  std::unique_ptr<WorkerTeam>& team = teams[groups];
  if (team == nullptr) {
    std::vector<WorkerGroup> made;
    for (size_t threads : groups) {
      made.push_back({groups.size() == 1 ? -1 : static_cast<int>(made.size()), threads, {}});
    }
    team = std::make_unique<WorkerTeam>(std::move(made));
  }
  return *team;
}

inline WorkerTeam& any_team(Input& input) {
  static const std::vector<std::vector<size_t>> kTeams = {{1}, {2}, {3}, {5}, {1, 1}, {2, 1, 1}};
  return team_of(input.any_of(kTeams));
}

// While it lives, the calling thread takes subnormal numbers for zero, as under
// torch.set_flush_denormal(True), if it is asked for.
class FlushedDenormals {
 public:
  explicit FlushedDenormals(bool flush) {
#if defined(__x86_64__)
    before_ = _mm_getcsr();
    if (flush) _mm_setcsr(before_ | 0x8040);
#else
    static_cast<void>(flush);
#endif
  }
  ~FlushedDenormals() {
#if defined(__x86_64__)
    _mm_setcsr(before_);
#endif
  }
  FlushedDenormals(const FlushedDenormals&) = delete;
  FlushedDenormals& operator=(const FlushedDenormals&) = delete;

 private:
  unsigned before_ = 0;
};

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_TESTS_FUZZ_ARRAYS_H_
