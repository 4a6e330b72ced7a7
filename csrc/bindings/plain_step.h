// A step of an optimizer whose tensors are all plain, read from torch in one call: in Python every
// parameter takes longer than a small one takes to update.
#ifndef CXL_OFFLOAD_BINDINGS_PLAIN_STEP_H_
#define CXL_OFFLOAD_BINDINGS_PLAIN_STEP_H_

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/plain_tensors.h"
#include "bindings/updates.h"

namespace cxl_offload::bindings {

// What holds for all parameters of a step.
struct StepSettings {
  std::vector<pybind11::str> names;        // of states in a parameter's dict
  std::vector<pybind11::str> scale_names;  // of their scales, where they are codes of 8 bits
  pybind11::function rule;                 // of a group, the step's number and grad_scale
  pybind11::object grad_scale;             // a number
  std::optional<uint64_t> seed;            // of what is rounded at random
  bool is_exact = false;                   // states are float32, as float32 parameters are then
};

// A parameter that has a gradient, as a row of `Given` in cxl_offload/ops/update.py.
struct StepOfOne {
  pybind11::object param;
  pybind11::object group;  // a dict
  pybind11::object copy;   // a tensor or None
  pybind11::object state;  // a dict
};

class PlainStep {
 public:
  void reserve(size_t params) { updates_.all.reserve(params); }

  // Adds the update of a parameter. Returns false, and the whole is good for nothing then, if its
  // tensors are not plain, or its state has not all of them and a `step` of float32 that can be
  // counted on. Throws what `rule` does.
  bool add(const PlainTensors& plain, const StepSettings& settings, const StepOfOne& one);

  const Updates& updates() const { return updates_; }
  // Writes to each step that there is one more, and tells autograd of all tensors that changed.
  // `increment` is torch's function that does so for a list of them.
  void finish(const pybind11::function& increment) const;

 private:
  struct Counted {
    float* value;
    int64_t step;
  };

  const kernels::UpdateRule& rule_of(const StepSettings& settings, const pybind11::object& group,
                                     int64_t step);

  Updates updates_;
  std::vector<Counted> steps_;
  std::map<std::pair<PyObject*, int64_t>, kernels::UpdateRule> rules_;
  // Both keep what the kernels read and write.
  std::vector<pybind11::object> grads_;
  pybind11::list written_;
};

}  // namespace cxl_offload::bindings

#endif  // CXL_OFFLOAD_BINDINGS_PLAIN_STEP_H_
