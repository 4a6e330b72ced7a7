// The floating-point mode of a thread: rounding, and whether subnormal numbers become zero. Threads
// that work for a caller take its mode; otherwise the result would depend on which thread computes
// which part.
#ifndef CXL_OFFLOAD_KERNELS_FLOAT_MODE_H_
#define CXL_OFFLOAD_KERNELS_FLOAT_MODE_H_

#include <cstdint>

namespace cxl_offload::kernels {

// The register that holds the mode, MXCSR of x86-64 or FPCR of Arm, without the flags that
// operations set there.
class FloatMode {
 public:
  static FloatMode of_this_thread();

  bool operator==(const FloatMode&) const = default;

 private:
  friend class ScopedFloatMode;
  explicit FloatMode(uint64_t bits) : bits_(bits) {}
  void set() const;

  uint64_t bits_;
};

// Gives the thread a mode for as long as this object lives. Afterwards the thread has its own mode
// again, because threads of OpenMP belong to others too.
class ScopedFloatMode {
 public:
  explicit ScopedFloatMode(FloatMode mode) : before_(FloatMode::of_this_thread()) {
    changed_ = mode != before_;
    if (changed_) mode.set();
  }
  ~ScopedFloatMode() {
    if (changed_) before_.set();
  }
  ScopedFloatMode(const ScopedFloatMode&) = delete;
  ScopedFloatMode& operator=(const ScopedFloatMode&) = delete;

 private:
  const FloatMode before_;
  bool changed_ = false;
};

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_FLOAT_MODE_H_
