// The Linux implementation of the kernel seam: plain system calls, no libnuma, no root.
#ifndef CXL_OFFLOAD_OS_LINUX_KERNEL_H_
#define CXL_OFFLOAD_OS_LINUX_KERNEL_H_

#include <memory>
#include <string>

#include "os/kernel.h"

namespace cxl_offload::os {

// Looks for Device-DAX devices below `dax_root`. Only tests give one.
std::shared_ptr<Kernel> make_linux_kernel(const std::string& dax_root = "");

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_LINUX_KERNEL_H_
