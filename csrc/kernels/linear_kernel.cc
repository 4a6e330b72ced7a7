#include "kernels/linear_kernel.h"

#include <atomic>

#include "kernels/linear_bf16.h"
#include "kernels/linear_integers.h"

namespace cxl_offload::kernels {

LinearKernel linear_kernel(Dtype weight, Isa isa) {
  constexpr OfIsa<LinearKernel (*)(Dtype)> kEach{linear_kernel_scalar, linear_kernel_neon,
                                                 linear_kernel_sve256, linear_kernel_avx2,
                                                 linear_kernel_avx512};
  return kEach.at(isa)(weight);
}

LinearKernel linear_kernel(const Linear& linear, Isa isa) {
  if (isa == Isa::kAvx512 && linear.integers) {
    const LinearKernel found = linear_kernel_integers(linear);
    if (found.multiply != nullptr) return found;
  }
  if (isa == Isa::kAvx512 && linear.bf16_products != Bf16Products::kNone) {
    const auto products = linear.bf16_products;
    const bool slow_at_one_row = is_codes(linear) || linear.weight.dtype == Dtype::kFloat16;
    const bool best_as_tiles = products == Bf16Products::kBest && !slow_at_one_row;
    LinearKernel found{};
    if (products == Bf16Products::kTiles || best_as_tiles) found = linear_kernel_tiles(linear);
    const bool is_best = products == Bf16Products::kBest;
    const bool widened = is_best ? !has_fast_bf16_products() : products == Bf16Products::kWidened;
    if (found.multiply == nullptr) {
      found = widened ? linear_kernel_widened(linear) : linear_kernel_bf16(linear);
    }
    if (found.multiply != nullptr) return found;
  }
  return linear_kernel(linear.weight.dtype, isa);
}

double linear_products_per_s(const Linear& linear, WorkerTeam& team, Isa isa) {
  const LinearKernel kernel = linear_kernel(linear, isa);
  if (kernel.products_per_s == nullptr) return 0;
  std::atomic<double> all = 0;
  team.run([&](size_t) { all += kernel.products_per_s(); });
  return all;
}

}  // namespace cxl_offload::kernels
