#include "core/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#endif
#if defined(__aarch64__)
#include <sys/prctl.h>
#endif

#include <unistd.h>

#include <algorithm>

#include "core/error.h"

namespace cxl_offload {
namespace {

#if CXL_OFFLOAD_X86
// This asks the processor itself, because __builtin_cpu_supports of Clang does not know the name
// before version 15.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool processor_has_tiles() {
  constexpr unsigned kBf16 = 1U << 22, kTiles = 1U << 24;  // bits of leaf 7
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  return (edx & kBf16) != 0 && (edx & kTiles) != 0;
}

bool ask_for_tiles() {
  constexpr int kRequest = 0x1023;  // ARCH_REQ_XCOMP_PERM of <asm/prctl.h>, since Linux 5.16
  constexpr int kTileData = 18;     // the number of this part of a thread's state
  return processor_has_tiles() && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}
#endif

// The kernels are made for one length of vectors. Linux keeps a length for each thread, which the
// threads that it starts take over. A program that changes it must do so before it asks here.
bool has_sve256() {
#if CXL_OFFLOAD_SVE256
  constexpr int kGetLength = 51;        // PR_SVE_GET_VL of <linux/prctl.h>, since Linux 4.15
  constexpr int kLength = 0xffff;       // the bits that are the length in bytes; others are flags
  const int found = prctl(kGetLength);  // negative where there is no SVE
  return found >= 0 && (found & kLength) == 256 / 8;
#else
  return false;
#endif
}

// __builtin_cpu_supports also asks whether the operating system saves the wide registers.
bool has(Isa isa) {
  if (isa == Isa::kScalar) return true;
  if (isa == Isa::kNeon) return CXL_OFFLOAD_NEON != 0;
  if (isa == Isa::kSve256) return has_sve256();
#if CXL_OFFLOAD_X86
  if (isa == Isa::kAvx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  }
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

constexpr Isa kAll[] = {Isa::kScalar, Isa::kNeon, Isa::kSve256, Isa::kAvx2, Isa::kAvx512};

// The processor is asked once only. In a virtual machine CPUID is handed to the host, which takes
// as long as a kernel over a small tensor.
const std::vector<Isa>& known_isas() {
  static const std::vector<Isa> known = [] {
    std::vector<Isa> found;
    std::ranges::copy_if(kAll, std::back_inserter(found), has);
    return found;
  }();
  return known;
}

}  // namespace

size_t second_cache_bytes() {
  static const size_t found = [] {
    long said = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
    said = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return said > 0 ? static_cast<size_t>(said) : size_t{1} << 20;
  }();
  return found;
}

std::vector<Isa> supported_isas() { return known_isas(); }

Isa best_isa() { return known_isas().back(); }

bool has_integer_codes() {
#if CXL_OFFLOAD_X86
  return best_isa() == Isa::kAvx512 && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

bool has_bf16_vectors() {
#if CXL_OFFLOAD_X86
  static const bool found = best_isa() == Isa::kAvx512 && __builtin_cpu_supports("avx512vbmi") &&
                            __builtin_cpu_supports("avx512bf16");
  return found;
#else
  return false;
#endif
}

bool has_tiles() {
#if CXL_OFFLOAD_X86
  static const bool given = ask_for_tiles();
  return given;
#else
  return false;
#endif
}

std::string isa_name(Isa isa) {
  switch (isa) {
    case Isa::kScalar:
      return "scalar";
    case Isa::kNeon:
      return "neon";
    case Isa::kSve256:
      return "sve256";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

Isa parse_isa(const std::string& name, const std::string& also) {
  const auto isas = supported_isas();
  const auto found = std::ranges::find_if(isas, [&name](Isa isa) { return isa_name(isa) == name; });
  if (found != isas.end()) return *found;
  std::string known;
  for (Isa isa : isas) known += (known.empty() ? "" : ", ") + isa_name(isa);
  throw InvalidArgument("instruction set '" + name + "' is not known here; this processor has " +
                        known + also);
}

}  // namespace cxl_offload
