#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/lost.h"
#include "core/error.h"
#include "memory/session.h"
#include "transfer/chunk_plan.h"
#include "transfer/copy_engine.h"
#include "transfer/copy_timing.h"
#include "transfer/host_copy.h"
#include "transfer/packing.h"

namespace cxl_offload::bindings {
namespace {

namespace py = pybind11;

using transfer::Code;
using transfer::CopyHandle;
using transfer::CopyRule;
using transfer::Direction;
using transfer::Element;
using transfer::HostCopier;
using transfer::Lane;
using transfer::Packing;

std::byte* bytes_at(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

std::span<const std::byte> span_at(uintptr_t address, size_t bytes) {
  return {bytes_at(address), bytes};
}

// Copies, packs or unpacks from end to end. Lost bytes that it writes are whole again, unless
// memory fails meanwhile. Lists are given as (addresses, sizes).
template <typename Copy>
void copy_whole(std::span<const std::byte> target, std::span<const std::byte> source,
                const Copy& copy) {
  check_memory([&](LostParts& lost) { lost.add(source); });
  if (os::any_loss()) os::settle(target);
  copy();
  check_memory([&](LostParts& lost) {
    lost.add(source);
    lost.add(target);
  });
}

size_t plain_bytes(const Packing& packing, size_t count) {
  return count * transfer::element_bytes(packing.element());
}

void bind_packing(py::module_& module) {
  py::enum_<Code>(module, "Code").value("int4", Code::kInt4).value("fp8", Code::kFp8);
  py::enum_<Element>(module, "Element")
      .value("float16", Element::kFloat16)
      .value("bfloat16", Element::kBfloat16)
      .value("float32", Element::kFloat32);
  py::class_<Packing>(module, "Packing")
      .def(py::init<Code, Element, size_t>(), py::arg("code"), py::arg("element"),
           py::arg("group_elements"))
      .def("code_bytes", &Packing::code_bytes, py::arg("count"))
      .def("packed_bytes", &Packing::packed_bytes, py::arg("count"))
      .def(
          "pack",
          [](const Packing& packing, uintptr_t target, uintptr_t source, size_t count) {
            copy_whole(span_at(target, packing.packed_bytes(count)),
                       span_at(source, plain_bytes(packing, count)),
                       [&] { packing.pack(bytes_at(target), bytes_at(source), count); });
          },
          py::kw_only(), py::arg("target"), py::arg("source"), py::arg("count"),
          py::call_guard<Unlocked>())
      .def(
          "unpack",
          [](const Packing& packing, uintptr_t target, uintptr_t source, size_t count) {
            copy_whole(span_at(target, plain_bytes(packing, count)),
                       span_at(source, packing.packed_bytes(count)),
                       [&] { packing.unpack(bytes_at(target), bytes_at(source), count); });
          },
          py::kw_only(), py::arg("target"), py::arg("source"), py::arg("count"),
          py::call_guard<Unlocked>());
}

// Returns (from bytes, past the caches, threads) of every rule.
using RuleRows = std::vector<std::tuple<size_t, bool, size_t>>;

std::vector<CopyRule> rules_of(const RuleRows& rows) {
  std::vector<CopyRule> rules;
  for (const auto& [from, non_temporal, threads] : rows) {
    rules.push_back({from, {non_temporal, threads}});
  }
  return rules;
}

RuleRows rows_of(const std::vector<CopyRule>& rules) {
  RuleRows rows;
  for (const CopyRule& rule : rules) {
    rows.emplace_back(rule.from_bytes, rule.way.non_temporal, rule.way.threads);
  }
  return rows;
}

// `targets`, `sources` and `sizes` are addresses of arrays of 64-bit numbers.
void copy_host_blocks(HostCopier& copier, uintptr_t targets, uintptr_t sources, uintptr_t sizes,
                      size_t count) {
  const std::span<const uint64_t> to(reinterpret_cast<const uint64_t*>(targets), count);
  const std::span<const uint64_t> from(reinterpret_cast<const uint64_t*>(sources), count);
  const std::span<const size_t> bytes(reinterpret_cast<const size_t*>(sizes), count);
  check_memory([&](LostParts& lost) {
    for (size_t i = 0; i < count; ++i) lost.add(span_at(from[i], bytes[i]));
  });
  if (os::any_loss()) {
    for (size_t i = 0; i < count; ++i) os::settle(span_at(to[i], bytes[i]));
  }
  copier.copy_blocks(to, from, bytes);
  check_memory([&](LostParts& lost) {
    for (size_t i = 0; i < count; ++i) {
      lost.add(span_at(from[i], bytes[i]));
      lost.add(span_at(to[i], bytes[i]));
    }
  });
}

// Returns the range from the lowest to the highest byte. Strides are in bytes.
std::span<const std::byte> strided_span(uintptr_t address, const std::vector<size_t>& shape,
                                        const std::vector<ptrdiff_t>& strides,
                                        size_t element_bytes) {
  ptrdiff_t low = 0;
  ptrdiff_t high = 0;
  for (size_t i = 0; i < shape.size() && i < strides.size(); ++i) {
    if (shape[i] == 0) return {};
    const ptrdiff_t reach = static_cast<ptrdiff_t>(shape[i] - 1) * strides[i];
    (reach < 0 ? low : high) += reach;
  }
  return {bytes_at(address) + low, static_cast<size_t>(high - low) + element_bytes};
}

void copy_strided(HostCopier& copier, uintptr_t target, uintptr_t source, std::vector<size_t> shape,
                  std::vector<ptrdiff_t> target_strides, std::vector<ptrdiff_t> source_strides,
                  size_t element_bytes) {
  // What lies between the elements counts as well. An earlier loss in the target stays written
  // down, since nobody knows whether all of it is overwritten.
  const auto to = strided_span(target, shape, target_strides, element_bytes);
  const auto from = strided_span(source, shape, source_strides, element_bytes);
  const uint64_t before = os::loss_count();
  check_memory([&](LostParts& lost) { lost.add(from); });
  copier.copy_strided(
      bytes_at(target), bytes_at(source),
      {std::move(shape), std::move(target_strides), std::move(source_strides), element_bytes});
  if (os::loss_count() == before) return;
  check_memory([&](LostParts& lost) {
    lost.add(from);
    lost.add(to);
  });
}

// A contender is (past the caches, threads); none means the copier's own choice.
std::vector<std::vector<double>> time_by_rows(
    HostCopier& copier, uintptr_t target, uintptr_t source, size_t room, size_t bytes,
    const std::vector<std::optional<std::pair<bool, size_t>>>& contenders, int rounds,
    double sample_s) {
  std::vector<transfer::CopyContender> ways;
  for (const auto& each : contenders) {
    if (each && (each->second == 0 || each->second > copier.threads())) {
      throw InvalidArgument("time copies with " + std::to_string(each->second) +
                            " threads: the copier has " + std::to_string(copier.threads()));
    }
    ways.push_back(each ? transfer::CopyContender{false, {each->first, each->second}}
                        : transfer::CopyContender{true, {}});
  }
  return transfer::time_copies(copier, {bytes_at(target), room}, {bytes_at(source), room}, bytes,
                               ways, rounds, sample_s);
}

std::pair<std::vector<double>, std::vector<double>> time_block_lists(HostCopier& copier,
                                                                     uintptr_t targets,
                                                                     uintptr_t sources,
                                                                     uintptr_t sizes, size_t count,
                                                                     size_t job, int rounds) {
  transfer::BlockSamples samples =
      transfer::time_blocks(copier, {reinterpret_cast<const uint64_t*>(targets), count},
                            {reinterpret_cast<const uint64_t*>(sources), count},
                            {reinterpret_cast<const size_t*>(sizes), count}, job, rounds);
  return {std::move(samples.own), std::move(samples.memcpys)};
}

void bind_host_copy(py::module_& module) {
  py::class_<HostCopier, std::shared_ptr<HostCopier>>(module, "HostCopier")
      .def(
          py::init([](const std::vector<int>& cpus, const RuleRows& rules, const std::string& isa) {
            return std::shared_ptr<HostCopier>(
                new HostCopier(cpus, rules_of(rules), isa.empty() ? best_isa() : parse_isa(isa)),
                WithoutGil());
          }),
          py::arg("helper_cpus"), py::arg("rules"), py::arg("isa") = "", py::call_guard<Unlocked>())
      .def_static(
          "default_rules",
          [](size_t threads) { return rows_of(HostCopier::default_rules(threads)); },
          py::arg("threads"))
      .def_property_readonly("threads", &HostCopier::threads)
      .def_property_readonly("rules",
                             [](const HostCopier& copier) { return rows_of(copier.rules()); })
      .def(
          "copy",
          [](HostCopier& copier, uintptr_t target, uintptr_t source, size_t bytes) {
            copy_whole(span_at(target, bytes), span_at(source, bytes),
                       [&] { copier.copy(bytes_at(target), bytes_at(source), bytes); });
          },
          py::kw_only(), py::arg("target"), py::arg("source"), py::arg("nbytes"),
          py::call_guard<Unlocked>())
      .def("copy_blocks", &copy_host_blocks, py::kw_only(), py::arg("targets"), py::arg("sources"),
           py::arg("sizes"), py::arg("count"), py::call_guard<Unlocked>())
      .def("copy_strided", &copy_strided, py::kw_only(), py::arg("target"), py::arg("source"),
           py::arg("shape"), py::arg("target_strides"), py::arg("source_strides"),
           py::arg("element_bytes"), py::call_guard<Unlocked>())
      .def("time_copies", &time_by_rows, py::kw_only(), py::arg("target"), py::arg("source"),
           py::arg("room"), py::arg("nbytes"), py::arg("contenders"), py::arg("rounds"),
           py::arg("sample_s"), py::call_guard<Unlocked>())
      .def("time_blocks", &time_block_lists, py::kw_only(), py::arg("targets"), py::arg("sources"),
           py::arg("sizes"), py::arg("count"), py::arg("job"), py::arg("rounds"),
           py::call_guard<Unlocked>());
}

// A tuple of device, host, bytes, lane and pinned.
using PieceRow = std::tuple<uint64_t, uintptr_t, size_t, Lane, bool>;

std::vector<transfer::Piece> pieces_of(const std::vector<PieceRow>& rows) {
  std::vector<transfer::Piece> pieces;
  for (const auto& [device, host, bytes, lane, pinned] : rows) {
    pieces.push_back({device, bytes_at(host), bytes, lane, pinned});
  }
  return pieces;
}

std::vector<PieceRow> plan_rows(const std::vector<PieceRow>& rows, size_t chunk_bytes,
                                const std::map<Lane, double>& rates) {
  if (chunk_bytes == 0) throw InvalidArgument("plan chunks of 0 bytes");
  std::vector<PieceRow> planned;
  if (rows.empty()) return planned;
  for (const transfer::Piece& chunk : transfer::plan_chunks(pieces_of(rows), chunk_bytes, rates)) {
    planned.emplace_back(chunk.device, reinterpret_cast<uintptr_t>(chunk.host), chunk.bytes,
                         chunk.lane, chunk.pinned);
  }
  return planned;
}

// An engine, and the pinned block that its slots are cut from. The block is destroyed after the
// engine.
class PlacedEngine {
 public:
  PlacedEngine(std::shared_ptr<gpu::GpuDriver> driver, std::shared_ptr<HostCopier> copier,
               std::shared_ptr<memory::PlacedBlock> staging, transfer::EngineOptions options)
      : staging_(std::move(staging)),
        engine_(std::move(driver), std::move(copier),
                staging_ ? staging_->range() : std::span<std::byte>(), std::move(options)) {}
  ~PlacedEngine() {
    if (engine_.in_child() || !staging_) return;
    try {
      engine_.drain();
      // So that dropping the block waits for these streams rather than for the whole GPU.
      for (const gpu::StreamId stream : engine_.streams()) staging_->memory().record_stream(stream);
    } catch (...) {  // without streams, dropping the block waits for the whole GPU
    }
  }
  PlacedEngine(const PlacedEngine&) = delete;
  PlacedEngine& operator=(const PlacedEngine&) = delete;

  transfer::CopyEngine& core() { return engine_; }
  const transfer::CopyEngine& core() const { return engine_; }

 private:
  const std::shared_ptr<memory::PlacedBlock> staging_;
  transfer::CopyEngine engine_;
};

using EngineHolder = std::unique_ptr<PlacedEngine, WithoutGil>;

EngineHolder make_engine(std::shared_ptr<gpu::GpuDriver> driver, std::shared_ptr<HostCopier> copier,
                         std::shared_ptr<memory::PlacedBlock> staging, size_t chunk_bytes,
                         size_t limit_bytes, std::map<Lane, double> rates) {
  return EngineHolder(new PlacedEngine(std::move(driver), std::move(copier), std::move(staging),
                                       {chunk_bytes, limit_bytes, std::move(rates)}));
}

std::map<Lane, std::tuple<uint64_t, uint64_t, uint64_t>> use_of(const PlacedEngine& engine,
                                                                Direction direction) {
  std::map<Lane, std::tuple<uint64_t, uint64_t, uint64_t>> rows;
  for (const auto& [lane, use] : engine.core().use(direction)) {
    rows[lane] = {use.bytes, use.copies, use.staged_bytes};
  }
  return rows;
}

void bind_engine(py::module_& module) {
  py::enum_<Direction>(module, "Direction")
      .value("to_device", Direction::kToDevice)
      .value("to_host", Direction::kToHost);
  py::class_<CopyHandle, std::shared_ptr<CopyHandle>>(module, "CopyHandle")
      .def_property_readonly("nbytes", &CopyHandle::bytes)
      .def("query", &CopyHandle::query, py::call_guard<Unlocked>())
      .def("wait", &CopyHandle::wait, py::call_guard<Unlocked>())
      .def("stream_wait", &CopyHandle::stream_wait, py::arg("stream"), py::call_guard<Unlocked>());
  py::class_<PlacedEngine, EngineHolder>(module, "CopyEngine")
      .def(py::init(&make_engine), py::arg("driver"), py::arg("copier"), py::arg("staging"),
           py::kw_only(), py::arg("chunk_bytes"), py::arg("limit_bytes"), py::arg("rates"),
           py::call_guard<Unlocked>())
      .def(
          "submit",
          [](PlacedEngine& engine, Direction direction, const std::vector<PieceRow>& pieces,
             const std::vector<gpu::StreamId>& after, bool may_wait) {
            if (direction == Direction::kToDevice) {
              check_memory([&](LostParts& lost) {
                for (const PieceRow& row : pieces) {
                  lost.add(span_at(std::get<1>(row), std::get<2>(row)));
                }
              });
            }
            return engine.core().submit(direction, pieces_of(pieces), after, may_wait);
          },
          py::arg("direction"), py::arg("pieces"), py::arg("after"), py::arg("may_wait"),
          py::call_guard<Unlocked>())
      .def(
          "drain", [](PlacedEngine& engine) { engine.core().drain(); }, py::call_guard<Unlocked>())
      .def("use", &use_of, py::arg("direction"), py::call_guard<Unlocked>())
      .def(
          "unfinished_bytes",
          [](const PlacedEngine& engine, Direction direction) {
            return engine.core().unfinished_bytes(direction);
          },
          py::arg("direction"), py::call_guard<Unlocked>())
      .def_property_readonly("in_child",
                             [](const PlacedEngine& engine) { return engine.core().in_child(); })
      .def_property_readonly("streams",
                             [](const PlacedEngine& engine) { return engine.core().streams(); });
  module.def("plan_chunks", &plan_rows, py::arg("pieces"), py::arg("chunk_bytes"), py::arg("rates"),
             "(device, host, bytes, lane, pinned) of every chunk, in order.");
}

}  // namespace

void bind_transfer(py::module_& module) {
  bind_packing(module);
  bind_host_copy(module);
  bind_engine(module);
}

}  // namespace cxl_offload::bindings
