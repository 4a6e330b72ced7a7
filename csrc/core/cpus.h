// CPUs that threads may run on. Masks may have any width, because some machines have more than 1024
// CPUs.
#ifndef CXL_OFFLOAD_CORE_CPUS_H_
#define CXL_OFFLOAD_CORE_CPUS_H_

#include <string>
#include <vector>

namespace cxl_offload {

// Returns the CPUs that this process may run on, ascending. Throws SystemError.
std::vector<int> allowed_cpus();
// Throws InvalidArgument for a CPU that this process may not use; `what` begins the message.
void check_cpus(const std::string& what, const std::vector<int>& cpus);
// Binds the calling thread. Does nothing if there are no CPUs. Returns zero, or the errno of the
// refusal.
int bind_thread(const std::vector<int>& cpus) noexcept;

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_CPUS_H_
