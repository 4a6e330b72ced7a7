// Device-DAX devices of this machine.
#ifndef CXL_OFFLOAD_OS_LINUX_DAX_H_
#define CXL_OFFLOAD_OS_LINUX_DAX_H_

#include <memory>
#include <string>

#include "os/dax_device.h"

namespace cxl_offload::os {

// Opens /dev/NAME below `root` after what ROOT/sys/bus/dax/devices/NAME says; `root` is empty but
// in tests. The claim is a lock on the file (flock), which other users of this package respect, in
// this process and in others; programs that do not lock, and containers with a device file of
// their own, are not kept out.
std::unique_ptr<DaxDevice> open_linux_dax(const std::string& root, const std::string& name);

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_LINUX_DAX_H_
