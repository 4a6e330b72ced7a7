// Linear layers of 8-bit floats with AVX-512 and VBMI, which looks bytes up in tables: for
// processors whose instruction for products of bfloat16 is slow or missing.
#include "kernels/linear_bf16.h"

#if CXL_OFFLOAD_X86

#include <memory>

#include "kernels/kept.h"
#include "kernels/vector/target_avx512vbmi.inc.h"

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

// Numbers of bfloat16 become float32: the odd ones of 32 in one vector, the even ones in another.
struct Products {
  using Number = float;
  static constexpr size_t kParts = 2;
  static void keep(__m512i numbers, float* to) {
    _mm512_storeu_si512(to, part<0>(numbers));
    _mm512_storeu_si512(to + kBf16Lanes / 2, part<1>(numbers));
  }
  template <size_t kPart>
  CXL_OFFLOAD_VECTOR static __m512i part(__m512i weights) {
    if constexpr (kPart == 1) return _mm512_slli_epi32(weights, 16);
    return _mm512_and_si512(weights, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000)));
  }
  CXL_OFFLOAD_VECTOR static void add(__m512& sums, __m512i weights, __m512i x) {
    sums = _mm512_fmadd_ps(_mm512_castsi512_ps(weights), _mm512_castsi512_ps(x), sums);
  }
};

#include "kernels/linear_bf16.inc.h"

}  // namespace

LinearKernel linear_kernel_widened(const Linear& a) {
  const bool grouped = a.scale.data != nullptr && a.scale.shape[1] > 1;
  const bool fits = a.x.dtype == Dtype::kBfloat16 && a.weight.dtype == Dtype::kFloat8E4m3;
  if (!fits || grouped || !has_bf16_products(Bf16Products::kWidened)) return {};
  return kernel_of<E4m3>(a.weight.dtype);
}

}  // namespace cxl_offload::kernels

#include "kernels/vector/target_end.inc.h"

#else

namespace cxl_offload::kernels {

LinearKernel linear_kernel_widened(const Linear&) { return {}; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_X86
