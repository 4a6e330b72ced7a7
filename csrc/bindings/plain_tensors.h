// Tensors of torch, read by their attributes: the core is built without torch.
#ifndef CXL_OFFLOAD_BINDINGS_PLAIN_TENSORS_H_
#define CXL_OFFLOAD_BINDINGS_PLAIN_TENSORS_H_

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>
#include <vector>

#include "bindings/tensor_table.h"
#include "core/tensor_view.h"

namespace cxl_offload::bindings {

// Reads the tensors that nearly every call has: contiguous ones of torch's own classes. All others
// are left to cxl_offload/ops/view.py, which asks the same things again and says why not.
class PlainTensors {
 public:
  // `classes` are torch.Tensor and torch.nn.Parameter, `dtypes` names by torch's dtypes, `strided`
  // the layout of dense tensors, and `table` what TensorTable takes.
  PlainTensors(const pybind11::tuple& classes, const pybind11::dict& dtypes,
               pybind11::object strided, pybind11::handle table);

  // Returns a view of a contiguous tensor in host memory, all of it in its storage. Empty for any
  // other object. Throws what torch does. `storage`, if given, receives what keeps the memory.
  std::optional<TensorView> view(pybind11::handle tensor,
                                 pybind11::object* storage = nullptr) const;

 private:
  std::optional<Dtype> dtype_of(pybind11::handle tensor) const;
  bool is_own_class(pybind11::handle tensor) const;
  std::optional<TensorView> by_attributes(pybind11::handle tensor) const;

  pybind11::tuple classes_;
  std::vector<std::pair<pybind11::object, Dtype>> dtypes_;
  pybind11::object strided_;
  TensorTable table_;
  // Methods of the first class, which the others inherit: found once, not for every tensor.
  pybind11::object is_neg_;
  pybind11::object storage_offset_;
  pybind11::object untyped_storage_;
};

}  // namespace cxl_offload::bindings

#endif  // CXL_OFFLOAD_BINDINGS_PLAIN_TENSORS_H_
