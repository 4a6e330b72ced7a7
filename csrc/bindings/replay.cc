#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "core/error.h"
#include "replay/sharing.h"
#include "replay/steps.h"

namespace cxl_offload::bindings {
namespace {

namespace py = pybind11;

template <class T>
using Array = py::array_t<T, py::array::c_style>;

template <class T>
std::span<const T> read_only(const Array<T>& array) {
  return {array.data(), static_cast<size_t>(array.size())};
}

template <class T>
std::span<T> writable(Array<T>& array) {
  return {array.mutable_data(), static_cast<size_t>(array.size())};
}

py::tuple run(const Array<double>& setup_s, const Array<double>& alone_s,
              const Array<int64_t>& demand_begins, const Array<int32_t>& resources,
              const Array<double>& shares, const Array<int64_t>& queue_begins,
              const Array<int64_t>& step_begins, const std::vector<double>& losses) {
  const replay::Jobs jobs{read_only(setup_s),    read_only(alone_s), read_only(demand_begins),
                          read_only(resources),  read_only(shares),  read_only(queue_begins),
                          read_only(step_begins)};
  Array<double> starts(setup_s.size());
  Array<double> ends(setup_s.size());
  Array<double> lengths(step_begins.size() > 0 ? step_begins.size() - 1 : 0);
  const replay::Times times{writable(starts), writable(ends), writable(lengths)};
  {
    const Unlocked unlocked;
    replay::run_steps(jobs, losses, times);
  }
  return py::make_tuple(starts, ends, lengths);
}

std::vector<double> speeds(const std::vector<std::vector<std::pair<int32_t, double>>>& jobs,
                           const std::vector<double>& losses) {
  std::vector<std::vector<int32_t>> resources(jobs.size());
  std::vector<std::vector<double>> shares(jobs.size());
  std::vector<replay::Demand> demands;
  for (size_t at = 0; at < jobs.size(); ++at) {
    for (const auto& [resource, share] : jobs[at]) {
      if (resource < 0 || static_cast<size_t>(resource) >= losses.size() || !(share > 0)) {
        throw InvalidArgument("share_resources: a resource without a loss, or a share of 0");
      }
      resources[at].push_back(resource);
      shares[at].push_back(share);
    }
    demands.push_back({resources[at], shares[at]});
  }
  std::vector<double> found(jobs.size());
  replay::Sharing(losses).speeds(demands, found);
  return found;
}

}  // namespace

void bind_replay(py::module_& module) {
  module.def("run_steps", &run, py::kw_only(), py::arg("setup_s").noconvert(),
             py::arg("alone_s").noconvert(), py::arg("demand_begins").noconvert(),
             py::arg("resources").noconvert(), py::arg("shares").noconvert(),
             py::arg("queue_begins").noconvert(), py::arg("step_begins").noconvert(),
             py::arg("losses"), "Begins and ends of jobs, lengths of steps; see replay/steps.h.");
  module.def("share_resources", &speeds, py::arg("jobs"), py::arg("losses"),
             "Speeds of jobs, each a list of (resource, share); see replay/sharing.h.");
}

}  // namespace cxl_offload::bindings
