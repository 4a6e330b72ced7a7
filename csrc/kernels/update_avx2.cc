// The updates with AVX2, FMA and F16C.
#include "kernels/update_pass.h"
#include "kernels/vector/vector.h"

#if CXL_OFFLOAD_X86

#include "kernels/vector/target_avx2.inc.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/avx2.inc.h"
//
#include "kernels/update_rules.inc.h"
//
#include "kernels/update_loop.inc.h"
//
#include "kernels/update_find.inc.h"

}  // namespace

UpdatePass update_pass_avx2(const PassKey& key) { return find_pass(key); }

}  // namespace cxl_offload::kernels

#include "kernels/vector/target_end.inc.h"

#else

namespace cxl_offload::kernels {

UpdatePass update_pass_avx2(const PassKey&) { return nullptr; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_X86
