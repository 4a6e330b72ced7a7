// Faulting pages in for writing, on kernels with MADV_POPULATE_WRITE (5.14) and without.
#ifndef CXL_OFFLOAD_OS_POPULATE_H_
#define CXL_OFFLOAD_OS_POPULATE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace cxl_offload::os {

// Faults in every page of the range for writing; what is in them stays. Zero, or an errno: ENOMEM
// and EFAULT where the kernel has no page to give, EACCES where the range is not mapped, or not for
// writing, whatever the kernel calls that.
int populate_for_writing(std::span<std::byte> range);

// Whether the kernel has MADV_POPULATE_WRITE.
bool has_populate_write();

// Whether a text like that of /proc/self/maps says that every byte of [begin, end) is mapped for
// writing.
bool is_writable(const std::string& maps, uintptr_t begin, uintptr_t end);

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_POPULATE_H_
