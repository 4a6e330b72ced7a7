#include "bindings/lost.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <csignal>
#include <functional>
#include <tuple>
#include <vector>

#include "bindings/bind.h"
#include "os/cache_lines.h"
#include "os/memory_failure.h"
#include "os/watched_ranges.h"

namespace cxl_offload::bindings {
namespace {

namespace py = pybind11;

using os::LossKind;

// A tuple of number, address, bytes and kind.
using LossRow = std::tuple<uint64_t, uintptr_t, size_t, LossKind>;

std::span<std::byte> bytes_of(uintptr_t address, size_t bytes) {
  return {reinterpret_cast<std::byte*>(address), bytes};
}

std::vector<LossRow> rows_of(const std::vector<os::Loss>& losses) {
  std::vector<LossRow> rows;
  for (const os::Loss& loss : losses) {
    rows.emplace_back(loss.number, reinterpret_cast<uintptr_t>(loss.range.data()),
                      loss.range.size(), loss.kind);
  }
  return rows;
}

// Returns the range from the lowest to the highest byte of a view whose strides may be negative.
std::span<const std::byte> span_of(const TensorView& view, size_t first_dimension,
                                   const std::byte* data) {
  ptrdiff_t low = 0;
  ptrdiff_t high = 0;
  for (size_t i = first_dimension; i < view.shape.size(); ++i) {
    if (view.shape[i] == 0) return {};
    const ptrdiff_t reach = (view.shape[i] - 1) * view.strides[i];
    (reach < 0 ? low : high) += reach;
  }
  const auto element = static_cast<ptrdiff_t>(dtype_bytes(view.dtype));
  return {data + low * element, static_cast<size_t>((high - low + 1) * element)};
}

// It is None if there is nothing to call.
std::function<void()> call_of(const py::object& function) {
  if (function.is_none()) return {};
  return [function] { function(); };
}

// Python looks at it before the next step of the main thread. Safe in signal handlers.
void interrupt_python() { PyErr_SetInterruptEx(SIGBUS); }

}  // namespace

void LostParts::add(std::span<const std::byte> range) {
  for (const os::Loss& loss : os::losses_in(range)) {
    ranges_.emplace_back(reinterpret_cast<uintptr_t>(loss.range.data()), loss.range.size());
  }
}

void LostParts::add(const TensorView& view) { add(span_of(view, 0, view.data)); }

void LostParts::add_positions(const TensorView& cache, int64_t index, int64_t count) {
  TensorView part = cache;
  part.shape[2] = std::min(count, cache.shape[2]);
  const auto element = static_cast<ptrdiff_t>(dtype_bytes(cache.dtype));
  for (int64_t head = 0; head < cache.shape[1]; ++head) {
    const ptrdiff_t first = index * cache.strides[0] + head * cache.strides[1];
    add(span_of(part, 2, cache.data + first * element));
  }
}

void LostParts::refuse() const {
  if (const uint64_t unknown = os::unknown_losses(); unknown > 0) {
    throw MemoryLost(std::to_string(unknown) +
                         " losses of memory came too fast to be written down, so nobody knows what "
                         "is whole; start again from a checkpoint",
                     ranges_);
  }
  if (ranges_.empty()) return;
  size_t bytes = 0;
  for (const auto& [address, size] : ranges_) bytes += size;
  throw MemoryLost(format_bytes(bytes) + " of memory are lost", ranges_);
}

void settle(const TensorView& view) {
  if (os::any_loss() && view.is_contiguous()) os::settle({view.data, view.bytes()});
}

void bind_lost(py::module_& module) {
  py::enum_<LossKind>(module, "LossKind")
      .value("used", LossKind::kUsed)
      .value("early", LossKind::kEarly)
      .value("gone", LossKind::kGone)
      .value("asked", LossKind::kAsked);
  module.def(
      "survive_memory_failures",
      [](bool interrupts, const py::object& prepare) {
        os::survive_memory_failures(interrupts ? &interrupt_python : nullptr, call_of(prepare));
      },
      py::arg("interrupts"), py::arg("prepare"),
      "See os/memory_failure.h. `interrupts`: Python's handler of SIGBUS runs in the main thread; "
      "without one that is a function, Python would crash.");
  module.def(
      "stop_surviving", [](const py::object& prepare) { os::stop_surviving(call_of(prepare)); },
      py::arg("prepare"));
  module.def("survives_memory_failures", &os::survives_memory_failures);
  module.def("any_loss", &os::any_loss);
  module.def("loss_count", &os::loss_count);
  module.def("unwatched_ranges", &os::unwatched_ranges);
  module.def(
      "losses", [] { return rows_of(os::losses()); }, py::call_guard<Unlocked>(),
      "(number, address, bytes, kind) of every loss that stands, the oldest first.");
  module.def(
      "losses_in",
      [](uintptr_t address, size_t bytes) {
        return rows_of(os::losses_in(bytes_of(address, bytes)));
      },
      py::arg("address"), py::arg("nbytes"), py::call_guard<Unlocked>());
  module.def(
      "refuse_lost",
      [](const std::vector<std::pair<uintptr_t, size_t>>& ranges) {
        check_memory([&](LostParts& lost) {
          for (const auto& [address, bytes] : ranges) lost.add(bytes_of(address, bytes));
        });
      },
      py::arg("ranges"), "Raises MemoryLostError where any of (address, bytes) is lost.");
  module.def(
      "settle", [](uintptr_t address, size_t bytes) { os::settle(bytes_of(address, bytes)); },
      py::arg("address"), py::arg("nbytes"), py::call_guard<Unlocked>());
  module.def(
      "watch",
      [](uintptr_t address, size_t bytes, size_t page_bytes) {
        os::watch({bytes_of(address, bytes), page_bytes, true});
      },
      py::arg("address"), py::arg("nbytes"), py::arg("page_bytes"),
      "A mapping of a file or device that others made; to be taken out before it is unmapped.");
  module.def(
      "unwatch",
      [](uintptr_t address, size_t bytes) {
        os::unwatch(bytes_of(address, bytes));
        os::settle(bytes_of(address, bytes));
      },
      py::arg("address"), py::arg("nbytes"), py::call_guard<Unlocked>());
  module.def(
      "write_back_lines",
      [](uintptr_t address, size_t bytes) { os::write_back_lines(bytes_of(address, bytes)); },
      py::arg("address"), py::arg("nbytes"), py::call_guard<Unlocked>(),
      "From the caches to memory; see os/cache_lines.h.");
  module.def(
      "find_lost_pages",
      [](uintptr_t address, size_t bytes, size_t page_bytes) {
        std::vector<std::pair<uintptr_t, size_t>> found;
        for (const auto& part : os::find_lost_pages(bytes_of(address, bytes), page_bytes)) {
          found.emplace_back(reinterpret_cast<uintptr_t>(part.data()), part.size());
        }
        return found;
      },
      py::arg("address"), py::arg("nbytes"), py::arg("page_bytes"), py::call_guard<Unlocked>(),
      "(address, bytes) of pages that the kernel says are lost; replaced and written down.");
}

}  // namespace cxl_offload::bindings
