// Opens code that is compiled with what target_avx512bf16.inc.h has, and with the tiles of AMX for
// bfloat16; target_end.inc.h closes it. Included after all other headers: what they define must
// stay fit for every processor.

// GCC 12 takes the placeholder operands of its own intrinsics for uninitialised (GCC bug 105593),
// where they are inlined, which is everywhere here.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__clang__)
#pragma clang attribute push(                                                                   \
    __attribute__((                                                                             \
        target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,amx-tile,amx-bf16"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,amx-tile,amx-bf16")
#endif
