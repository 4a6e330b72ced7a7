// Closes what the other target_*.inc.h opened.
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#undef CXL_OFFLOAD_ROUNDS_TO_BF16
