// Opens code that is compiled with AVX2, FMA and F16C; target_end.inc.h closes it. It is included
// after all other headers, because what they define must run on every processor.

#include "kernels/vector/wrong_warnings.inc.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
