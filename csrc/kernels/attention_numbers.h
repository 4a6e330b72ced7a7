// Reads and writes numbers of queries and results, and looks up the scales of heads.
#ifndef CXL_OFFLOAD_KERNELS_ATTENTION_NUMBERS_H_
#define CXL_OFFLOAD_KERNELS_ATTENTION_NUMBERS_H_

#include <cstddef>
#include <vector>

#include "core/half.h"
#include "core/tensor_view.h"

namespace cxl_offload::kernels {

inline float to_float(float value) { return value; }

// Calls visit(numbers) with numbers of any type that write_numbers() can write.
template <class Visit>
void visit_numbers(const std::byte* data, Dtype dtype, const Visit& visit) {
  if (dtype == Dtype::kBfloat16) return visit(reinterpret_cast<const Bf16*>(data));
  if (dtype == Dtype::kFloat16) return visit(reinterpret_cast<const F16*>(data));
  visit(reinterpret_cast<const float*>(data));
}

// Writes value_of(0) to value_of(count - 1), which are float, from number `first` on.
template <class ValueOf>
void write_numbers(std::byte* data, Dtype dtype, size_t first, size_t count,
                   const ValueOf& value_of) {
  if (dtype == Dtype::kBfloat16) {
    Bf16* to = reinterpret_cast<Bf16*>(data) + first;
    for (size_t i = 0; i < count; ++i) to[i] = to_bf16(value_of(i));
  } else if (dtype == Dtype::kFloat16) {
    F16* to = reinterpret_cast<F16*>(data) + first;
    for (size_t i = 0; i < count; ++i) to[i] = to_f16(value_of(i));
  } else {
    float* to = reinterpret_cast<float*>(data) + first;
    for (size_t i = 0; i < count; ++i) to[i] = value_of(i);
  }
}

inline double scale_of_head(const std::vector<float>& of_heads, size_t head) {
  if (of_heads.empty()) return 1;
  return of_heads[of_heads.size() == 1 ? 0 : head];
}

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_ATTENTION_NUMBERS_H_
