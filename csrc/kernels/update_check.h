// What must hold before an update writes its first byte.
#ifndef CXL_OFFLOAD_KERNELS_UPDATE_CHECK_H_
#define CXL_OFFLOAD_KERNELS_UPDATE_CHECK_H_

#include <vector>

#include "kernels/update.h"

namespace cxl_offload::kernels {

// Throws InvalidArgument for a number that is finite and larger than float32 can hold, in which
// updates are computed. `what` names it, for the message.
void check_held(const char* what, double value);
// Throws InvalidArgument for a setting outside of its range, or a product of some that float32
// cannot hold.
void check_rule(const UpdateRule& rule);
// Throws InvalidArgument; see run_updates(). `counts` are where steps are counted, which several
// parameters may share; nothing else may be there.
void check_updates(const std::vector<Update>& updates, std::vector<CountRange> counts = {});

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_UPDATE_CHECK_H_
