// What the kernels need before they include the `Vector` of an instruction set.
//
// vector/{scalar,neon,sve256,avx2,avx512}.inc.h each define the same names: `Vector`, some float
// numbers in a register; `add`, `mul`, `div`, `fma`, `mul_add`, `root`, `sign`, `larger`,
// `exponential`; `load_pairs` and `Table` for 4-bit codes. A kernel writes its loop once over these
// names, in an .inc.h file, and has one short source an instruction set that includes both inside
// of an unnamed namespace: no function may be shared by two instruction sets.
#ifndef CXL_OFFLOAD_KERNELS_VECTOR_VECTOR_H_
#define CXL_OFFLOAD_KERNELS_VECTOR_VECTOR_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/cpu_features.h"
#include "core/float8.h"
#include "core/half.h"
#include "core/prefetch.h"
#include "kernels/group_scales.h"

#if CXL_OFFLOAD_X86
#include <immintrin.h>
#elif CXL_OFFLOAD_NEON
#include <arm_neon.h>
#endif

#define CXL_OFFLOAD_VECTOR inline __attribute__((always_inline))

namespace cxl_offload::kernels {

// Whether an instruction set loads numbers of a type two vectors at once.
template <class V, class T>
constexpr bool kLoadsTwo = requires(const T* from, V& to) { V::load_two(from, to, to); };

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_VECTOR_VECTOR_H_
