// The updates with NEON.
#include "kernels/update_pass.h"
#include "kernels/vector/vector.h"

#if CXL_OFFLOAD_NEON

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/neon.inc.h"
//
#include "kernels/update_rules.inc.h"
//
#include "kernels/update_loop.inc.h"
//
#include "kernels/update_find.inc.h"

}  // namespace

UpdatePass update_pass_neon(const PassKey& key) { return find_pass(key); }

}  // namespace cxl_offload::kernels

#else

namespace cxl_offload::kernels {

UpdatePass update_pass_neon(const PassKey&) { return nullptr; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_NEON
