// Reads and writes numbers of queries and results one at a time, and looks up the scales of heads.
#ifndef CXL_OFFLOAD_KERNELS_ATTENTION_NUMBERS_H_
#define CXL_OFFLOAD_KERNELS_ATTENTION_NUMBERS_H_

#include <cstddef>
#include <vector>

#include "core/half.h"
#include "core/tensor_view.h"

namespace cxl_offload::kernels {

inline float to_float(float value) { return value; }

// Calls visit(numbers) with numbers of any type that write_number() can write.
template <class Visit>
void visit_numbers(const std::byte* data, Dtype dtype, const Visit& visit) {
  if (dtype == Dtype::kBfloat16) return visit(reinterpret_cast<const Bf16*>(data));
  if (dtype == Dtype::kFloat16) return visit(reinterpret_cast<const F16*>(data));
  visit(reinterpret_cast<const float*>(data));
}

inline void write_number(std::byte* data, Dtype dtype, size_t index, float value) {
  if (dtype == Dtype::kBfloat16) {
    reinterpret_cast<Bf16*>(data)[index] = to_bf16(value);
  } else if (dtype == Dtype::kFloat16) {
    reinterpret_cast<F16*>(data)[index] = to_f16(value);
  } else {
    reinterpret_cast<float*>(data)[index] = value;
  }
}

inline double scale_of_head(const std::vector<float>& of_heads, size_t head) {
  if (of_heads.empty()) return 1;
  return of_heads[of_heads.size() == 1 ? 0 : head];
}

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_ATTENTION_NUMBERS_H_
