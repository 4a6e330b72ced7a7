#include "kernels/linear_check.h"

#include <string>

#include "core/error.h"

namespace cxl_offload::kernels {
namespace {

constexpr int64_t kGroupCodes = 32;

bool rows_are_contiguous(const TensorView& view) {
  return view.shape[1] < 2 || view.strides[1] == 1;
}

bool is_matrix(const TensorView& view) {
  return view.shape.size() == 2 && rows_are_contiguous(view);
}

int64_t width_of(const Linear& a) { return a.weight.shape[1] * (is_codes(a) ? 2 : 1); }

void check_matrices(const Linear& a) {
  for (const TensorView* view : {&a.x, &a.weight, &a.y}) {
    if (is_matrix(*view)) continue;
    throw InvalidArgument("linear: x, the weights and y must have two dimensions and contiguous " +
                          std::string("rows; one of them is ") + type_and_shape(*view));
  }
  for (const TensorView* view : {&a.x, &a.y}) {
    if (is_written(view->dtype)) continue;
    throw InvalidArgument("linear: x or y is " + dtype_name(view->dtype) +
                          "; give float32, bfloat16 or float16");
  }
  if (a.weight.dtype == Dtype::kFloat8E5m2) {
    throw InvalidArgument("linear: weights of float8_e5m2 have no kernel; give float8_e4m3fn");
  }
  if (a.x.shape[1] != width_of(a)) {
    throw InvalidArgument("linear: x " + type_and_shape(a.x) +
                          " has rows of another width than weights " + type_and_shape(a.weight) +
                          (is_codes(a) ? ", two 4-bit codes a byte" : ""));
  }
  if (a.y.shape[0] != a.x.shape[0] || a.y.shape[1] != a.weight.shape[0]) {
    throw InvalidArgument("linear: y " + type_and_shape(a.y) + " does not fit x " +
                          type_and_shape(a.x) + " and weights " + type_and_shape(a.weight));
  }
}

void check_groups(const Linear& a) {
  const TensorView& groups = a.groups;
  const int64_t width = width_of(a);
  const bool fits = groups.dtype == Dtype::kFloat16 && groups.shape.size() == 3 &&
                    groups.shape[0] == a.weight.shape[0] && groups.shape[2] == 2 &&
                    (groups.numel() == 0 || (groups.data != nullptr && groups.strides[2] == 1 &&
                                             (groups.shape[1] < 2 || groups.strides[1] == 2)));
  if (!fits) {
    throw InvalidArgument("linear: 4-bit codes " + type_and_shape(a.weight) + " with scales " +
                          type_and_shape(groups) +
                          "; give float16 (outputs, groups, 2), the last two contiguous");
  }
  const int64_t count = groups.shape[1];
  if (count > 0 && width % count == 0 && width / count % kGroupCodes == 0) return;
  throw InvalidArgument("linear: " + std::to_string(count) + " groups in a row of " +
                        std::to_string(width) + " codes; a group has a multiple of " +
                        std::to_string(kGroupCodes));
}

void check_scale(const Linear& a) {
  const TensorView& scale = a.scale;
  const bool fits = scale.dtype == Dtype::kFloat32 && scale.shape.size() == 2 &&
                    scale.shape[0] == a.weight.shape[0] && scale.shape[1] > 0 &&
                    width_of(a) % scale.shape[1] == 0;
  if (!fits) {
    throw InvalidArgument("linear: scales " + type_and_shape(scale) + " for weights " +
                          type_and_shape(a.weight) +
                          "; give float32 (outputs, groups), groups dividing a row");
  }
  if (scale.shape[1] > 1 && dtype_bytes(a.weight.dtype) > 1) {
    throw InvalidArgument("linear: scales of groups are for weights of 8 bits, which " +
                          dtype_name(a.weight.dtype) + " is not; give one scale an output");
  }
}

}  // namespace

void check_linear(const Linear& a) {
  check_matrices(a);
  if (is_codes(a)) {
    check_groups(a);
    if (a.scale.data != nullptr) {
      throw InvalidArgument("linear: 4-bit codes have the scales of their groups and no others");
    }
  } else if (a.scale.data != nullptr) {
    check_scale(a);
  }
  if (a.bias.data == nullptr) return;
  if (a.bias.shape.size() == 1 && a.bias.shape[0] == a.weight.shape[0] &&
      is_written(a.bias.dtype) && a.bias.is_contiguous()) {
    return;
  }
  throw InvalidArgument("linear: bias " + type_and_shape(a.bias) + " for weights " +
                        type_and_shape(a.weight) + "; give one contiguous number an output");
}

}  // namespace cxl_offload::kernels
