// Updates of optimizers on their way from tensors of torch to the kernels.
#ifndef CXL_OFFLOAD_BINDINGS_UPDATES_H_
#define CXL_OFFLOAD_BINDINGS_UPDATES_H_

#include <pybind11/pybind11.h>

#include <vector>

#include "bindings/plain_tensors.h"
#include "kernels/update.h"
#include "kernels/update_check.h"

namespace cxl_offload::bindings {

// The updates of a call. Python holds them as one object: as many would take longer to hand over
// than small tensors to update.
struct Updates {
  std::vector<kernels::Update> all;
  std::vector<kernels::CountRange> counts = {};  // where steps are counted when all is written
  // Keep the memory where another thread gives a tensor other memory meanwhile.
  std::vector<pybind11::object> storages = {};
};

// The tensors of one update. Scales are as many as states where those are codes of 8 bits, else
// there are none; `copy` is a tensor or None.
struct UpdateTensors {
  pybind11::object param;
  pybind11::object grad;
  std::vector<pybind11::object> states;
  std::vector<pybind11::object> scales;
  pybind11::object copy;

  // Puts their views into `update`, and what keeps their memory into `storages`. Returns false for
  // tensors that are not plain, of types that updates cannot have, or of several shapes; `update`
  // is good for nothing then.
  bool read(const PlainTensors& plain, kernels::Update& update,
            std::vector<pybind11::object>& storages) const;
};

}  // namespace cxl_offload::bindings

#endif  // CXL_OFFLOAD_BINDINGS_UPDATES_H_
