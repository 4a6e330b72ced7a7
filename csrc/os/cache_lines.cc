#include "os/cache_lines.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "core/sizes.h"

namespace cxl_offload::os {
namespace {

#if defined(__x86_64__)

// The instructions that a processor may have, the best one last. clwb may keep the line in the
// cache; clflush waits for each line.
enum class WriteBack { kClflush, kClflushopt, kClwb };

WriteBack find_write_back() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return WriteBack::kClflush;
  constexpr unsigned kHasClflushopt = 1U << 23;
  constexpr unsigned kHasClwb = 1U << 24;
  if ((ebx & kHasClwb) != 0) return WriteBack::kClwb;
  return (ebx & kHasClflushopt) != 0 ? WriteBack::kClflushopt : WriteBack::kClflush;
}

void write_back(uintptr_t begin, uintptr_t end) noexcept {
  static const WriteBack how = find_write_back();
  for (uintptr_t at = begin; at < end; at += kLineBytes) {
    auto* line = reinterpret_cast<volatile char*>(at);
    if (how == WriteBack::kClwb) {
      asm volatile("clwb %0" : "+m"(*line));
    } else if (how == WriteBack::kClflushopt) {
      asm volatile("clflushopt %0" : "+m"(*line));
    } else {
      asm volatile("clflush %0" : "+m"(*line));
    }
  }
  asm volatile("sfence" ::: "memory");
}

uintptr_t line_bytes() noexcept { return kLineBytes; }

#elif defined(__aarch64__)

uintptr_t line_bytes() noexcept {
  uint64_t type = 0;
  asm("mrs %0, ctr_el0" : "=r"(type));
  return uintptr_t{4} << ((type >> 16) & 15);  // the line of the smallest data cache
}

void write_back(uintptr_t begin, uintptr_t end) noexcept {
  constexpr unsigned long kHasPointOfPersistence = 1UL << 16;  // HWCAP_DCPOP
  static const bool persistent = (getauxval(AT_HWCAP) & kHasPointOfPersistence) != 0;
  const uintptr_t step = line_bytes();
  for (uintptr_t at = begin; at < end; at += step) {
    if (persistent) {
      asm volatile("sys #3, c7, c12, #1, %0" ::"r"(at) : "memory");  // dc cvap
    } else {
      asm volatile("dc cvac, %0" ::"r"(at) : "memory");
    }
  }
  asm volatile("dsb sy" ::: "memory");
}

#else
#error "no way is known to write cache lines back on this processor"
#endif

}  // namespace

void write_back_lines(std::span<const std::byte> range) noexcept {
  if (range.empty()) return;
  const auto begin = reinterpret_cast<uintptr_t>(range.data());
  write_back(begin - begin % line_bytes(), begin + range.size());
}

}  // namespace cxl_offload::os
