// There is one function for each source file, so that the files compile in parallel.
#ifndef CXL_OFFLOAD_BINDINGS_BIND_H_
#define CXL_OFFLOAD_BINDINGS_BIND_H_

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <exception>

#include "core/interrupt.h"

namespace cxl_offload::bindings {

// Releases Python's lock for as long as it lives.
//
// What makes threads does so too: meanwhile the kernel may give a signal to another thread of the
// process, and Python looks for such signals when it takes its lock (before, Ctrl-C waited until
// something else made it look).
//
// When a daemon thread wants the lock back while the interpreter ends, Python ends that thread with
// pthread_exit. If this unwinds a destructor, C++ ends the process. So such a thread waits for ever
// instead, as in Python 3.14, and the process ends without it.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (const abi::__forced_unwind&) {
      for (;;) pause();
    }
  }

 private:
  PyThreadState* state_;
};

// Destroys objects without Python's lock, because that may have to wait for threads or a GPU.
struct WithoutGil {
  template <typename Object>
  void operator()(Object* object) const {
    if (PyGILState_Check() == 0) {
      delete object;
      return;
    }
    const Unlocked unlocked;
    delete object;
  }
};

inline bool is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// Calls work() without Python's lock, in such a way that a signal (Ctrl-C) can end it. The core
// asks for signals between its steps. When it has undone what it did, the exception of Python's
// handler is raised.
template <typename Work>
auto interruptible(const Work& work) {
  const Unlocked unlocked;
  std::exception_ptr raised;
  const InterruptScope scope([&raised] {
    if (is_ending()) return false;
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
void bind_lost(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_norm(pybind11::module_& module);
void bind_plain_step(pybind11::module_& module);
void bind_plain_tensors(pybind11::module_& module);
void bind_probe(pybind11::module_& module);
void bind_replay(pybind11::module_& module);
void bind_transfer(pybind11::module_& module);
void bind_settings(pybind11::module_& module);
void bind_simulated(pybind11::module_& module);
void bind_updates(pybind11::module_& module);

}  // namespace cxl_offload::bindings

#endif  // CXL_OFFLOAD_BINDINGS_BIND_H_
