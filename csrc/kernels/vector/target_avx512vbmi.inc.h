// Opens code that is compiled with AVX-512 (F, BW, DQ and VL) and VBMI; target_end.inc.h closes it.
// It is included after all other headers, because what they define must run on every processor.

#include "kernels/vector/wrong_warnings.inc.h"

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")
#endif
