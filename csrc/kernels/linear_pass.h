// The inner loops of linear layers, built once for every instruction set.
#ifndef CXL_OFFLOAD_KERNELS_LINEAR_PASS_H_
#define CXL_OFFLOAD_KERNELS_LINEAR_PASS_H_

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <limits>
#include <memory>

#include "core/half.h"
#include "core/rounding.h"
#include "core/sizes.h"
#include "core/tensor_view.h"
#include "kernels/vector/vector.h"

namespace cxl_offload::kernels {

// Rows of x are padded with zeros to a multiple of this many numbers, so that a loop over vectors
// of any instruction set may read them to the end of the last.
inline constexpr size_t kLinearPad = 64;

// Columns are multiplied in runs of this many, so that the numbers of some rows of x in these
// columns stay in a cache. It does not depend on how many rows there are, so each row of y is
// summed in the same order in any batch.
inline constexpr size_t kLinearColumns = 4096;

// A unit of work has a multiple of this many outputs, which every loop can divide evenly.
inline constexpr size_t kLinearOutputs = 48;

// What LinearPanel::near_bytes may be. With half of a first cache of 32 KiB, a tile stays there
// while it is multiplied by many outputs; the other half is for weights and sums. With more, the
// tile comes from the second cache, but the sums wait less often. Which one is faster depends on
// the processor, and on how many tiles share the time in which the weights come from memory.
inline constexpr std::array<size_t, 2> kNearBytes = {size_t{16} << 10, size_t{128} << 10};

// Some outputs of all rows.
struct LinearPanel {
  const float* x = nullptr;  // [rows][x_step], as LinearKernel::prepare wrote it
  size_t x_step = 0;
  size_t rows = 0;                    // whole tiles
  size_t tile = 0;                    // rows that are multiplied together: LinearKernel::tile_of
  size_t near_bytes = kNearBytes[0];  // the most bytes of a tile in the columns of a strip
  Prefetch prefetch = Prefetch::kNearest;  // of strips that are spread (linear_order.inc.h)
  // How many outputs all tiles are multiplied by before the next ones; kLinearOutputs is a multiple
  // of it.
  size_t block_outputs = kLinearOutputs;
  const std::byte* weight = nullptr;  // those of the first output
  size_t weight_step = 0;             // bytes from one output to the next
  size_t outputs = 0;
  size_t width = 0;
  size_t group = 0;  // how many weights share scales, or 0 if all of an output do
  // For codes: the scales of the first output.
  const F16* pairs = nullptr;
  size_t pairs_step = 0;  // elements from one output to the next
  GroupScales form = GroupScales::kLowStep;
  float* tables =
      nullptr;  // what a thread writes to: [kMostTogether][groups][2] and kLinearPad more
  // For other types with scales of groups: the scales of the first output.
  const float* scale = nullptr;
  size_t scale_step = 0;        // elements from one output to the next
  size_t scale_group_step = 0;  // and from one group to the next
  float* sums = nullptr;        // [rows][outputs], written
  // The weights that the thread multiplies after the panel's, which are prefetched: how many
  // outputs they have, and whether the panel's own were prefetched that way.
  const std::byte* next = nullptr;
  size_t next_outputs = 0;
  bool fetched = false;
};

// The most outputs that are multiplied together.
inline constexpr size_t kMostTogether = 8;

// Turns the sums of some outputs of one row into numbers of y.
struct LinearResult {
  const float* sums = nullptr;
  const float* factors = nullptr;  // one for each output; null: 1
  const float* bias = nullptr;     // null: 0
  size_t count = 0;
  std::byte* y = nullptr;
  Dtype dtype = Dtype::kFloat32;
};

// Rows of x, as they are given and as `multiply` takes them.
struct LinearInput {
  const std::byte* x = nullptr;
  ptrdiff_t x_step = 0;  // bytes from one row to the next
  Dtype dtype = Dtype::kFloat32;
  size_t rows = 0;
  size_t width = 0;
  size_t group = 0;     // how many weights share scales, or 0 if all of an output do
  size_t tile = 0;      // LinearKernel::tile_of
  float* to = nullptr;  // whole tiles of zeros
  // From one row to the next: more than `width` and a multiple of kLinearPad. For codes there is
  // room for two numbers a group beyond a row that is padded to such a multiple.
  size_t to_step = 0;
};

struct LinearKernel {
  // Writes x in the order in which `multiply` takes it; numbers beyond a row stay zero.
  void (*prepare)(const LinearInput& input);
  void (*multiply)(const LinearPanel& panel);
  void (*finish)(const LinearResult& result);
  size_t (*tile_of)(size_t rows);
  size_t outputs = kLinearOutputs;  // a thread takes a multiple of so many at a time
  // The bytes of a number of x, where all rows are read again for each few outputs: so many rows as
  // the second cache has room for are then multiplied at a time. 0: any number of rows is.
  size_t x_bytes = 0;
  // Measures how many products a second a thread can add to sums in registers, the most that
  // `multiply` can reach. Null: it is not known.
  double (*products_per_s)() = nullptr;
};

// Returns the kernel of an instruction set that this build has, for weights of a type.
LinearKernel linear_kernel_scalar(Dtype weight);
LinearKernel linear_kernel_neon(Dtype weight);
LinearKernel linear_kernel_sve256(Dtype weight);
LinearKernel linear_kernel_avx2(Dtype weight);
LinearKernel linear_kernel_avx512(Dtype weight);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_LINEAR_PASS_H_
