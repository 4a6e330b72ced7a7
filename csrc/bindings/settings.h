// Settings of optimizers, as a group of parameters has them: read by name, and refused by it.
#ifndef CXL_OFFLOAD_BINDINGS_SETTINGS_H_
#define CXL_OFFLOAD_BINDINGS_SETTINGS_H_

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

namespace cxl_offload::bindings {

// Whether a number is in the range of its setting is for kernels/update_check.h.
class Settings {
 public:
  explicit Settings(pybind11::dict given) : given_(std::move(given)) {}

  // All throw Python's TypeError for what is no such setting and ValueError where it is missing.
  double number(pybind11::handle name) const;  // also one in a tensor
  bool flag(pybind11::handle name) const;      // true or false, or 1 or 0 for them
  bool flag(pybind11::handle name, bool by_default) const;
  std::pair<double, double> betas() const;

 private:
  // Holds what it returns: reading it may run code that takes it out of the group.
  pybind11::object at(pybind11::handle name) const;

  pybind11::dict given_;
};

// The number that `given` is. Throws TypeError by `name` if it is none, as a text is.
double number_of(const std::string& name, pybind11::handle given);

}  // namespace cxl_offload::bindings

#endif  // CXL_OFFLOAD_BINDINGS_SETTINGS_H_
