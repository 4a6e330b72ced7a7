// The updates that round at random, with NEON.
#include "kernels/update_pass.h"
#include "kernels/vector/vector.h"

#if CXL_OFFLOAD_NEON

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/neon.inc.h"
//
#include "kernels/vector/words_neon.inc.h"
//
#include "kernels/update_rules.inc.h"
//
#include "kernels/update_states.inc.h"
//
#include "kernels/update_states_loop.inc.h"

}  // namespace

UpdatePass noisy_pass_neon(const PassKey& key) { return find_noisy_pass(key); }

}  // namespace cxl_offload::kernels

#else

namespace cxl_offload::kernels {

UpdatePass noisy_pass_neon(const PassKey&) { return nullptr; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_NEON
