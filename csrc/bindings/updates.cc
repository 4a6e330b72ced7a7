#include "bindings/updates.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/bind.h"
#include "bindings/lost.h"
#include "bindings/plain_tensors.h"
#include "kernels/update.h"
#include "kernels/update_check.h"

namespace cxl_offload::bindings {
namespace {

namespace py = pybind11;

using kernels::WorkerTeam;
using SeedAndStep = std::optional<std::pair<uint64_t, int64_t>>;

// `copy` is only written. After that a part of it may be lost too.
void refuse_lost(const Updates& given, bool is_done) {
  const std::vector<kernels::Update>& updates = given.all;
  check_memory([&](LostParts& lost) {
    if (!is_done) kernels::check_updates(updates, given.counts);
    for (const kernels::Update& update : updates) {
      lost.add(update.param);
      lost.add(update.grad);
      for (const TensorView& state : update.states) lost.add(state);
      for (const TensorView& scale : update.scales) lost.add(scale);
      if (update.copy && is_done) lost.add(*update.copy);
    }
  });
}

kernels::Update made(kernels::UpdateRule rule, TensorView param, TensorView grad,
                     std::vector<TensorView> states, std::optional<TensorView> copy,
                     std::vector<TensorView> scales, const SeedAndStep& rounding) {
  kernels::Update update{std::move(rule), std::move(param),  std::move(grad), std::move(states),
                         std::move(copy), std::move(scales), std::nullopt};
  if (rounding) update.rounding = kernels::Rounding{rounding->first, rounding->second};
  return update;
}

std::vector<py::object> objects_in(const py::sequence& given) {
  std::vector<py::object> objects;
  for (const py::handle each : given) objects.push_back(py::reinterpret_borrow<py::object>(each));
  return objects;
}

// Returns what cxl_offload/ops/update.py would make of its ParamUpdates one by one; or None, if it
// has to look at one of them itself.
std::optional<Updates> plain_updates(const PlainTensors& plain, const py::sequence& rows) {
  Updates updates;
  updates.all.reserve(py::len(rows));
  for (const py::handle each : rows) {
    const auto row = each.cast<py::tuple>();
    // A ParamUpdate of cxl_offload/ops/update.py.
    kernels::Update& update = updates.all.emplace_back();
    update.rule = row[0].cast<kernels::UpdateRule>();
    const auto rounding = row[6].cast<SeedAndStep>();
    if (rounding) update.rounding = kernels::Rounding{rounding->first, rounding->second};
    std::vector<py::object> states;
    for (const py::handle state : row[3]) states.push_back(state.cast<py::tuple>()[1]);
    const UpdateTensors tensors{row[1], row[2], states, objects_in(row[5]), row[4]};
    if (!tensors.read(plain, update, updates.storages)) return std::nullopt;
  }
  return updates;
}

void run_all(const Updates& given, WorkerTeam& team, const std::string& isa,
             const std::shared_ptr<os::Kernel>& kernel, const std::vector<py::object>& then) {
  const std::vector<kernels::Update>& updates = given.all;
  {
    const Unlocked released;
    refuse_lost(given, false);
    for (const kernels::Update& update : updates) {
      if (update.copy) settle(*update.copy);
    }
    kernels::run_updates(updates, team,
                         {isa.empty() ? best_isa() : parse_isa(isa), kernel.get(), given.counts});
  }
  for (const py::object& call : then) call();
  refuse_lost(given, true);
}

}  // namespace

bool UpdateTensors::read(const PlainTensors& plain, kernels::Update& update,
                         std::vector<py::object>& storages) const {
  using enum Dtype;
  const auto one = [&](const py::object& tensor, std::initializer_list<Dtype> types,
                       TensorView& view) {
    std::optional<TensorView> found = plain.view(tensor, &storages.emplace_back());
    if (!found || std::ranges::find(types, found->dtype) == types.end()) return false;
    view = std::move(*found);
    return true;
  };
  if (!one(param, {kFloat32, kBfloat16, kFloat16}, update.param)) return false;
  if (!one(grad, {kFloat32, kBfloat16, kFloat16}, update.grad)) return false;
  update.states.reserve(states.size());
  for (const py::object& each : states) {
    TensorView& state = update.states.emplace_back();
    const bool fits =
        scales.empty() ? one(each, {kFloat32, kBfloat16}, state) : one(each, {kUint8}, state);
    if (!fits || state.shape != update.param.shape) return false;
  }
  for (const py::object& each : scales) {
    if (!one(each, {kUint8}, update.scales.emplace_back())) return false;
  }
  if (!copy.is_none() && !one(copy, {kBfloat16, kFloat16}, update.copy.emplace())) return false;
  return update.grad.shape == update.param.shape &&
         (!update.copy || update.copy->shape == update.param.shape);
}

void bind_updates(py::module_& module) {
  py::class_<kernels::Update>(module, "Update")
      .def(py::init(&made), py::arg("rule"), py::arg("param"), py::arg("grad"), py::arg("states"),
           py::arg("copy") = py::none(), py::kw_only(),
           py::arg("scales") = std::vector<TensorView>{}, py::arg("rounding") = py::none(),
           "`rounding` is (seed, step); see kernels/update.h.");
  py::class_<Updates>(module, "Updates")
      .def(py::init(
               [](std::vector<kernels::Update> updates) { return Updates{std::move(updates)}; }),
           py::arg("updates"))
      .def(
          "count_at",
          [](Updates& updates, uintptr_t address, size_t bytes) {
            updates.counts.push_back({address, address + bytes});
          },
          py::arg("address"), py::arg("nbytes"), "A step is counted there when all is written.")
      .def("__len__", [](const Updates& updates) { return updates.all.size(); });
  py::implicitly_convertible<py::list, Updates>();
  module.def("plain_updates", plain_updates, py::arg("plain"), py::arg("rows"),
             "Updates of tensors that are plain, of fitting types and of one shape; or None.");
  module.def("run_updates", run_all, py::arg("updates"), py::arg("team"), py::kw_only(),
             py::arg("isa") = "", py::arg("kernel") = py::none(),
             py::arg("then") = std::vector<py::object>{},
             "See kernels/update.h. Calls `then` when everything is written: built-in functions "
             "run without a look at signals in between, so that a handler that raises finds both "
             "or neither.");
}

}  // namespace cxl_offload::bindings
