// Opens code that is compiled with AVX-512 (F, BW, DQ and VL), VBMI and BF16; target_end.inc.h
// closes it. It is included after all other headers, because what they define must run on every
// processor.

#include "kernels/vector/wrong_warnings.inc.h"

#if defined(__clang__)
#pragma clang attribute push(                                                            \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")
#endif

// Whether the processor rounds to bfloat16 by itself.
#define CXL_OFFLOAD_ROUNDS_TO_BF16 1
