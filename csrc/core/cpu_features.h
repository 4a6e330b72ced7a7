// Which vector instructions this processor has, found at run time: one build serves every host.
//
// A kernel that uses them is a function with the attribute of its level, chosen once by best_isa()
// outside of its loop; the scalar version is always there and is the oracle of the others.
#ifndef CXL_OFFLOAD_CORE_CPU_FEATURES_H_
#define CXL_OFFLOAD_CORE_CPU_FEATURES_H_

#include <cstddef>
#include <string>
#include <vector>

#if defined(__x86_64__)
#define CXL_OFFLOAD_X86 1
#define CXL_OFFLOAD_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define CXL_OFFLOAD_TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define CXL_OFFLOAD_X86 0
#endif
#if defined(__aarch64__)
#define CXL_OFFLOAD_NEON 1
#else
#define CXL_OFFLOAD_NEON 0
#endif
// 1 where the build found that the compiler makes SVE with vectors of 256 bits and has given all
// sources the options for that; kernels/vector/sve256_check.cc says how.
#ifndef CXL_OFFLOAD_SVE256
#define CXL_OFFLOAD_SVE256 0
#endif

namespace cxl_offload {

enum class Isa {
  kScalar,  // plain C++
  kNeon,    // Advanced SIMD of AArch64, which all of them have
  kSve256,  // SVE of AArch64, where vectors have 256 bits
  kAvx2,    // with FMA and F16C
  kAvx512,  // F, BW, DQ and VL
};

// One T for each level, such as the function that is compiled for it.
template <class T>
struct OfIsa {
  T scalar;
  T neon;
  T sve256;
  T avx2;
  T avx512;

  constexpr const T& at(Isa isa) const {
    switch (isa) {
      case Isa::kAvx512:
        return avx512;
      case Isa::kAvx2:
        return avx2;
      case Isa::kSve256:
        return sve256;
      case Isa::kNeon:
        return neon;
      case Isa::kScalar:
        break;
    }
    return scalar;
  }
};

// How many bytes the second cache of a core holds; 1 MiB where the operating system does not say.
size_t second_cache_bytes();

// The levels that this processor has and the operating system saves, ascending; never empty.
std::vector<Isa> supported_isas();
Isa best_isa();

// Whether kernels multiply 4-bit codes as integers of one byte, which takes AVX-512 with VNNI.
bool has_integer_codes();

// Whether the processor multiplies vectors of bfloat16 and rounds to that type (AVX512-BF16), and
// looks up bytes (VBMI): what target_avx512bf16.inc.h compiles for.
bool has_bf16_vectors();

// Whether threads of this process may use the tiles of AMX for bfloat16. Linux saves the registers
// of tiles only for processes that ask for it. The first call asks, for all threads and for
// processes forked later. Linux refuses where a signal stack is too small for these registers.
bool has_tiles();

// "scalar", "neon", "sve256", "avx2", "avx512"
std::string isa_name(Isa isa);
// Throws InvalidArgument for an unknown name, or for a level that this processor lacks. The message
// has the names that are known, and those of `also`, which begins with a comma if it has any.
Isa parse_isa(const std::string& name, const std::string& also = "");

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_CPU_FEATURES_H_
