// Linear layers with AVX512-BF16, and VBMI beside it for look-ups of bytes.
#include "kernels/linear_bf16.h"

#if CXL_OFFLOAD_X86

#include <memory>

#include "kernels/kept.h"
#include "kernels/vector/target_avx512bf16.inc.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/avx512.inc.h"
//
#include "kernels/linear_bf16_read.inc.h"
//
#include "kernels/linear_order.inc.h"
//
#include "kernels/linear_codes_room.inc.h"
//
#include "kernels/linear_bf16.inc.h"

}  // namespace

bool has_bf16_products(Bf16Products products) {
  if (products == Bf16Products::kNone) return true;
  if (products == Bf16Products::kTiles) return has_bf16_products() && has_tiles();
  return best_isa() == Isa::kAvx512 && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vbmi");
}

LinearKernel linear_kernel_bf16(const Linear& a) {
  if (!has_bf16_products() || a.x.dtype != Dtype::kBfloat16) return {};
  const int64_t width = a.x.shape[1];
  const bool grouped = a.scale.data != nullptr && a.scale.shape[1] > 1;
  switch (a.weight.dtype) {
    case Dtype::kBfloat16:
      return kernel_of<Bf16>(a.weight.dtype);
    case Dtype::kFloat8E4m3:
      return grouped ? LinearKernel{} : kernel_of<E4m3>(a.weight.dtype);
    case Dtype::kInt8:
      return grouped ? LinearKernel{} : kernel_of<int8_t>(a.weight.dtype);
    case Dtype::kUint8: {
      const int64_t group = width / a.groups.shape[1];
      const bool fits = (group == 32 || group == 64 || group % 128 == 0) && width % 128 == 0;
      return fits ? kernel_of<Codes>(a.weight.dtype) : LinearKernel{};
    }
    default:
      return {};
  }
}

}  // namespace cxl_offload::kernels

#include "kernels/vector/target_end.inc.h"

#else

namespace cxl_offload::kernels {

bool has_bf16_products(Bf16Products products) { return products == Bf16Products::kNone; }
LinearKernel linear_kernel_bf16(const Linear&) { return {}; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_X86
