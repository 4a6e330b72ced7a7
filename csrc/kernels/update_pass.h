// The inner loop of an update, built once for every instruction set.
#ifndef CXL_OFFLOAD_KERNELS_UPDATE_PASS_H_
#define CXL_OFFLOAD_KERNELS_UPDATE_PASS_H_

#include <cstddef>
#include <cstdint>

#include "core/cpu_features.h"
#include "core/sizes.h"
#include "core/tensor_view.h"
#include "kernels/update.h"

namespace cxl_offload::kernels {

enum class RuleKind { kAdam, kAdagrad, kLion };
inline constexpr int kRuleKinds = 3;

// The constants of a rule for one step. They are computed in double and used in float.
struct Constants {
  float grad_scale = 1;
  float l2 = 0;     // this times the parameter is added to the gradient
  float decay = 1;  // the parameter is multiplied by it first
  float beta1 = 0;
  float rest1 = 0;  // 1 - beta1
  float beta2 = 0;
  float rest2 = 0;
  float root_scale = 1;  // the root of the second moment is multiplied by it
  float eps = 0;
  float minus_step = 0;
};

enum class CopyKind { kNone, kBf16, kF16 };
inline constexpr int kCopyKinds = 3;

// The streams of one parameter. `second` and `copy` are null where there are none.
struct Streams {
  std::byte* param = nullptr;
  const std::byte* grad = nullptr;
  std::byte* first = nullptr;
  std::byte* second = nullptr;
  std::byte* copy = nullptr;
  // Whether the copy is stored past the caches. That is right where nobody reads the copy soon,
  // since a cached store would first read the line.
  bool copy_past_caches = false;
  // The scales of states of 8 bits: one byte for each block of kCodedElements.
  uint8_t* first_scales = nullptr;
  uint8_t* second_scales = nullptr;
  uint64_t noise_seed = 0;  // for passes that round at random
  size_t ahead = 0;  // how many elements ahead every stream is fetched; 0: the processor knows best
};

// The elements of one turn of the loop, which fill whole lines of every stream. What is left at the
// end of a range is copied to buffers and computed by the same instructions, so that the result
// does not depend on how ranges are cut.
inline constexpr size_t kBlockElements = 32;

// Updates elements [begin, end). For passes that round at random, `begin` is a multiple of
// kCodedElements.
using UpdatePass = void (*)(const Streams& streams, size_t begin, size_t end,
                            const Constants& constants);

struct PassKey {
  RuleKind rule = RuleKind::kAdam;
  Dtype param = Dtype::kFloat32;
  Dtype grad = Dtype::kFloat32;
  Dtype state = Dtype::kFloat32;  // float32 or bfloat16; also uint8 for passes that round at random
  CopyKind copy = CopyKind::kNone;  // any other kind needs float32 parameters
};

// These return the pass that rounds at random, or null when there is none for the key.
UpdatePass noisy_pass_scalar(const PassKey& key);
UpdatePass noisy_pass_neon(const PassKey& key);
UpdatePass noisy_pass_sve256(const PassKey& key);
UpdatePass noisy_pass_avx2(const PassKey& key);
UpdatePass noisy_pass_avx512(const PassKey& key);

UpdatePass update_pass_scalar(const PassKey& key);
UpdatePass update_pass_neon(const PassKey& key);
UpdatePass update_pass_sve256(const PassKey& key);
UpdatePass update_pass_avx2(const PassKey& key);
UpdatePass update_pass_avx512(const PassKey& key);
// Only where every stream is bfloat16 and the processor rounds to that type; null otherwise.
UpdatePass update_pass_bf16_avx512(const PassKey& key);

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_UPDATE_PASS_H_
