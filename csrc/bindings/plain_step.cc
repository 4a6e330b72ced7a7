#include "bindings/plain_step.h"

#include <pybind11/stl.h>

#include <cmath>
#include <memory>

#include "bindings/attributes.h"
#include "bindings/bind.h"

namespace cxl_offload::bindings {
namespace {

namespace py = pybind11;

// Steps beyond are left to Python, which says what is wrong with them.
constexpr float kMostSteps = 0x1p62f;

bool add_items(const py::object& dict, const std::vector<py::str>& names,
               std::vector<py::object>& items) {
  for (const py::str& name : names) {
    if (!items.emplace_back(item_of(dict, name))) return false;
  }
  return true;
}

struct StepNames {
  Name grad{"grad"};
  Name step{"step"};
  Name is_inference{"is_inference"};
};

const StepNames& step_names() {
  static const StepNames all;
  return all;
}

bool is_for_inference(py::handle tensor) {
  return call(tensor, step_names().is_inference).ptr() == Py_True;
}

// Returns where a step is counted, or null if Python has to look at it.
float* counter_of(const PlainTensors& plain, const py::object& held, py::object& storage) {
  const std::optional<TensorView> view = plain.view(held, &storage);
  if (!view || view->dtype != Dtype::kFloat32 || view->numel() != 1) return nullptr;
  return reinterpret_cast<float*>(view->data);
}

}  // namespace

const kernels::UpdateRule& PlainStep::rule_of(const StepSettings& settings, const py::object& group,
                                              int64_t step) {
  const std::pair key(group.ptr(), step);
  const auto known = rules_.find(key);
  if (known != rules_.end()) return known->second;
  const py::object rule = settings.rule(group, step, settings.grad_scale);
  return rules_.emplace(key, rule.cast<kernels::UpdateRule>()).first->second;
}

bool PlainStep::add(const PlainTensors& plain, const StepSettings& settings, const StepOfOne& one) {
  const py::object held = item_of(one.state, step_names().step.ptr());
  UpdateTensors tensors{one.param, attribute(one.param, step_names().grad), {}, {}, one.copy};
  if (!held || !add_items(one.state, settings.names, tensors.states) ||
      !add_items(one.state, settings.scale_names, tensors.scales)) {
    return false;
  }
  float* value = counter_of(plain, held, updates_.storages.emplace_back());
  if (value == nullptr || !(*value >= 0 && *value < kMostSteps)) return false;
  if (*value != std::floor(*value)) return false;
  const int64_t step = static_cast<int64_t>(*value) + 1;
  kernels::Update& update = updates_.all.emplace_back();
  update.rule = rule_of(settings, one.group, step);
  if (!tensors.read(plain, update, updates_.storages)) return false;
  const bool is_rounded = !settings.is_exact || update.param.dtype != Dtype::kFloat32;
  if (settings.seed && is_rounded) update.rounding = kernels::Rounding{*settings.seed, step};
  grads_.push_back(std::move(tensors.grad));
  written_.append(held);
  written_.append(tensors.param);
  for (const py::object& each : tensors.states) written_.append(each);
  for (const py::object& each : tensors.scales) written_.append(each);
  if (!tensors.copy.is_none()) written_.append(tensors.copy);
  steps_.push_back({value, step});
  const auto address = reinterpret_cast<uintptr_t>(value);
  updates_.counts.push_back({address, address + sizeof(float)});
  return true;
}

void PlainStep::finish(const py::function& increment) const {
  for (const Counted& each : steps_) *each.value = static_cast<float>(each.step);
  try {
    increment(written_);
  } catch (py::error_already_set&) {  // tensors made for inference have no versions
    py::list others;
    for (const py::handle each : written_) {
      if (!is_for_inference(each)) others.append(each);
    }
    increment(others);
  }
}

namespace {

std::unique_ptr<PlainStep> plain_step(const PlainTensors& plain, const py::object& states,
                                      const py::sequence& given, const StepSettings& settings) {
  if (PyDict_Check(states.ptr()) == 0) return nullptr;
  auto step = std::make_unique<PlainStep>();
  step->reserve(py::len(given));
  for (const py::handle each : given) {
    const auto row = each.cast<py::tuple>();
    const StepOfOne one{row[0], row[1], row[2], item_of(states, row[0])};
    // A class of its own may have other values than its dict.
    if (!one.state || PyDict_CheckExact(one.state.ptr()) == 0) return nullptr;
    if (!step->add(plain, settings, one)) return nullptr;
  }
  return step;
}

}  // namespace

void bind_plain_step(py::module_& module) {
  py::class_<PlainStep>(module, "PlainStep")
      .def_property_readonly(
          "updates", [](const PlainStep& step) -> const Updates& { return step.updates(); },
          py::return_value_policy::reference_internal)
      .def("finish", &PlainStep::finish, py::arg("increment"),
           "Counts the steps, and calls torch's function of what was written.");
  module.def(
      "plain_step",
      [](const PlainTensors& plain, const py::object& states, const py::sequence& given,
         py::function rule, py::object grad_scale, std::vector<py::str> names,
         std::vector<py::str> scale_names, std::optional<uint64_t> seed, bool is_exact) {
        return plain_step(plain, states, given,
                          {std::move(names), std::move(scale_names), std::move(rule),
                           std::move(grad_scale), seed, is_exact});
      },
      py::arg("plain"), py::arg("states"), py::arg("given"), py::kw_only(), py::arg("rule"),
      py::arg("grad_scale"), py::arg("names"), py::arg("scale_names"), py::arg("seed"),
      py::arg("is_exact"),
      "The step of parameters that are all plain, or None; see bindings/plain_step.h.");
}

}  // namespace cxl_offload::bindings
