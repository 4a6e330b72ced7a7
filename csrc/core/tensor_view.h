// A tensor that somebody else owns: where its elements are, of which type, and with which strides.
#ifndef CXL_OFFLOAD_CORE_TENSOR_VIEW_H_
#define CXL_OFFLOAD_CORE_TENSOR_VIEW_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cxl_offload {

// The types of 8 bits are floating-point numbers (core/float8.h), whole numbers and codes. Kernels
// only read them, in caches and weights.
enum class Dtype { kFloat32, kBfloat16, kFloat16, kFloat8E4m3, kFloat8E5m2, kInt8, kUint8 };

size_t dtype_bytes(Dtype dtype);
// Whether kernels write numbers of this type. They write the first three.
bool is_written(Dtype dtype);
// "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"
std::string dtype_name(Dtype dtype);
// Throws InvalidArgument for any other name.
Dtype parse_dtype(const std::string& name);

struct TensorView {
  std::byte* data = nullptr;  // the first element, aligned to one element
  Dtype dtype = Dtype::kFloat32;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements

  size_t numel() const;
  size_t bytes() const { return numel() * dtype_bytes(dtype); }
  // Row-major without gaps; lengths of 1 may have any stride.
  bool is_contiguous() const;
};

// Returns the strides of a contiguous view of this shape; an empty one has those of lengths of 1.
std::vector<int64_t> row_major_strides(const std::vector<int64_t>& shape);

// "float32 (2, 64)"
std::string type_and_shape(const TensorView& view);

// Throws InvalidArgument for a negative length, for another number of strides than of lengths, or
// for an address that no element of this type can have.
TensorView make_view(uintptr_t address, Dtype dtype, std::vector<int64_t> shape,
                     std::vector<int64_t> strides);

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_TENSOR_VIEW_H_
