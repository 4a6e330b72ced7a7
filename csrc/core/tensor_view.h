// A tensor of somebody else: where its elements are, what they are, how they lie. Owns nothing.
#ifndef CXL_OFFLOAD_CORE_TENSOR_VIEW_H_
#define CXL_OFFLOAD_CORE_TENSOR_VIEW_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cxl_offload {

// The 8-bit types are those of caches and weights that are only read: numbers (core/float8.h),
// whole numbers and codes.
enum class Dtype { kFloat32, kBfloat16, kFloat16, kFloat8E4m3, kFloat8E5m2, kInt8, kUint8 };

size_t dtype_bytes(Dtype dtype);
// Whether kernels write it: one of the first three.
bool is_written(Dtype dtype);
// "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"
std::string dtype_name(Dtype dtype);
// Throws InvalidArgument for a name that is none of these.
Dtype parse_dtype(const std::string& name);

struct TensorView {
  std::byte* data = nullptr;  // of the first element; aligned to one element
  Dtype dtype = Dtype::kFloat32;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements

  size_t numel() const;
  size_t bytes() const { return numel() * dtype_bytes(dtype); }
  // Row-major without gaps; lengths of 1 may have any stride.
  bool is_contiguous() const;
};

// Throws InvalidArgument for a negative length, as many strides as lengths not given, or an address
// that no element of this type can have.
TensorView make_view(uintptr_t address, Dtype dtype, std::vector<int64_t> shape,
                     std::vector<int64_t> strides);

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_TENSOR_VIEW_H_
