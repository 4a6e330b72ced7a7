#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "core/cpus.h"
#include "probe/gpu_copies.h"
#include "probe/random.h"
#include "probe/traffic.h"

namespace cxl_offload::bindings {

using probe::ThreadTraffic;
using probe::Traffic;

namespace {

namespace py = pybind11;

// How many loads lie between two readings of the clock. They take about 100 us on DRAM, and reading
// the clock takes 0.03 us.
constexpr size_t kChaseBatch = 1024;

std::span<std::byte> range_at(uintptr_t address, size_t bytes) {
  return {reinterpret_cast<std::byte*>(address), bytes};
}

Traffic make_traffic(int reads, int writes, bool non_temporal, const std::string& isa,
                     uint64_t delay_ns, uint64_t passes, uint64_t value) {
  Traffic traffic;
  traffic.mix = {reads, writes, non_temporal};
  traffic.isa = isa.empty() ? best_isa() : parse_isa(isa);
  traffic.delay_ns = delay_ns;
  traffic.passes = passes;
  traffic.value = value;
  return traffic;
}

void bind_traffic(py::module_& module) {
  py::class_<ThreadTraffic>(module, "ThreadTraffic")
      .def_readonly("cpu", &ThreadTraffic::cpu)
      .def_property_readonly(
          "address",
          [](const ThreadTraffic& done) { return reinterpret_cast<uintptr_t>(done.slice.base); })
      .def_property_readonly("stride_bytes",
                             [](const ThreadTraffic& done) { return done.slice.stride_bytes; })
      .def_property_readonly("lines", [](const ThreadTraffic& done) { return done.slice.lines; })
      .def_readonly("bytes_read", &ThreadTraffic::bytes_read)
      .def_readonly("bytes_written", &ThreadTraffic::bytes_written)
      .def_readonly("sum", &ThreadTraffic::sum)
      .def_readonly("seconds", &ThreadTraffic::seconds)
      .def_readonly("cpu_seconds", &ThreadTraffic::cpu_seconds);
  py::class_<Traffic>(module, "Traffic")
      .def(py::init(&make_traffic), py::kw_only(), py::arg("reads"), py::arg("writes"),
           py::arg("non_temporal") = false, py::arg("isa") = "", py::arg("delay_ns") = 0,
           py::arg("passes") = 0, py::arg("value") = Traffic().value);
  module.def(
      "run_traffic",
      [](uintptr_t address, size_t bytes, const Traffic& traffic, const std::vector<int>& cpus,
         double warmup_s, double seconds) {
        return probe::run_traffic(range_at(address, bytes), traffic, cpus, {warmup_s, seconds});
      },
      py::arg("address"), py::arg("nbytes"), py::arg("traffic"), py::arg("cpus"), py::kw_only(),
      py::arg("warmup_s") = 0.0, py::arg("seconds") = 0.0, py::call_guard<Unlocked>(),
      "One pinned thread a CPU, each over its own slice of the buffer; see probe/traffic.h.");
}

void bind_chase(py::module_& module) {
  module.def(
      "fill_random",
      [](uintptr_t address, size_t bytes, const std::vector<int>& cpus, uint64_t seed) {
        probe::fill_random(range_at(address, bytes), seed, cpus);
      },
      py::arg("address"), py::arg("nbytes"), py::arg("cpus"), py::kw_only(), py::arg("seed") = 1,
      py::call_guard<Unlocked>(),
      "Random words, which depend on the seed only; fresh zeros are measured too fast.");
  module.def(
      "link_cycle",
      [](uintptr_t address, size_t bytes, uint64_t seed) {
        probe::link_cycle(range_at(address, bytes), seed);
      },
      py::arg("address"), py::arg("nbytes"), py::kw_only(), py::arg("seed") = 1,
      py::call_guard<Unlocked>(), "Links all lines of the buffer into one cycle in random order.");
  module.def(
      "idle_latency",
      [](uintptr_t address, size_t bytes, int cpu, double warmup_s, double seconds) {
        return probe::idle_latency(range_at(address, bytes), cpu, kChaseBatch, {warmup_s, seconds})
            .ns_per_load;
      },
      py::arg("address"), py::arg("nbytes"), py::arg("cpu"), py::kw_only(),
      py::arg("warmup_s") = 0.0, py::arg("seconds") = 0.0, py::call_guard<Unlocked>(),
      "ns a load of a linked buffer, one mean for every batch of loads.");
  module.def(
      "loaded_latency",
      [](uintptr_t linked, size_t linked_bytes, int chaser_cpu, uintptr_t address, size_t bytes,
         const Traffic& traffic, const std::vector<int>& cpus, double warmup_s, double seconds) {
        probe::LoadedResult result =
            probe::run_loaded(range_at(linked, linked_bytes), chaser_cpu, kChaseBatch,
                              range_at(address, bytes), traffic, cpus, {warmup_s, seconds});
        return std::pair(std::move(result.chase.ns_per_load), std::move(result.traffic));
      },
      py::arg("linked"), py::arg("linked_nbytes"), py::arg("chaser_cpu"), py::arg("address"),
      py::arg("nbytes"), py::arg("traffic"), py::arg("cpus"), py::kw_only(),
      py::arg("warmup_s") = 0.0, py::arg("seconds") = 0.0, py::call_guard<Unlocked>(),
      "(ns a load of every batch, what every thread moved) of a chase beside traffic.");
}

void bind_gpu_copies(py::module_& module) {
  module.def(
      "list_gpus",
      [](const std::string& library) {
        const probe::GpuList found = probe::list_gpus(library);
        std::vector<std::pair<std::string, std::string>> gpus;
        for (const probe::GpuName& gpu : found.gpus) gpus.emplace_back(gpu.name, gpu.pci_address);
        return std::pair(std::move(gpus), found.reason);
      },
      py::arg("library"), "((name, PCI address) of every GPU, why there is none).");
  py::class_<probe::GpuCopies>(module, "GpuCopies")
      .def(py::init([](const std::string& library, int ordinal, uintptr_t address, size_t bytes) {
             return std::make_unique<probe::GpuCopies>(library, ordinal, range_at(address, bytes));
           }),
           py::arg("library"), py::arg("ordinal"), py::arg("address"), py::arg("nbytes"))
      .def("copy", &probe::GpuCopies::copy, py::arg("to_device"), py::arg("nbytes"),
           py::call_guard<Unlocked>());
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (Isa isa : supported_isas()) names.push_back(isa_name(isa));
  return names;
}

}  // namespace

void bind_probe(py::module_& module) {
  module.def("supported_isas", &isa_names, "Instruction sets of this processor, best last.");
  module.def("has_non_temporal_stores", &probe::has_non_temporal_stores);
  module.def("allowed_cpus", &allowed_cpus, "CPUs that this process may run on.");
  bind_traffic(module);
  bind_chase(module);
  bind_gpu_copies(module);
}

}  // namespace cxl_offload::bindings
