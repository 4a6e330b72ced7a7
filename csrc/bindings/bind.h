// One function a source file, so that they compile in parallel.
#ifndef CXL_OFFLOAD_BINDINGS_BIND_H_
#define CXL_OFFLOAD_BINDINGS_BIND_H_

#include <pybind11/pybind11.h>

#include <exception>

#include "core/interrupt.h"

namespace cxl_offload::bindings {

// Destroys what may have to wait, for threads or a GPU, without Python's lock.
struct WithoutGil {
  template <typename Object>
  void operator()(Object* object) const {
    if (PyGILState_Check() == 0) {
      delete object;
      return;
    }
    const pybind11::gil_scoped_release release;
    delete object;
  }
};

// Calls work() without Python's lock, so that it can be ended by a signal (Ctrl-C): the core asks
// between its steps, and what Python's handler raised comes out when it has undone what it did.
template <typename Work>
auto interruptible(const Work& work) {
  const pybind11::gil_scoped_release release;
  std::exception_ptr raised;
  const InterruptScope scope([&raised] {
    const pybind11::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() == 0) return false;
    raised = std::make_exception_ptr(pybind11::error_already_set());
    return true;
  });
  try {
    return work();
  } catch (...) {
    if (raised) std::rethrow_exception(raised);
    throw;
  }
}

void bind_errors(pybind11::module_& module);
void bind_os(pybind11::module_& module);
void bind_attention(pybind11::module_& module);
void bind_gpu(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);
void bind_linear(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_probe(pybind11::module_& module);
void bind_replay(pybind11::module_& module);
void bind_transfer(pybind11::module_& module);
void bind_simulated(pybind11::module_& module);

}  // namespace cxl_offload::bindings

#endif  // CXL_OFFLOAD_BINDINGS_BIND_H_
