// The updates in plain C++.
#include "kernels/update_pass.h"
#include "kernels/vector/vector.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/scalar.inc.h"
//
#include "kernels/update_rules.inc.h"
//
#include "kernels/update_loop.inc.h"
//
#include "kernels/update_find.inc.h"

}  // namespace

UpdatePass update_pass_scalar(const PassKey& key) { return find_pass(key); }

}  // namespace cxl_offload::kernels
