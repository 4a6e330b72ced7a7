// Opens code that is compiled with AVX2, FMA and F16C; target_end.inc.h closes it. Included after
// all other headers: what they define must stay fit for every processor.

// GCC 12 takes the placeholder operands of its own intrinsics for uninitialised (GCC bug 105593),
// where they are inlined, which is everywhere here.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
