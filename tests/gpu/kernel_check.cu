// The CUDA kernels without Python around them: quick enough to run under compute-sanitizer.
//
//   kernel_check [--short]
//
// Every target is poisoned first and compared whole, so that bytes written beside a block show.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "transfer/packing.h"

extern "C" int cxl_offload_copy_blocks_to(const uint64_t*, const uint64_t*, size_t, size_t, bool,
                                          uint64_t);
extern "C" int cxl_offload_pack_blocks_to(int, int, size_t, bool, const uint64_t*, const uint64_t*,
                                          size_t, size_t, uint64_t);

namespace {

void must(cudaError_t result, const char* call, int line) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "line %d: %s: %s\n", line, call, cudaGetErrorString(result));
  std::exit(1);
}
#define MUST(call) must(static_cast<cudaError_t>(call), #call, __LINE__)

int failures = 0;
int checks = 0;

void expect_equal(const std::vector<uint8_t>& got, const std::vector<uint8_t>& wanted,
                  const char* what, size_t size, size_t count) {
  ++checks;
  if (got == wanted) return;
  ++failures;
  const auto at = std::mismatch(got.begin(), got.end(), wanted.begin()).first - got.begin();
  std::fprintf(stderr, "FAIL %s, size %zu, count %zu: differs at byte %td\n", what, size, count,
               at);
}

// Pinned host memory that the device can address.
template <typename T>
class Mapped {
 public:
  explicit Mapped(size_t count) : count_(count) {
    MUST(cudaHostAlloc(&data_, std::max<size_t>(count, 1) * sizeof(T), cudaHostAllocMapped));
  }
  ~Mapped() { cudaFreeHost(data_); }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
  T* data() { return data_; }
  T& operator[](size_t i) { return data_[i]; }
  std::vector<T> copy() const { return {data_, data_ + count_}; }

 private:
  T* data_ = nullptr;
  size_t count_;
};

template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values) : count_(values.size()) {
    MUST(cudaMalloc(&data_, std::max<size_t>(count_, 1) * sizeof(T)));
    MUST(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  T* data() { return data_; }
  std::vector<T> copy() const {
    std::vector<T> values(count_);
    MUST(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

std::vector<uint8_t> random_bytes(size_t count, std::mt19937_64& random) {
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

void check_block_copy(size_t block, size_t count, bool to_device) {
  std::mt19937_64 random(block * 131 + count);
  const size_t places = 2 * count + 1;
  const auto source = random_bytes(places * block, random);
  auto expected = random_bytes(places * block, random);
  std::vector<size_t> from(places), to(places);
  std::iota(from.begin(), from.end(), 0);
  std::iota(to.begin(), to.end(), 0);
  std::shuffle(from.begin(), from.end(), random);
  std::shuffle(to.begin(), to.end(), random);
  Mapped<uint8_t> host(places * block);
  std::memcpy(host.data(), to_device ? source.data() : expected.data(), places * block);
  OnDevice<uint8_t> device(to_device ? expected : source);
  uint8_t* const read = to_device ? host.data() : device.data();
  uint8_t* const written = to_device ? device.data() : host.data();
  Mapped<uint64_t> sources(count), targets(count);
  for (size_t i = 0; i < count; ++i) {
    sources[i] = reinterpret_cast<uint64_t>(read + from[i] * block);
    targets[i] = reinterpret_cast<uint64_t>(written + to[i] * block);
    std::copy_n(source.begin() + static_cast<ptrdiff_t>(from[i] * block), block,
                expected.begin() + static_cast<ptrdiff_t>(to[i] * block));
  }
  cudaStream_t stream;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  MUST(cxl_offload_copy_blocks_to(targets.data(), sources.data(), count, block, block % 16 == 0,
                                  reinterpret_cast<uint64_t>(stream)));
  MUST(cudaStreamSynchronize(stream));
  MUST(cudaStreamDestroy(stream));
  expect_equal(to_device ? device.copy() : host.copy(), expected,
               to_device ? "block copy to device" : "block copy to host", block, count);
}

// Half-precision numbers in device memory, packed blocks in mapped host memory.
void check_packing(cxl_offload::transfer::Code code, size_t group, size_t count) {
  constexpr size_t kBlocks = 3;
  const cxl_offload::transfer::Packing packing(code, cxl_offload::transfer::Element::kFloat16,
                                               group);
  std::mt19937_64 random(count + group);
  auto source = random_bytes(kBlocks * count * 2, random);
  // Clear the top bit of every exponent: no NaN, no infinity, 0 to 2 in size.
  for (size_t i = 1; i < source.size(); i += 2) source[i] &= 0xbf;
  const size_t packed = (packing.packed_bytes(count) + 15) / 16 * 16;
  std::vector<uint8_t> expected(kBlocks * packed, 0xee), back(source.size(), 0xee);
  Mapped<uint8_t> host(kBlocks * packed);
  std::memcpy(host.data(), expected.data(), expected.size());
  OnDevice<uint8_t> device(source), returned(back);
  Mapped<uint64_t> plain(kBlocks), codes(kBlocks), backs(kBlocks);
  for (size_t i = 0; i < kBlocks; ++i) {
    auto* const from = reinterpret_cast<std::byte*>(source.data() + i * count * 2);
    auto* const coded = reinterpret_cast<std::byte*>(expected.data() + i * packed);
    packing.pack(coded, from, count);
    packing.unpack(reinterpret_cast<std::byte*>(back.data() + i * count * 2), coded, count);
    plain[i] = reinterpret_cast<uint64_t>(device.data() + i * count * 2);
    codes[i] = reinterpret_cast<uint64_t>(host.data() + i * packed);
    backs[i] = reinterpret_cast<uint64_t>(returned.data() + i * count * 2);
  }
  const int kind = static_cast<int>(code);
  MUST(cxl_offload_pack_blocks_to(kind, 0, group, false, codes.data(), plain.data(), kBlocks, count,
                                  0));
  MUST(cudaDeviceSynchronize());
  expect_equal(host.copy(), expected, kind == 0 ? "pack int4" : "pack fp8", count, group);
  MUST(cxl_offload_pack_blocks_to(kind, 0, group, true, backs.data(), codes.data(), kBlocks, count,
                                  0));
  MUST(cudaDeviceSynchronize());
  expect_equal(returned.copy(), back, kind == 0 ? "unpack int4" : "unpack fp8", count, group);
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_short = argc > 1 && std::strcmp(argv[1], "--short") == 0;
  const std::vector<size_t> counts = is_short ? std::vector<size_t>{3} : std::vector<size_t>{1, 33};
  for (const size_t block : {1, 15, 16, 17, 4096, 4100, 32768, 32784, 100000, 1 << 20}) {
    if (is_short && block > 40000) continue;
    for (const size_t count : counts) {
      check_block_copy(block, count, true);
      check_block_copy(block, count, false);
    }
  }
  for (const auto code : {cxl_offload::transfer::Code::kInt4, cxl_offload::transfer::Code::kFp8}) {
    for (const size_t group : {32, 64, 128, 256}) {
      for (const size_t count : {1, 31, 1024, 1500, 100000}) {
        if (!is_short || count < 2000) check_packing(code, group, count);
      }
    }
  }
  std::printf("kernel_check: %d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
