// Decode attention with NEON.
#include "kernels/attention_pass.h"
#include "kernels/vector/vector.h"

#if CXL_OFFLOAD_NEON

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/neon.inc.h"
//
#include "kernels/attention_loop.inc.h"
//
#include "kernels/attention_codes.inc.h"

}  // namespace

AttentionPass attention_pass_neon(Dtype dtype) { return find_pass(dtype); }

}  // namespace cxl_offload::kernels

#else

namespace cxl_offload::kernels {

AttentionPass attention_pass_neon(Dtype) { return nullptr; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_NEON
