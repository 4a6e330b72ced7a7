// The updates that round at random, with SVE, in vectors of 256 bits.
#include "kernels/update_pass.h"
#include "kernels/vector/vector.h"

#if CXL_OFFLOAD_SVE256

#include "kernels/vector/target_sve256.inc.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/sve256.inc.h"
//
#include "kernels/vector/words_sve256.inc.h"
//
#include "kernels/update_rules.inc.h"
//
#include "kernels/update_states.inc.h"
//
#include "kernels/update_states_loop.inc.h"

}  // namespace

UpdatePass noisy_pass_sve256(const PassKey& key) { return find_noisy_pass(key); }

}  // namespace cxl_offload::kernels

#include "kernels/vector/target_end.inc.h"

#else

namespace cxl_offload::kernels {

UpdatePass noisy_pass_sve256(const PassKey&) { return nullptr; }

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_SVE256
