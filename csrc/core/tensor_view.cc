#include "core/tensor_view.h"

#include <algorithm>

#include "core/error.h"

namespace cxl_offload {

namespace {

constexpr Dtype kDtypes[] = {Dtype::kFloat32,    Dtype::kBfloat16,   Dtype::kFloat16,
                             Dtype::kFloat8E4m3, Dtype::kFloat8E5m2, Dtype::kInt8,
                             Dtype::kUint8};

}  // namespace

size_t dtype_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return 4;
    case Dtype::kBfloat16:
    case Dtype::kFloat16:
      return 2;
    case Dtype::kFloat8E4m3:
    case Dtype::kFloat8E5m2:
    case Dtype::kInt8:
    case Dtype::kUint8:
      break;
  }
  return 1;
}

bool is_written(Dtype dtype) { return dtype_bytes(dtype) > 1; }

std::string dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return "float32";
    case Dtype::kBfloat16:
      return "bfloat16";
    case Dtype::kFloat16:
      return "float16";
    case Dtype::kFloat8E4m3:
      return "float8_e4m3fn";
    case Dtype::kFloat8E5m2:
      return "float8_e5m2";
    case Dtype::kInt8:
      return "int8";
    case Dtype::kUint8:
      return "uint8";
  }
  return "unknown";
}

Dtype parse_dtype(const std::string& name) {
  std::string known;
  for (Dtype dtype : kDtypes) {
    if (dtype_name(dtype) == name) return dtype;
    known += (known.empty() ? "" : ", ") + dtype_name(dtype);
  }
  throw InvalidArgument("dtype '" + name + "' has no kernel; known are " + known);
}

size_t TensorView::numel() const {
  size_t count = 1;
  for (int64_t length : shape) count *= static_cast<size_t>(length);
  return count;
}

bool TensorView::is_contiguous() const {
  if (numel() == 0) return true;
  int64_t expected = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

std::vector<int64_t> row_major_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t next = 1;
  for (size_t i = shape.size(); i-- > 0; next *= std::max<int64_t>(shape[i], 1)) strides[i] = next;
  return strides;
}

std::string type_and_shape(const TensorView& view) {
  std::string joined;
  for (int64_t length : view.shape) joined += (joined.empty() ? "" : ", ") + std::to_string(length);
  return dtype_name(view.dtype) + " (" + joined + ")";
}

TensorView make_view(uintptr_t address, Dtype dtype, std::vector<int64_t> shape,
                     std::vector<int64_t> strides) {
  if (shape.size() != strides.size()) {
    throw InvalidArgument("a view of " + std::to_string(shape.size()) + " lengths and " +
                          std::to_string(strides.size()) + " strides; give one stride a length");
  }
  if (std::ranges::any_of(shape, [](int64_t length) { return length < 0; })) {
    throw InvalidArgument("a view with a negative length");
  }
  if (address % dtype_bytes(dtype) != 0) {
    throw InvalidArgument("a view of " + dtype_name(dtype) + " at address " +
                          std::to_string(address) + ", which is not a multiple of " +
                          std::to_string(dtype_bytes(dtype)) + " bytes; copy it into a new tensor");
  }
  return {reinterpret_cast<std::byte*>(address), dtype, std::move(shape), std::move(strides)};
}

}  // namespace cxl_offload
