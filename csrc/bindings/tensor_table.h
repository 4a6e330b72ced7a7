// What torch's table of C functions (DLPack's exchange API, which newer versions have) says of a
// tensor: in one call what takes six of its attributes.
#ifndef CXL_OFFLOAD_BINDINGS_TENSOR_TABLE_H_
#define CXL_OFFLOAD_BINDINGS_TENSOR_TABLE_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>

#include "core/tensor_view.h"

namespace cxl_offload::bindings {

// A tensor as DLPack describes it: its layout in memory is DLPack's DLTensor. The arrays are the
// tensor's own.
struct TableTensor {
  void* data = nullptr;
  int32_t device_type = 0;
  int32_t device_id = 0;
  int32_t dims = 0;
  uint8_t type_code = 0;
  uint8_t type_bits = 0;
  uint16_t type_lanes = 0;
  const int64_t* shape = nullptr;
  const int64_t* strides = nullptr;  // in elements
  uint64_t byte_offset = 0;
};

class TensorTable {
 public:
  // `capsule` is torch.Tensor's __dlpack_c_exchange_api__. Of any other object, and of a table of
  // another version, nothing is read.
  explicit TensorTable(pybind11::handle capsule);

  // Whether read() can say anything.
  bool is_there() const { return read_ != nullptr; }

  // Returns a view of a dense contiguous tensor in host memory, of a type that views have. Empty
  // for any other one. It says neither how long the storage is nor whether numbers are negated.
  std::optional<TensorView> read(pybind11::handle tensor) const;

 private:
  int (*read_)(void* object, TableTensor* out) = nullptr;
};

}  // namespace cxl_offload::bindings

#endif  // CXL_OFFLOAD_BINDINGS_TENSOR_TABLE_H_
