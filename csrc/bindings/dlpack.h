// The DLPack interchange structures, version 1.1 (https://dmlc.github.io/dlpack), as far as a
// one-dimensional array of bytes in host memory needs them.
#ifndef CXL_OFFLOAD_BINDINGS_DLPACK_H_
#define CXL_OFFLOAD_BINDINGS_DLPACK_H_

#include <cstdint>

namespace cxl_offload::bindings::dlpack {

inline constexpr int32_t kHostDevice = 1;  // kDLCPU
inline constexpr uint8_t kUnsigned = 1;    // kDLUInt
inline constexpr uint32_t kMajorVersion = 1;
inline constexpr uint32_t kMinorVersion = 1;

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// What capsules named "dltensor" hold.
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct Version {
  uint32_t major;
  uint32_t minor;
};

// What capsules named "dltensor_versioned" hold.
struct VersionedTensor {
  Version version;
  void* context;
  void (*deleter)(VersionedTensor*);
  uint64_t flags;
  Tensor tensor;
};

}  // namespace cxl_offload::bindings::dlpack

#endif  // CXL_OFFLOAD_BINDINGS_DLPACK_H_
