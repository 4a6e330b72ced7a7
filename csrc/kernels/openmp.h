// The OpenMP threads of the process, where a library that others loaded brings some, as torch does.
//
// After each of torch's operations they spin for milliseconds, waiting for the next. Threads of our
// own would share the CPUs with them meanwhile: inside of a training step an optimizer took 1.3
// times as long.
#ifndef CXL_OFFLOAD_KERNELS_OPENMP_H_
#define CXL_OFFLOAD_KERNELS_OPENMP_H_

#include <cstddef>
#include <functional>

namespace cxl_offload::kernels {

// Runs job() on as many OpenMP threads, the caller among them, and returns when all are done.
// False, and nothing has run, when none are loaded, they are not just as many (to ask for other
// numbers makes and ends threads at each change), or this is a forked child, where they are gone:
// also if this library was loaded after the fork, where nothing tells whether there were any.
// Inside of a parallel region of OpenMP the caller alone may run the job. It must not throw.
bool run_on_openmp(size_t threads, const std::function<void()>& job);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_OPENMP_H_
