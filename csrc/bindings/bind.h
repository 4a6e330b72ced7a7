// One function a source file, so that they compile in parallel.
#ifndef CXL_OFFLOAD_BINDINGS_BIND_H_
#define CXL_OFFLOAD_BINDINGS_BIND_H_

#include <pybind11/pybind11.h>

namespace cxl_offload::bindings {

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
