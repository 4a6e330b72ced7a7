// A Device-DAX device: memory that belongs to no node, mapped from a file such as /dev/dax0.0.
#ifndef CXL_OFFLOAD_OS_DAX_DEVICE_H_
#define CXL_OFFLOAD_OS_DAX_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace cxl_offload::os {

// A part of a device.
struct DaxPiece {
  size_t offset = 0;
  size_t bytes = 0;
};

// Holds the claim on the device while it lives. A mapping may outlive it, until the process ends.
// Thread-safe.
class DaxDevice {
 public:
  virtual ~DaxDevice() = default;

  virtual const std::string& name() const = 0;
  virtual size_t size_bytes() const = 0;  // a multiple of align_bytes
  virtual size_t align_bytes() const = 0;
  // Maps the pieces one after the other into one range and faults all pages in. Offsets, sizes and
  // the address are multiples of the alignment. The range holds the bytes that were last written
  // there. Forked children share it. Throws OutOfMemory (no address space) or SystemError; on throw
  // nothing is left.
  virtual std::byte* map(std::span<const DaxPiece> pieces) = 0;
  virtual void unmap(std::span<std::byte> range) noexcept = 0;
};

// "dax" DIGITS "." DIGITS.
bool is_dax_name(const std::string& name);

// Maps pieces of an open file. Both implementations use it.
std::byte* map_dax_file(int file, const std::string& name, std::span<const DaxPiece> pieces,
                        size_t align_bytes, bool populated);

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_DAX_DEVICE_H_
