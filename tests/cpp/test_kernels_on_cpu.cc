// The CUDA kernels themselves, compiled for the CPU: which thread does what, the arithmetic, tails
// and addresses; not their speed. On a GPU tests/gpu/kernel_check.cu does the same.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "gpu/launch.h"
#include "transfer/packing.h"

// One library each under nvcc, so their local names would meet here.
namespace copies {
#include "gpu/block_copy.cu"
}
namespace packs {
#include "gpu/packing.cu"
}

namespace cxl_offload::transfer {
namespace {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(size_t count, std::mt19937_64& random) {
  Bytes bytes(count);
  for (std::byte& byte : bytes) byte = std::byte(random() & 255);
  return bytes;
}

std::vector<size_t> shuffled(size_t count, std::mt19937_64& random) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  return order;
}

uint64_t address(const std::byte* byte) { return reinterpret_cast<uint64_t>(byte); }

TEST(blocks_are_copied_whole_and_nothing_beside_them) {
  std::mt19937_64 random(1);
  for (const size_t block : {1, 16, 17, 4096, 32768, 32784, 70001}) {
    for (const size_t count : {1, 5}) {
      const size_t places = 2 * count;
      const Bytes source = random_bytes(places * block, random);
      Bytes target = random_bytes(places * block, random);
      Bytes expected = target;
      const auto from = shuffled(places, random), to = shuffled(places, random);
      std::vector<uint64_t> sources(count), targets(count);
      for (size_t i = 0; i < count; ++i) {
        sources[i] = address(source.data() + from[i] * block);
        targets[i] = address(target.data() + to[i] * block);
        std::memcpy(expected.data() + to[i] * block, source.data() + from[i] * block, block);
      }
      const bool aligned = block % 16 == 0;
      CHECK_EQ(copies::cxl_offload_copy_blocks_to(targets.data(), sources.data(), count, block,
                                                  aligned, 0),
               cudaSuccess);
      CHECK(target == expected);
    }
  }
}

TEST(no_blocks_and_empty_blocks_are_nothing_to_do) {
  CHECK_EQ(copies::cxl_offload_copy_blocks_to(nullptr, nullptr, 0, 4096, true, 0), cudaSuccess);
  CHECK_EQ(copies::cxl_offload_copy_blocks_to(nullptr, nullptr, 3, 0, true, 0), cudaSuccess);
  CHECK_EQ(packs::cxl_offload_pack_blocks_to(0, 0, 64, false, nullptr, nullptr, 0, 64, 0),
           cudaSuccess);
  CHECK_EQ(packs::cxl_offload_pack_blocks_to(0, 0, 48, false, nullptr, nullptr, 1, 64, 0),
           cudaErrorInvalidValue);
  CHECK_EQ(packs::cxl_offload_pack_blocks_to(2, 0, 64, false, nullptr, nullptr, 1, 64, 0),
           cudaErrorInvalidValue);
}

// Numbers of many magnitudes, among them what codes cannot hold.
Bytes numbers(Element element, size_t count, bool odd, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  const float inf = std::numeric_limits<float>::infinity();
  const float strange[] = {0, -0.0F, inf, -inf, std::nanf(""), 65504, -70000, 1e-8F, 3e38F};
  Bytes bytes(count * element_bytes(element));
  for (size_t i = 0; i < count; ++i) {
    float value = normal(random) * std::exp2(static_cast<float>(random() % 12) - 6);
    if (odd && random() % 40 == 0) value = strange[random() % std::size(strange)];
    if (i / 256 % 5 == 4) value = 1.5F;  // groups without a range
    std::byte* const to = bytes.data() + i * element_bytes(element);
    if (element == Element::kFloat16) {
      const auto half = static_cast<_Float16>(value);
      std::memcpy(to, &half, sizeof(half));
    } else if (element == Element::kBfloat16) {
      const __nv_bfloat16 half = __float2bfloat16_rn(value);
      std::memcpy(to, &half, sizeof(half));
    } else {
      std::memcpy(to, &value, sizeof(value));
    }
  }
  return bytes;
}

// Blocks of numbers, packed blocks after each other, and both again from the reference.
void check_packing(const Packing& packing, size_t count, bool odd, size_t misaligned) {
  std::mt19937_64 random(count * 31 + packing.group_elements());
  constexpr size_t kBlocks = 3;
  const size_t bytes = count * element_bytes(packing.element());
  const size_t packed = (packing.packed_bytes(count) + 15) / 16 * 16;
  Bytes source(kBlocks * bytes + misaligned);
  struct alignas(16) Sixteen {
    std::byte bytes[16];
  };
  std::vector<Sixteen> room(kBlocks * packed / 16);
  std::memset(room.data(), 0xee, room.size() * 16);
  auto* const coded = reinterpret_cast<std::byte*>(room.data());
  Bytes expected(kBlocks * packed, std::byte{0xee});
  Bytes back(kBlocks * bytes + misaligned, std::byte{0xee}), reference = back;
  std::vector<uint64_t> plain, codes, backs;
  for (size_t i = 0; i < kBlocks; ++i) {
    const Bytes block = numbers(packing.element(), count, odd, random);
    std::byte* const at = source.data() + misaligned + i * bytes;
    std::copy(block.begin(), block.end(), at);
    packing.pack(expected.data() + i * packed, at, count);
    packing.unpack(reference.data() + misaligned + i * bytes, expected.data() + i * packed, count);
    plain.push_back(address(at));
    codes.push_back(address(coded + i * packed));
    backs.push_back(address(back.data() + misaligned + i * bytes));
  }
  const int code = static_cast<int>(packing.code()), element = static_cast<int>(packing.element());
  CHECK_EQ(packs::cxl_offload_pack_blocks_to(code, element, packing.group_elements(), false,
                                             codes.data(), plain.data(), kBlocks, count, 0),
           cudaSuccess);
  CHECK(std::equal(expected.begin(), expected.end(), coded));
  CHECK_EQ(packs::cxl_offload_pack_blocks_to(code, element, packing.group_elements(), true,
                                             backs.data(), codes.data(), kBlocks, count, 0),
           cudaSuccess);
  CHECK_EQ(back.size(), reference.size());
  const auto same = [&](size_t i) {
    const std::byte *const a = back.data() + i, *const b = reference.data() + i;
    if (packing.element() == Element::kFloat32) {
      float x, y;
      std::memcpy(&x, a, 4);
      std::memcpy(&y, b, 4);
      return std::memcmp(a, b, 4) == 0 || (std::isnan(x) && std::isnan(y));
    }
    uint16_t x, y;
    std::memcpy(&x, a, 2);
    std::memcpy(&y, b, 2);
    const unsigned infinite = packing.element() == Element::kFloat16 ? 0x7c00 : 0x7f80;
    return x == y || ((x & 0x7fff) > infinite && (y & 0x7fff) > infinite);
  };
  for (size_t i = misaligned; i < back.size(); i += element_bytes(packing.element())) {
    CHECK(same(i));
  }
  for (size_t i = 0; i < misaligned; ++i) CHECK(back[i] == std::byte{0xee});
}

TEST(packing_gives_the_bits_of_the_reference) {
  for (const Code code : {Code::kInt4, Code::kFp8}) {
    for (const Element element : {Element::kFloat16, Element::kBfloat16, Element::kFloat32}) {
      for (const size_t group : {32, 64, 256}) {
        for (const size_t count : {1, 65, 1024, 1500}) {
          check_packing(Packing(code, element, group), count, false, 0);
        }
      }
    }
  }
}

TEST(packing_of_odd_values_and_addresses_gives_the_bits_of_the_reference) {
  for (const Code code : {Code::kInt4, Code::kFp8}) {
    for (const Element element : {Element::kFloat16, Element::kBfloat16, Element::kFloat32}) {
      check_packing(Packing(code, element, 128), 1000, true, 0);
      check_packing(Packing(code, element, 64), 777, true, element_bytes(element));
    }
  }
}

}  // namespace
}  // namespace cxl_offload::transfer
