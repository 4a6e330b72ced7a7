// Packs numbers as 4-bit or 8-bit codes in groups, so that fewer bytes cross a link.
//
// A packed block holds `count` numbers, cut into groups of `group_elements` consecutive ones, the
// last of which may be short:
//
//   codes   group_elements / 2 bytes (int4) or group_elements bytes (fp8) for every group
//   scales  4 bytes for every group
//
// Int4: the scales are two half-precision numbers, the least value `low` and the `step`; a code is
// round((x - low) / step), 0 to 15. The first of two numbers is in the upper half of its byte.
// Codes hold no NaN or infinity. If a group has one, or if its low or step is beyond half
// precision, all of the group comes back as NaN, so that the fault is not hidden.
//
// Fp8: the scale is one single-precision number, the largest finite magnitude / 448; a code is
// x / scale in E4M3 (finite and NaN, "e4m3fn"), rounded to nearest even. NaN and infinity come back
// as NaN.
//
// This is the packing on the CPU. It is also the reference for the CUDA kernels (gpu/packing.cu),
// which give the same bits.
#ifndef CXL_OFFLOAD_TRANSFER_PACKING_H_
#define CXL_OFFLOAD_TRANSFER_PACKING_H_

#include <cstddef>
#include <cstdint>

namespace cxl_offload::transfer {

enum class Code { kInt4 = 0, kFp8 = 1 };
enum class Element { kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2 };

size_t element_bytes(Element element);

class Packing {
 public:
  // Throws InvalidArgument unless `group_elements` is 32, 64, 128 or 256.
  Packing(Code code, Element element, size_t group_elements);

  Code code() const { return code_; }
  Element element() const { return element_; }
  size_t group_elements() const { return group_elements_; }

  size_t groups(size_t count) const;
  // Where the scales begin; a multiple of 16.
  size_t code_bytes(size_t count) const;
  size_t packed_bytes(size_t count) const;

  // Codes of a short last group beyond its numbers are zero.
  void pack(std::byte* target, const std::byte* source, size_t count) const;
  void unpack(std::byte* target, const std::byte* source, size_t count) const;

 private:
  Code code_;
  Element element_;
  size_t group_elements_;
};

}  // namespace cxl_offload::transfer

#endif  // CXL_OFFLOAD_TRANSFER_PACKING_H_
