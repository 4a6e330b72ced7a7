// Compiled for its errors alone, and never linked: if there are none, a compiler can make the
// kernels for SVE with vectors of 256 bits. The build (setup.py, tests/cpp/Makefile) compiles this
// file with -msve-vector-bits=256 and -DCXL_OFFLOAD_SVE256=1, and then all sources with the same
// two options.
//
// Vectors of a fixed length can be members of structs and arrays, which those of any length cannot.
// The option changes only code for which SVE is turned on: what stands between
// target_sve256.inc.h and target_end.inc.h. Functions that sources share stay without SVE.
#include "kernels/vector/vector.h"

#if !CXL_OFFLOAD_NEON
#error "not for AArch64"
#elif !CXL_OFFLOAD_SVE256
#error "the option is missing that says that all sources have it"
#elif defined(__ARM_FEATURE_SVE)
#error "all code has SVE, as with -march=native; it would need vectors of 256 bits everywhere"
#endif

#include "kernels/vector/target_sve256.inc.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/sve256.inc.h"
//
#include "kernels/vector/words_sve256.inc.h"

}  // namespace
}  // namespace cxl_offload::kernels

#include "kernels/vector/target_end.inc.h"
