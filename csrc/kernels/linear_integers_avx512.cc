// Layers of 4-bit codes by products of integers, with AVX-512 and VNNI.
#include "kernels/linear_integers.h"

#if CXL_OFFLOAD_X86

#include <algorithm>
#include <limits>
#include <memory>

#include "kernels/kept.h"
#include "kernels/vector/target_avx512vnni.inc.h"

namespace cxl_offload::kernels {
namespace {

constexpr float kCodeOffset = 0;

// The order matters: each file uses what those before it define.
#include "kernels/vector/avx512.inc.h"
//
#include "kernels/linear_order.inc.h"
//
#include "kernels/linear_codes_room.inc.h"
//
#include "kernels/linear_integers.inc.h"

}  // namespace

LinearKernel linear_kernel_integers(const Linear& a) {
  if (!is_codes(a) || !has_integer_codes()) return {};
  constexpr int64_t kCodes = kBlock;
  const int64_t width = a.x.shape[1];
  const int64_t group = width / a.groups.shape[1];
  const bool whole = group > 0 && (group % kCodes == 0 || kCodes % group == 0);
  if (!whole || width % kCodes != 0) return {};
  LinearKernel kernel = linear_kernel_avx512(a.weight.dtype);
  kernel.prepare = prepare_integers;
  kernel.multiply = multiply_integers;
  kernel.products_per_s = nullptr;  // several products of bytes make one of x and a code
  return kernel;
}

}  // namespace cxl_offload::kernels

#include "kernels/vector/target_end.inc.h"

#else

namespace cxl_offload::kernels {

LinearKernel linear_kernel_integers(const Linear&) { return {}; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_X86
