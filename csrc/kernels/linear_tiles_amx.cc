// Linear layers with the tiles of AMX for bfloat16, and VBMI beside them for look-ups of bytes.
#include "kernels/linear_bf16.h"

#if CXL_OFFLOAD_X86

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>

#include "kernels/vector/target_amxbf16.inc.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/avx512.inc.h"
//
#include "kernels/linear_bf16_read.inc.h"
//
#include "kernels/linear_tiles_rows.inc.h"
//
#include "kernels/linear_tiles.inc.h"
//
#include "kernels/linear_tiles_codes.inc.h"

}  // namespace

LinearKernel linear_kernel_tiles(const Linear& a) {
  const bool grouped = a.scale.data != nullptr && a.scale.shape[1] > 1;
  const Dtype x = a.x.dtype;
  if (x != Dtype::kBfloat16 && x != Dtype::kFloat16) return {};
  if (grouped || !has_bf16_products(Bf16Products::kTiles)) return {};
  switch (a.weight.dtype) {
    case Dtype::kBfloat16:
      return kernel_of<Bf16>(x, a.weight.dtype);
    case Dtype::kFloat16:
      return kernel_of<F16>(x, a.weight.dtype);
    case Dtype::kFloat8E4m3:
      return kernel_of<E4m3>(x, a.weight.dtype);
    case Dtype::kInt8:
      return kernel_of<int8_t>(x, a.weight.dtype);
    case Dtype::kUint8: {
      const bool sixties = a.x.shape[1] / a.groups.shape[1] % 64 == 0;
      return sixties ? codes_kernel<64>(x) : codes_kernel<32>(x);
    }
    default:
      return {};
  }
}

}  // namespace cxl_offload::kernels

#include "kernels/vector/target_end.inc.h"

#else

namespace cxl_offload::kernels {

LinearKernel linear_kernel_tiles(const Linear&) { return {}; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_X86
