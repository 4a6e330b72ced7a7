// The two numbers that are kept of each group of 4-bit codes.
#ifndef CXL_OFFLOAD_KERNELS_GROUP_SCALES_H_
#define CXL_OFFLOAD_KERNELS_GROUP_SCALES_H_

namespace cxl_offload::kernels {

// What the numbers are, and what a code is then worth.
enum class GroupScales {
  kLowStep,     // (low, step): code * step + low, as in transfer/packing.h
  kInverseLow,  // (1 / step, low): the same, as in FlexGen
  kZeroStep,    // (zero, step): (code - zero) * step, as in AWQ and GPTQ
};

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_GROUP_SCALES_H_
