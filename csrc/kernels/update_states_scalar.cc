// The updates that round at random, in plain C++.
#include "kernels/update_pass.h"
#include "kernels/vector/vector.h"

namespace cxl_offload::kernels {
namespace {

// The order matters: each file uses what those before it define.
#include "kernels/vector/scalar.inc.h"
//
#include "kernels/vector/words_scalar.inc.h"
//
#include "kernels/update_rules.inc.h"
//
#include "kernels/update_states.inc.h"
//
#include "kernels/update_states_loop.inc.h"

}  // namespace

UpdatePass noisy_pass_scalar(const PassKey& key) { return find_noisy_pass(key); }

}  // namespace cxl_offload::kernels
