// Decode attention in plain C++.
#include "kernels/attention_pass.h"
#include "kernels/vector/vector.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/scalar.inc.h"
//
#include "kernels/attention_loop.inc.h"
//
#include "kernels/attention_codes.inc.h"

}  // namespace

AttentionPass attention_pass_scalar(Dtype dtype) { return find_pass(dtype); }

}  // namespace cxl_offload::kernels
