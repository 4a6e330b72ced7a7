#include "bindings/settings.h"

#include <limits>
#include <optional>
#include <vector>

#include "bindings/attributes.h"
#include "bindings/bind.h"
#include "core/error.h"
#include "kernels/update.h"
#include "kernels/update_check.h"

namespace cxl_offload::bindings {
namespace {

namespace py = pybind11;

constexpr py::ssize_t kShownCharacters = 80;

std::string shown(py::handle given) {
  const py::object words = py::repr(given).attr("split")();
  const py::str line = py::str(" ").attr("join")(words);
  return line[py::slice(0, kShownCharacters, 1)].cast<std::string>();
}

[[noreturn]] void refuse(const std::string& name, py::handle given, const std::string& wanted) {
  throw py::type_error("update: " + name + " is " + shown(given) + "; it must be " + wanted);
}

bool is_text(py::handle given) {
  return PyUnicode_Check(given.ptr()) != 0 || PyBytes_Check(given.ptr()) != 0;
}

std::string text_of(py::handle name) { return name.cast<std::string>(); }

bool equals(py::handle given, int value) { return given.equal(py::int_(value)); }

bool flag_of(py::handle name, py::handle given) {
  if (given.ptr() == Py_True || given.ptr() == Py_False) return given.ptr() == Py_True;
  const bool is_switch =
      !is_text(given) && !given.is_none() && (equals(given, 0) || equals(given, 1));
  if (!is_switch) refuse(text_of(name), given, "true or false");
  return equals(given, 1);
}

// Returns what Python's float() does; infinity for a whole number beyond double; or nothing.
std::optional<double> float_of(py::handle given) {
  if (is_text(given)) return std::nullopt;  // float() would read it
  PyObject* made = PyNumber_Float(given.ptr());
  if (made != nullptr) return py::reinterpret_steal<py::float_>(made).cast<double>();
  const bool is_beyond = PyErr_ExceptionMatches(PyExc_OverflowError) != 0;
  const bool is_none = PyErr_ExceptionMatches(PyExc_TypeError) != 0 ||
                       PyErr_ExceptionMatches(PyExc_ValueError) != 0 ||
                       PyErr_ExceptionMatches(PyExc_RuntimeError) != 0;
  if (!is_beyond && !is_none) throw py::error_already_set();
  PyErr_Clear();
  if (is_beyond) return std::numeric_limits<double>::infinity();
  return std::nullopt;
}

// Reads no more than one number too many: somebody may give numbers without end.
std::vector<py::object> first_three(py::handle given) {
  std::vector<py::object> found;
  const auto numbers = py::reinterpret_steal<py::object>(PyObject_GetIter(given.ptr()));
  while (numbers && found.size() < 3) {
    PyObject* next = PyIter_Next(numbers.ptr());
    if (next == nullptr) break;
    found.push_back(py::reinterpret_steal<py::object>(next));
  }
  if (PyErr_Occurred() == nullptr) return found;
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0 &&
      PyErr_ExceptionMatches(PyExc_ValueError) == 0) {
    throw py::error_already_set();
  }
  PyErr_Clear();
  return {};
}

struct SettingNames {
  Name lr{"lr"};
  Name betas{"betas"};
  Name eps{"eps"};
  Name weight_decay{"weight_decay"};
  Name decoupled{"decoupled_weight_decay"};
  Name bias_correction{"bias_correction"};
  Name lr_decay{"lr_decay"};
  Name maximize{"maximize"};
};

const SettingNames& names() {
  static const SettingNames all;
  return all;
}

// Returns by what gradients are multiplied: also by -1 where the way is up.
double scale_of(const Settings& settings, py::handle grad_scale) {
  const double scale = number_of("grad_scale", grad_scale);
  return settings.flag(names().maximize, false) ? -scale : scale;
}

template <class R>
R checked(R rule) {
  kernels::check_rule(rule);
  return rule;
}

// Returns which step it is. kernels::check_rule() refuses those before the first.
int64_t step_of(const py::object& given) {
  const auto index = py::reinterpret_steal<py::int_>(PyNumber_Index(given.ptr()));
  const int64_t step = index ? PyLong_AsLongLong(index.ptr()) : -1;
  if (PyErr_Occurred() == nullptr) return step;
  if (PyErr_ExceptionMatches(PyExc_TypeError) == 0 &&
      PyErr_ExceptionMatches(PyExc_OverflowError) == 0) {
    throw py::error_already_set();
  }
  PyErr_Clear();
  refuse("step", given, "a whole number of steps, from 1");
}

kernels::Adam adam(const py::dict& group, const py::object& step, const py::object& grad_scale) {
  const Settings settings(group);
  const auto [beta1, beta2] = settings.betas();
  return checked(kernels::Adam{
      step_of(step), settings.number(names().lr), beta1, beta2, settings.number(names().eps),
      settings.number(names().weight_decay), settings.flag(names().decoupled),
      settings.flag(names().bias_correction), scale_of(settings, grad_scale)});
}

kernels::Adagrad adagrad(const py::dict& group, const py::object& step,
                         const py::object& grad_scale) {
  const Settings settings(group);
  return checked(kernels::Adagrad{step_of(step), settings.number(names().lr),
                                  settings.number(names().lr_decay), settings.number(names().eps),
                                  settings.number(names().weight_decay),
                                  scale_of(settings, grad_scale)});
}

// The step does not count.
kernels::Lion lion(const py::dict& group, const py::object& /*step*/,
                   const py::object& grad_scale) {
  const Settings settings(group);
  const auto [beta1, beta2] = settings.betas();
  return checked(kernels::Lion{settings.number(names().lr), beta1, beta2,
                               settings.number(names().weight_decay),
                               scale_of(settings, grad_scale)});
}

template <class R, class Make>
void bind_rule(py::module_& module, const char* name, Make make) {
  py::class_<R>(module, name)
      .def(py::init(make), py::arg("group"), py::arg("step"), py::arg("grad_scale") = 1.0,
           "Of one step with the settings of a group.");
}

}  // namespace

py::object Settings::at(py::handle name) const {
  py::object found = item_of(given_, name);
  if (!found) {
    throw InvalidArgument("update: " + text_of(name) +
                          " is missing; put it back into the group of parameters");
  }
  return found;
}

double Settings::number(py::handle name) const {
  const py::object given = at(name);
  if (PyFloat_CheckExact(given.ptr()) != 0) return PyFloat_AS_DOUBLE(given.ptr());
  return number_of(text_of(name), given);
}

bool Settings::flag(py::handle name) const { return flag_of(name, at(name)); }

bool Settings::flag(py::handle name, bool by_default) const {
  const py::object given = item_of(given_, name);
  return given ? flag_of(name, given) : by_default;
}

std::pair<double, double> Settings::betas() const {
  const py::object given = at(names().betas);
  const std::vector<py::object> found = first_three(given);
  if (found.size() != 2) refuse("betas", given, "two numbers, such as (0.9, 0.999)");
  return {number_of("beta1", found[0]), number_of("beta2", found[1])};
}

double number_of(const std::string& name, py::handle given) {
  const std::optional<double> value = float_of(given);
  if (!value) refuse(name, given, "a number");
  return *value;
}

void bind_settings(py::module_& module) {
  bind_rule<kernels::Adam>(module, "AdamRule", &adam);
  bind_rule<kernels::Adagrad>(module, "AdagradRule", &adagrad);
  bind_rule<kernels::Lion>(module, "LionRule", &lion);
  module.def(
      "number",
      [](const py::dict& settings, const py::str& name) {
        const double value = Settings(settings).number(name);
        kernels::check_held(std::string(name).c_str(), value);
        return value;
      },
      py::arg("settings"), py::arg("name"),
      "The number of a setting, also one in a tensor, that float32 can hold.");
  module.def(
      "flag",
      [](const py::dict& settings, const py::str& name) { return Settings(settings).flag(name); },
      py::arg("settings"), py::arg("name"), "Whether a setting is on.");
}

}  // namespace cxl_offload::bindings
