#include "kernels/float_mode.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cxl_offload::kernels {

#if defined(__x86_64__)

namespace {

constexpr uint32_t kMarks = 0x3f;  // the lowest six bits of MXCSR: exceptions that have happened

}  // namespace

FloatMode FloatMode::of_this_thread() { return FloatMode(_mm_getcsr() & ~kMarks); }
void FloatMode::set() const { _mm_setcsr(static_cast<uint32_t>(bits_) | (_mm_getcsr() & kMarks)); }

#elif defined(__aarch64__)

FloatMode FloatMode::of_this_thread() {
  uint64_t bits = 0;
  asm volatile("mrs %0, fpcr" : "=r"(bits));
  return FloatMode(bits);
}
void FloatMode::set() const { asm volatile("msr fpcr, %0" : : "r"(bits_)); }

#else

FloatMode FloatMode::of_this_thread() { return FloatMode(0); }
void FloatMode::set() const {}

#endif

}  // namespace cxl_offload::kernels
