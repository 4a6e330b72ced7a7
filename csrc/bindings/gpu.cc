#include <pybind11/functional.h>
#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "core/error.h"
#include "gpu/cuda_driver.h"
#include "gpu/cuda_kernels.h"
#include "gpu/driver.h"
#include "gpu/fake_driver.h"
#include "os/simulated_kernel.h"

namespace cxl_offload::bindings {

namespace py = pybind11;

using gpu::CudaKernels;
using gpu::FakeDriver;
using gpu::GpuDriver;
using gpu::StreamId;

namespace {

void wait_stream(GpuDriver& driver, StreamId stream) {
  const gpu::EventId event = driver.record_event(stream);
  try {
    driver.wait_event(event);
  } catch (...) {
    driver.destroy_event(event);
    throw;
  }
  driver.destroy_event(event);
}

// With a kernel, registering pins the pages there, which moves them out of movable nodes.
std::shared_ptr<FakeDriver> make_fake_driver(uint64_t limit_bytes,
                                             const std::shared_ptr<os::SimulatedKernel>& kernel) {
  auto driver = std::make_shared<FakeDriver>(limit_bytes);
  if (kernel) {
    driver->set_pinning({[kernel](std::span<std::byte> range) { kernel->pin(range); },
                         [kernel](std::byte* address) { kernel->unpin(address); }});
  }
  return driver;
}

void pin_with(FakeDriver& driver, std::function<void(uintptr_t, size_t)> pin,
              std::function<void(uintptr_t)> unpin) {
  const auto end = [unpin = std::move(unpin)](std::byte* address) {
    try {
      unpin(reinterpret_cast<uintptr_t>(address));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("unpin");
    }
  };
  const auto begin = [pin = std::move(pin)](std::span<std::byte> range) {
    pin(reinterpret_cast<uintptr_t>(range.data()), range.size());
  };
  driver.set_pinning({begin, end});
}

// `targets` and `sources` are addresses of arrays of addresses.
void copy_blocks(GpuDriver& driver, uintptr_t targets, uintptr_t sources, size_t count,
                 size_t block_bytes, StreamId stream, bool each) {
  const std::span to(reinterpret_cast<const uint64_t*>(targets), count);
  const std::span from(reinterpret_cast<const uint64_t*>(sources), count);
  if (!each) {
    const std::vector<size_t> sizes(count, block_bytes);
    driver.copy_batch(to, from, sizes, stream);
    return;
  }
  for (size_t i = 0; i < count; ++i) driver.copy(to[i], from[i], block_bytes, stream);
}

}  // namespace

void bind_gpu(py::module_& module) {
  py::class_<GpuDriver, std::shared_ptr<GpuDriver>>(module, "GpuDriver")
      .def_property_readonly("name", &GpuDriver::name)
      .def("synchronize", &GpuDriver::synchronize, py::call_guard<Unlocked>())
      .def("create_stream", &GpuDriver::create_stream)
      .def("destroy_stream", &GpuDriver::destroy_stream, py::arg("stream"))
      .def("copy", &GpuDriver::copy, py::kw_only(), py::arg("target"), py::arg("source"),
           py::arg("nbytes"), py::arg("stream"), py::call_guard<Unlocked>())
      .def("wait_stream", &wait_stream, py::arg("stream"), py::call_guard<Unlocked>(),
           "Waits for what the stream has queued.")
      .def("copy_blocks", &copy_blocks, py::kw_only(), py::arg("targets"), py::arg("sources"),
           py::arg("count"), py::arg("block_bytes"), py::arg("stream"), py::arg("each") = false,
           py::call_guard<Unlocked>(),
           "Addresses of two arrays of addresses. One batch, or with `each` one call a block.")
      .def_property_readonly("batched", &GpuDriver::batched);

  // Stands in for a GPU that a machine may not have, in tests: see gpu/fake_driver.h.
  py::class_<FakeDriver, GpuDriver, std::shared_ptr<FakeDriver>>(module, "FakeDriver")
      .def(py::init(&make_fake_driver), py::arg("limit_bytes") = UINT64_MAX,
           py::arg("kernel") = nullptr)
      .def("pin_with", &pin_with, py::arg("pin"), py::arg("unpin"),
           "Registering calls pin(address, nbytes) and its end unpin(address). One thread only.")
      .def("launch", &FakeDriver::launch, py::arg("stream"))
      .def("finish", &FakeDriver::finish, py::arg("stream"))
      .def("step", &FakeDriver::step, py::arg("stream"), py::arg("count") = 1)
      .def("pending", &FakeDriver::pending, py::arg("stream"))
      .def("hold_waiters", &FakeDriver::hold_waiters, py::arg("hold"))
      .def("fail_copy", &FakeDriver::fail_copy, py::arg("nth"))
      .def("fail_registration", &FakeDriver::fail_registration, py::arg("nth"))
      .def("break_context", &FakeDriver::break_context)
      .def_property_readonly(
          "registered_bytes",
          [](const FakeDriver& driver) { return driver.counts().registered_bytes; })
      .def_property_readonly("registrations",
                             [](const FakeDriver& driver) { return driver.counts().registrations; })
      .def_property_readonly(
          "wrong_unregisters",
          [](const FakeDriver& driver) { return driver.counts().wrong_unregisters; })
      .def_property_readonly("copies",
                             [](const FakeDriver& driver) { return driver.counts().copies; })
      .def_property_readonly("copied_bytes",
                             [](const FakeDriver& driver) { return driver.counts().copied_bytes; })
      .def_property_readonly("streams",
                             [](const FakeDriver& driver) { return driver.counts().streams; })
      .def_property_readonly("events",
                             [](const FakeDriver& driver) { return driver.counts().events; })
      .def_property_readonly("waiters",
                             [](const FakeDriver& driver) { return driver.counts().waiters; })
      .def_property_readonly("event_waits",
                             [](const FakeDriver& driver) { return driver.counts().event_waits; })
      .def_property_readonly("synchronizations", [](const FakeDriver& driver) {
        return driver.counts().synchronizations;
      });

  py::class_<CudaKernels>(module, "CudaKernels")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def_property_readonly("runtime_version", &CudaKernels::runtime_version)
      .def(
          "copy_blocks",
          [](const CudaKernels& kernels, uintptr_t targets, uintptr_t sources, size_t count,
             size_t block_bytes, bool aligned, StreamId stream) {
            kernels.copy_blocks(reinterpret_cast<const uint64_t*>(targets),
                                reinterpret_cast<const uint64_t*>(sources), count, block_bytes,
                                aligned, stream);
          },
          py::kw_only(), py::arg("targets"), py::arg("sources"), py::arg("count"),
          py::arg("block_bytes"), py::arg("aligned"), py::arg("stream"), py::call_guard<Unlocked>())
      .def(
          "pack_blocks",
          [](const CudaKernels& kernels, const transfer::Packing& packing, uintptr_t targets,
             uintptr_t sources, size_t blocks, size_t count, bool unpack, StreamId stream) {
            kernels.pack_blocks(packing, unpack, reinterpret_cast<const uint64_t*>(targets),
                                reinterpret_cast<const uint64_t*>(sources), blocks, count, stream);
          },
          py::arg("packing"), py::kw_only(), py::arg("targets"), py::arg("sources"),
          py::arg("blocks"), py::arg("count"), py::arg("unpack"), py::arg("stream"),
          py::call_guard<Unlocked>());

  module.def(
      "open_cuda_driver",
      [](const std::string& library) -> std::shared_ptr<GpuDriver> {
        auto opened = gpu::CudaDriver::open(library);
        if (!opened.driver) {
          throw InvalidArgument("pin host memory: no CUDA driver to pin it with (" + opened.reason +
                                "); allocate with pin=False");
        }
        return opened.driver;
      },
      py::arg("library") = "libcuda.so.1",
      "Opens the CUDA driver of this machine; creates no context.");
}

}  // namespace cxl_offload::bindings
