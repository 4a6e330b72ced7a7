// Faulting pages in for writing, on kernels with MADV_POPULATE_WRITE (5.14) and without.
#ifndef CXL_OFFLOAD_OS_POPULATE_H_
#define CXL_OFFLOAD_OS_POPULATE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace cxl_offload::os {

// Faults in every page of the range for writing; their contents stay. Returns zero or an errno:
// ENOMEM or EFAULT when the kernel has no page to give, EACCES when the range is not mapped for
// writing (kernels have several names for that).
int populate_for_writing(std::span<std::byte> range);

// Whether the kernel has MADV_POPULATE_WRITE.
bool has_populate_write();

// Whether a text like that of /proc/self/maps says that every byte of [begin, end) is mapped for
// writing.
bool is_writable(const std::string& maps, uintptr_t begin, uintptr_t end);

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_POPULATE_H_
