// The Linux implementation of the kernel seam: plain system calls, no libnuma, no root.
#ifndef CXL_OFFLOAD_OS_LINUX_KERNEL_H_
#define CXL_OFFLOAD_OS_LINUX_KERNEL_H_

#include <memory>

#include "os/kernel.h"

namespace cxl_offload {

std::shared_ptr<Kernel> make_linux_kernel();

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_OS_LINUX_KERNEL_H_
