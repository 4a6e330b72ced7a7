// Owns one mapping of the kernel seam, which is watched for memory failures while it is there.
#ifndef CXL_OFFLOAD_MEMORY_MAPPING_H_
#define CXL_OFFLOAD_MEMORY_MAPPING_H_

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "os/kernel.h"

namespace cxl_offload::memory {

class Mapping {
 public:
  Mapping(std::shared_ptr<os::Kernel> kernel, size_t bytes, size_t alignment, os::PageKind kind);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::span<std::byte> range() const { return {address_, bytes_}; }
  // Returns whole pages early; they must not be touched again.
  void release(size_t offset, size_t bytes);

 private:
  void unmap(size_t offset, size_t bytes) noexcept;

  std::shared_ptr<os::Kernel> kernel_;
  size_t bytes_;
  std::byte* address_;
  std::vector<std::pair<size_t, size_t>> released_;  // [begin, end), sorted, not touching
};

}  // namespace cxl_offload::memory

#endif  // CXL_OFFLOAD_MEMORY_MAPPING_H_
