#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>

#include "bindings/bind.h"
#include "core/error.h"

namespace cxl_offload::bindings {
namespace {

namespace py = pybind11;

// Python knows which tensors the lost ranges belong to, and where they were.
void set_memory_lost(const MemoryLost& error) {
  try {
    const py::object raised = py::module_::import("cxl_offload.memory.lost")
                                  .attr("lost_error")(error.what(), error.ranges());
    PyErr_SetObject(py::type::handle_of(raised).ptr(), raised.ptr());
  } catch (py::error_already_set& failed) {
    failed.restore();
  }
}

// OSError takes errno and text as two arguments, so that `error.errno` works.
void set_os_error(const SystemError& error) {
  PyErr_SetObject(PyExc_OSError, py::make_tuple(error.code(), error.what()).ptr());
}

}  // namespace

void bind_errors(py::module_& module) {
  static py::handle placement_error;
  py::object error = py::module_::import("cxl_offload.errors").attr("PlacementError");
  placement_error = error.release();  // lives as long as the interpreter
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const OutOfMemory& error) {
      PyErr_SetString(PyExc_MemoryError, error.what());
    } catch (const SystemError& error) {
      set_os_error(error);
    } catch (const MemoryLost& error) {
      set_memory_lost(error);
    } catch (const InvalidArgument& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const PlacementError& error) {
      PyErr_SetString(placement_error.ptr(), error.what());
    }
  });
  module.doc() = "The C++ core of cxl_offload: kernel seam, placement, pools.";
}

}  // namespace cxl_offload::bindings

PYBIND11_MODULE(_C, module, pybind11::mod_gil_not_used()) {
  namespace bindings = cxl_offload::bindings;
  bindings::bind_errors(module);
  bindings::bind_os(module);
  bindings::bind_lost(module);
  bindings::bind_transfer(module);
  bindings::bind_gpu(module);
  bindings::bind_kernels(module);
  bindings::bind_settings(module);
  bindings::bind_plain_step(module);
  bindings::bind_plain_tensors(module);
  bindings::bind_updates(module);
  bindings::bind_attention(module);
  bindings::bind_linear(module);
  bindings::bind_norm(module);
  bindings::bind_memory(module);
  bindings::bind_probe(module);
  bindings::bind_replay(module);
  bindings::bind_simulated(module);
}
