// Device-DAX devices of this machine.
#ifndef CXL_OFFLOAD_OS_LINUX_DAX_H_
#define CXL_OFFLOAD_OS_LINUX_DAX_H_

#include <memory>
#include <string>

#include "os/dax_device.h"

namespace cxl_offload::os {

// Reads what ROOT/sys/bus/dax/devices/NAME says and opens ROOT/dev/NAME. Only tests give a `root`.
// The claim is a lock on the file (flock). Other users of this package respect it, in this process
// and in others. It does not keep out programs that do not lock, or containers with a device file
// of their own.
std::unique_ptr<DaxDevice> open_linux_dax(const std::string& root, const std::string& name);

}  // namespace cxl_offload::os

#endif  // CXL_OFFLOAD_OS_LINUX_DAX_H_
