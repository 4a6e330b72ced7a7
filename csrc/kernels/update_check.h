// What must hold before an update writes its first byte.
#ifndef CXL_OFFLOAD_KERNELS_UPDATE_CHECK_H_
#define CXL_OFFLOAD_KERNELS_UPDATE_CHECK_H_

#include <vector>

#include "kernels/update.h"

namespace cxl_offload::kernels {

// Throws InvalidArgument for a setting outside of its range.
void check_rule(const UpdateRule& rule);
// Throws InvalidArgument; see run_updates().
void check_updates(const std::vector<Update>& updates);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_UPDATE_CHECK_H_
