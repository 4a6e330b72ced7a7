// Linear layers with AVX512-BF16, and VBMI beside it for look-ups of bytes.
#include "kernels/linear_bf16.h"

#if CXL_OFFLOAD_X86

#include <atomic>
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
#include "kernels/linear_products.inc.h"
//
#include "kernels/linear_order.inc.h"
//
#include "kernels/linear_codes_room.inc.h"

// One instruction adds two products to each sum.
struct Products {
  using Number = Bf16;
  static constexpr size_t kParts = 1;
  static void keep(__m512i numbers, Bf16* to) { _mm512_storeu_si512(to, numbers); }
  template <size_t>
  CXL_OFFLOAD_VECTOR static __m512i part(__m512i weights) {
    return weights;
  }
  CXL_OFFLOAD_VECTOR static void add(__m512& sums, __m512i weights, __m512i x) {
    sums = _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)x);
  }
};

#include "kernels/linear_bf16.inc.h"

}  // namespace

bool has_bf16_products(Bf16Products products) {
  if (products == Bf16Products::kNone) return true;
  if (products == Bf16Products::kTiles) return has_bf16_products() && has_tiles();
  if (products != Bf16Products::kWidened) return has_bf16_vectors();
  return best_isa() == Isa::kAvx512 && __builtin_cpu_supports("avx512vbmi");
}

bool has_fast_bf16_products() {
  if (!has_bf16_products()) return false;
  // Several threads may measure at once, as a child of a fork may while its parent does.
  static std::atomic<int> found = -1;
  if (found.load(std::memory_order_relaxed) < 0) {
    const double of_floats = linear_kernel_avx512(Dtype::kBfloat16).products_per_s();
    found = products_per_s() >= of_floats ? 1 : 0;
  }
  return found.load(std::memory_order_relaxed) == 1;
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
bool has_fast_bf16_products() { return false; }
LinearKernel linear_kernel_bf16(const Linear&) { return {}; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_X86
