#include "bindings/tensor_table.h"

#include <utility>

namespace cxl_offload::bindings {
namespace {

namespace py = pybind11;

constexpr int32_t kHostMemory = 1;  // kDLCPU
constexpr uint32_t kMajorVersion = 1;
constexpr const char* kCapsuleName = "dlpack_exchange_api";

// DLPack's DLPackExchangeAPI of this major version.
struct ExchangeTable {
  uint32_t major;
  uint32_t minor;
  void* before;
  void* allocate;
  void* from_object;
  void* to_object;
  int (*describe)(void* object, TableTensor* out);
  void* stream;
};

std::optional<Dtype> type_in(const TableTensor& tensor) {
  enum Code : uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kE4m3 = 10, kE5m2 = 12 };
  if (tensor.type_lanes != 1) return std::nullopt;
  const auto is = [&](Code code, uint8_t bits) {
    return tensor.type_code == code && tensor.type_bits == bits;
  };
  if (is(kFloat, 32)) return Dtype::kFloat32;
  if (is(kBfloat, 16)) return Dtype::kBfloat16;
  if (is(kFloat, 16)) return Dtype::kFloat16;
  if (is(kE4m3, 8)) return Dtype::kFloat8E4m3;
  if (is(kE5m2, 8)) return Dtype::kFloat8E5m2;
  if (is(kInt, 8)) return Dtype::kInt8;
  if (is(kUint, 8)) return Dtype::kUint8;
  return std::nullopt;
}

}  // namespace

TensorTable::TensorTable(py::handle capsule) {
  if (PyCapsule_IsValid(capsule.ptr(), kCapsuleName) == 0) return;
  const auto* table =
      static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), kCapsuleName));
  if (table->major == kMajorVersion) read_ = table->describe;
}

std::optional<TensorView> TensorTable::read(py::handle tensor) const {
  TableTensor found;
  if (read_(tensor.ptr(), &found) != 0) {  // as of tensors without memory
    PyErr_Clear();
    return std::nullopt;
  }
  const std::optional<Dtype> dtype = type_in(found);
  if (!dtype || found.device_type != kHostMemory) return std::nullopt;
  TensorView view{static_cast<std::byte*>(found.data) + found.byte_offset,
                  *dtype,
                  {found.shape, found.shape + found.dims},
                  {}};
  view.strides = row_major_strides(view.shape);
  if (view.numel() == 0) return view;
  for (size_t i = 0; i < view.shape.size(); ++i) {
    if (view.shape[i] != 1 && found.strides[i] != view.strides[i]) return std::nullopt;
  }
  return view;
}

}  // namespace cxl_offload::bindings
