// Closes what target_avx2.inc.h or target_avx512.inc.h opened.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
