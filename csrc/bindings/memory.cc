#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "bindings/bind.h"
#include "bindings/dlpack.h"
#include "core/error.h"
#include "core/rounding.h"
#include "core/sizes.h"
#include "memory/block_copies.h"
#include "memory/block_heap.h"
#include "memory/layout.h"
#include "memory/session.h"

namespace cxl_offload::bindings {
namespace {

namespace py = pybind11;

using memory::PlacedBlock;
using memory::Rule;
using memory::RuleKind;
using memory::Session;
using os::NodeId;

using Shares = std::vector<std::pair<NodeId, uint32_t>>;

memory::Stripe make_stripe(const Shares& shares, size_t granule_bytes) {
  std::vector<memory::Share> list;
  for (const auto& [node, weight] : shares) list.push_back({node, weight});
  return memory::Stripe(std::move(list), granule_bytes);
}

Rule make_rule(RuleKind kind, const Shares& shares, size_t granule_bytes, bool strict,
               os::PageKind pages, const std::string& device) {
  Rule rule{kind, {}, granule_bytes, strict, pages, device};
  for (const auto& [node, weight] : shares) rule.shares.push_back({node, weight});
  return rule;
}

std::shared_ptr<Session> make_session(std::shared_ptr<os::Kernel> kernel,
                                      std::map<NodeId, uint64_t> capacities, size_t max_threads,
                                      std::map<std::string, uint64_t> device_capacities) {
  auto budget = std::make_shared<memory::NodeBudget>(std::move(capacities));
  memory::Placer placer{std::move(kernel), std::move(budget), memory::Reserve{},
                        std::max<size_t>(1, max_threads)};
  return {new Session(std::move(placer), std::move(device_capacities)), WithoutGil()};
}

// Exports the block as one dimension of bytes, which torch and numpy view as other types.
template <typename Managed>
struct Exported {
  Managed managed{};
  int64_t length = 0;
  std::shared_ptr<PlacedBlock> block;

  // This runs in any thread, without Python's lock, also while the interpreter exits.
  static void drop(Managed* managed) { delete static_cast<Exported*>(managed->context); }
};

template <typename Managed>
Managed* export_block(std::shared_ptr<PlacedBlock> block) {
  auto exported = std::make_unique<Exported<Managed>>();
  exported->length = static_cast<int64_t>(block->range().size());
  exported->managed.context = exported.get();
  exported->managed.deleter = &Exported<Managed>::drop;
  exported->managed.tensor = {.data = block->range().data(),
                              .device = {dlpack::kHostDevice, 0},
                              .ndim = 1,
                              .dtype = {dlpack::kUnsigned, 8, 1},
                              .shape = &exported->length,
                              .strides = nullptr,
                              .byte_offset = 0};
  exported->block = std::move(block);
  return &exported.release()->managed;
}

// A capsule that still has its first name was never consumed, and owns what it points to.
template <typename Managed>
py::object make_capsule(Managed* managed, const char* name) {
  const auto destroy = [](PyObject* capsule) {
    const char* now = PyCapsule_GetName(capsule);
    if (now == nullptr || std::string_view(now).starts_with("used_")) return;
    auto* unused = static_cast<Managed*>(PyCapsule_GetPointer(capsule, now));
    unused->deleter(unused);
  };
  PyObject* capsule = PyCapsule_New(managed, name, destroy);
  if (capsule == nullptr) {
    managed->deleter(managed);
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(capsule);
}

py::object to_dlpack(const std::shared_ptr<PlacedBlock>& block, const py::object& /*stream*/,
                     const std::optional<std::pair<uint32_t, uint32_t>>& max_version,
                     const std::optional<std::pair<int32_t, int32_t>>& device,
                     const std::optional<bool>& copy) {
  if (device && *device != std::pair<int32_t, int32_t>{dlpack::kHostDevice, 0}) {
    throw py::buffer_error(
        "__dlpack__(dl_device=(" + std::to_string(device->first) + ", " +
        std::to_string(device->second) +
        ")): the memory is on device (1, 0), the CPU; copy it where you want it");
  }
  if (copy.value_or(false)) {
    throw py::buffer_error("__dlpack__(copy=True): exports share memory; copy what you import");
  }
  if (!max_version || max_version->first < dlpack::kMajorVersion) {
    return make_capsule(export_block<dlpack::ManagedTensor>(block), "dltensor");
  }
  auto* exported = export_block<dlpack::VersionedTensor>(block);
  exported->version = {dlpack::kMajorVersion, dlpack::kMinorVersion};
  return make_capsule(exported, "dltensor_versioned");
}

using Counts = std::tuple<uint64_t, uint64_t, uint64_t>;

Counts counts_of(const memory::Gauge& gauge) { return {gauge.current, gauge.peak, gauge.total}; }

std::map<std::string, Counts> statistics_of(const Session& session) {
  const memory::Statistics statistics = session.statistics();
  return {{"asked_bytes", counts_of(statistics.asked.bytes)},
          {"allocations", counts_of(statistics.asked.count)},
          {"held_bytes", counts_of(statistics.held.bytes)},
          {"mapped_bytes", counts_of(statistics.mapped.bytes)},
          {"cached_bytes", counts_of(statistics.cached.bytes)}};
}

using Use = std::tuple<uint64_t, uint64_t, uint64_t, std::optional<uint64_t>>;

template <typename Key>
std::map<Key, Use> rows(const std::map<Key, memory::NodeUse>& uses) {
  std::map<Key, Use> result;
  for (const auto& [key, use] : uses) {
    result[key] = {use.current_bytes, use.peak_bytes, use.total_bytes, use.capacity_bytes};
  }
  return result;
}

std::span<const std::byte> region_at(uintptr_t address, size_t bytes) {
  return {reinterpret_cast<const std::byte*>(address), bytes};
}

void bind_rule(py::module_& module) {
  py::enum_<RuleKind>(module, "RuleKind")
      .value("first_touch", RuleKind::kFirstTouch)
      .value("bind", RuleKind::kBind)
      .value("preferred", RuleKind::kPreferred)
      .value("stripe", RuleKind::kStripe)
      .value("replicate", RuleKind::kReplicate)
      .value("device", RuleKind::kDevice);
  py::class_<Rule>(module, "Rule")
      .def(py::init(&make_rule), py::arg("kind"), py::arg("shares"), py::kw_only(),
           py::arg("granule_bytes") = os::kHugePageBytes, py::arg("strict") = true,
           py::arg("pages") = os::PageKind::kBase, py::arg("device") = "")
      .def("__str__", &Rule::describe);
  module.attr("LINE_BYTES") = kLineBytes;
  module.attr("MOST_BYTES") = kMostBytes;
  module.attr("BASE_PAGE_BYTES") = kBasePageBytes;
  module.attr("HUGE_PAGE_BYTES") = os::kHugePageBytes;
  module.attr("GIGANTIC_PAGE_BYTES") = os::kGiganticPageBytes;
  module.attr("POOL_SLACK_SHARE") = 1.0 / memory::kChunkFraction + 1.0 / memory::kSlackFraction;
  module.def(
      "reserve_bytes", [](uint64_t total_bytes) { return memory::Reserve{}.of(total_bytes); },
      py::arg("total_bytes"), "What is never taken of a node of that size.");
  module.def(
      "stripe_bytes",
      [](const Shares& shares, size_t granule_bytes, size_t bytes) {
        const memory::Stripe stripe = make_stripe(shares, granule_bytes);
        const auto placed = stripe.allocation_bytes(bytes);
        std::map<NodeId, size_t> result;
        for (size_t i = 0; i < placed.size(); ++i) result[stripe.shares()[i].node] = placed[i];
        return result;
      },
      py::arg("shares"), py::arg("granule_bytes"), py::arg("nbytes"),
      "Bytes of one allocation on every node of a weighted interleave.");
  module.def(
      "stripe_runs",
      [](const Shares& shares, size_t granule_bytes, size_t bytes) {
        std::vector<std::tuple<size_t, size_t, NodeId>> runs;
        for (const memory::Run& run : make_stripe(shares, granule_bytes).runs(bytes)) {
          runs.emplace_back(run.offset, run.bytes, run.node);
        }
        return runs;
      },
      py::arg("shares"), py::arg("granule_bytes"), py::arg("nbytes"),
      "(offset, bytes, node) of every run of a weighted interleave: the pure function behind it.");
}

void bind_allocation(py::module_& module) {
  py::class_<PlacedBlock, std::shared_ptr<PlacedBlock>>(module, "Allocation")
      .def_property_readonly("address",
                             [](const PlacedBlock& block) {
                               return reinterpret_cast<uintptr_t>(block.range().data());
                             })
      .def_property_readonly("nbytes",
                             [](const PlacedBlock& block) { return block.range().size(); })
      .def_property_readonly("held_bytes",
                             [](const PlacedBlock& block) { return block.memory().capacity(); })
      .def_property_readonly("page_bytes", &PlacedBlock::page_bytes)
      .def_property_readonly("unit_bytes", &PlacedBlock::unit_bytes)
      .def_property_readonly("pinned",
                             [](const PlacedBlock& block) { return block.memory().pinned(); })
      .def_property_readonly(
          "device", [](const PlacedBlock& block) { return block.memory().region()->device(); })
      .def_property_readonly("requested", &PlacedBlock::requested)
      .def_property_readonly("notes", &PlacedBlock::notes)
      .def(
          "bytes_per_node",
          [](const PlacedBlock& block) { return block.session().bytes_per_node(block.range()); },
          py::call_guard<Unlocked>())
      .def(
          "runs",
          [](const PlacedBlock& block, size_t offset, size_t bytes) {
            std::vector<std::tuple<size_t, size_t, NodeId>> rows;
            for (const memory::Run& run : block.runs(offset, bytes)) {
              rows.emplace_back(run.offset, run.bytes, run.node);
            }
            return rows;
          },
          py::arg("offset"), py::arg("nbytes"),
          "(offset, bytes, node) of every run in a part, as they were put; empty if unknown.")
      .def("copies", &PlacedBlock::copies,
           "All copies of it, itself among them, in the order of their nodes; none where it is the "
           "only one.")
      .def("record_stream", &PlacedBlock::record_stream, py::arg("stream"))
      .def(
          "move",
          [](PlacedBlock& block, const Rule& rule) { interruptible([&] { block.move(rule); }); },
          py::arg("rule"))
      .def(
          "move_part",
          [](PlacedBlock& block, size_t offset, size_t bytes, const Rule& rule) {
            interruptible([&] { block.move_part(offset, bytes, rule); });
          },
          py::arg("offset"), py::arg("nbytes"), py::arg("rule"))
      .def(
          "ask_pages",
          [](PlacedBlock& block, bool bring_back) {
            const memory::AskedPages asked =
                interruptible([&] { return block.ask_pages(bring_back); });
            std::vector<std::pair<uintptr_t, size_t>> lost;
            for (const auto& part : asked.lost) {
              lost.emplace_back(reinterpret_cast<uintptr_t>(part.data()), part.size());
            }
            std::vector<std::tuple<uintptr_t, size_t, NodeId, NodeId, bool>> strays;
            for (const memory::Stray& stray : asked.strays) {
              strays.emplace_back(reinterpret_cast<uintptr_t>(stray.pages.data()),
                                  stray.pages.size(), stray.placed_on, stray.found_on,
                                  stray.is_back);
            }
            return std::pair(lost, strays);
          },
          py::arg("bring_back"),
          "Lost pages as (address, bytes), and strays as (address, bytes, placed on, found on, is "
          "back).")
      .def("__dlpack__", &to_dlpack, py::kw_only(), py::arg("stream") = py::none(),
           py::arg("max_version") = py::none(), py::arg("dl_device") = py::none(),
           py::arg("copy") = py::none())
      .def("__dlpack_device__",
           [](const PlacedBlock&) { return std::pair<int32_t, int32_t>{dlpack::kHostDevice, 0}; });
}

}  // namespace

void bind_memory(py::module_& module) {
  bind_rule(module);
  bind_allocation(module);
  module.def(
      "find_allocation",
      [](uintptr_t address) {
        return memory::find_block(reinterpret_cast<const std::byte*>(address));
      },
      py::arg("address"), "The live allocation of any session that holds the address.");
  module.def("any_copies", &memory::any_copies,
             "Whether any allocation has copies; quick, so that who has none pays nothing.");
  py::class_<Session, std::shared_ptr<Session>>(module, "Session")
      .def(py::init(&make_session), py::arg("kernel"), py::arg("capacities"),
           py::arg("max_threads"), py::arg("device_capacities") = py::dict())
      .def(
          "allocate",
          [](Session& session, size_t bytes, const Rule& rule,
             const std::shared_ptr<gpu::GpuDriver>& driver) {
            return interruptible([&] { return session.allocate(bytes, rule, driver); });
          },
          py::arg("nbytes"), py::arg("rule"), py::arg("driver") = nullptr)
      .def(
          "place",
          [](const Session& session, uintptr_t address, size_t nbytes, const Rule& rule,
             size_t part_bytes, size_t stride_bytes, size_t count) {
            auto* begin = reinterpret_cast<std::byte*>(address);
            const memory::Parts parts{{begin, nbytes}, part_bytes, stride_bytes, count};
            return interruptible([&] { return session.place(parts, rule); });
          },
          py::arg("address"), py::arg("nbytes"), py::arg("rule"), py::kw_only(),
          py::arg("part_bytes"), py::arg("stride_bytes"), py::arg("count"))
      .def(
          "find",
          [](const Session& session, uintptr_t address) {
            return session.find(reinterpret_cast<const std::byte*>(address));
          },
          py::arg("address"))
      .def("blocks", &Session::blocks, py::call_guard<Unlocked>(), "All live allocations.")
      .def(
          "bytes_per_node",
          [](const Session& session, uintptr_t address, size_t bytes) {
            return session.bytes_per_node(region_at(address, bytes));
          },
          py::arg("address"), py::arg("nbytes"), py::call_guard<Unlocked>())
      // This releases Python's lock, because a thread that holds a lock of the session may be
      // waiting for it.
      .def(
          "node_use", [](const Session& session) { return rows(session.node_use()); },
          py::call_guard<Unlocked>())
      .def(
          "device_use", [](const Session& session) { return rows(session.device_use()); },
          py::call_guard<Unlocked>())
      .def("statistics", &statistics_of, py::call_guard<Unlocked>())
      .def(
          "trim",
          [](Session& session) {
            memory::Trimmed trimmed = session.trim();
            return std::pair(trimmed.bytes, std::move(trimmed.kept_because));
          },
          py::call_guard<Unlocked>(),
          "Bytes returned, and why the rest was kept: \"\" where nothing was.");
}

}  // namespace cxl_offload::bindings
