#include "kernels/norm.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "kernels/norm_pass.h"
#include "kernels/work_queues.h"

namespace cxl_offload::kernels {
namespace {

// With fewer elements than this, waking threads would take longer than the work.
constexpr size_t kFewestNormElements = size_t{128} << 10;
// A thread takes about so many elements at a time.
constexpr size_t kNormUnitElements = size_t{32} << 10;

NormPass find_norm_pass(Dtype dtype, Isa isa) {
  constexpr OfIsa<NormPass (*)(Dtype)> kEach{norm_pass_scalar, norm_pass_neon, norm_pass_sve256,
                                             norm_pass_avx2, norm_pass_avx512};
  return kEach.at(isa)(dtype);
}

// Some of the rows.
struct RowRange {
  size_t begin = 0;
  size_t end = 0;
};

}  // namespace

void check_norm(const Norm& a) {
  const bool is_matrix = a.x.shape.size() == 2 && (a.x.shape[1] < 2 || a.x.strides[1] == 1);
  if (!is_matrix || !is_written(a.x.dtype)) {
    throw InvalidArgument("rms_norm: x is " + type_and_shape(a.x) +
                          "; give (rows, width) of float32, bfloat16 or float16, a row contiguous");
  }
  if (a.weight.dtype != a.x.dtype || a.weight.shape != std::vector<int64_t>{a.x.shape[1]} ||
      !a.weight.is_contiguous()) {
    throw InvalidArgument("rms_norm: weight " + type_and_shape(a.weight) + " for x " +
                          type_and_shape(a.x) +
                          "; give one contiguous number of x's type for each of a row");
  }
  if (a.y.dtype != a.x.dtype || a.y.shape != a.x.shape || !a.y.is_contiguous()) {
    throw InvalidArgument("rms_norm: y " + type_and_shape(a.y) + " for x " + type_and_shape(a.x) +
                          "; give contiguous rows as x has them");
  }
}

void run_norm(const Norm& a, WorkerTeam& team, Isa isa) {
  check_norm(a);
  const size_t total = a.x.numel();
  if (total == 0) return;
  const NormPass pass = find_norm_pass(a.x.dtype, isa);
  const auto rows = static_cast<size_t>(a.x.shape[0]);
  const auto width = static_cast<size_t>(a.x.shape[1]);
  const size_t element = dtype_bytes(a.x.dtype);
  const ptrdiff_t x_step = a.x.strides[0] * static_cast<ptrdiff_t>(element);
  const auto run = [&](const RowRange& range) {
    pass({a.x.data + static_cast<ptrdiff_t>(range.begin) * x_step, x_step, a.weight.data,
          a.y.data + range.begin * width * element, range.end - range.begin, width, a.eps});
  };
  if (total < kFewestNormElements) return run({0, rows});
  WorkQueues<RowRange> queues(team);
  const size_t each = std::max(kNormUnitElements / width, size_t{1});
  for (size_t at = 0; at < rows; at += each) queues.give(-1, {at, std::min(rows, at + each)});
  team.run([&](size_t group) { queues.drain(group, run); });
}

}  // namespace cxl_offload::kernels
