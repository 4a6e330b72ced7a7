// Lets a caller end a long call. Between two steps the call checks whether the caller wants that;
// if so, it undoes what it has done and throws. The caller says how to check. (The bindings ask
// whether Python has a signal to handle.)
#ifndef CXL_OFFLOAD_CORE_INTERRUPT_H_
#define CXL_OFFLOAD_CORE_INTERRUPT_H_

#include <exception>
#include <functional>

namespace cxl_offload {

// The caller wants the call to end. Only the caller may catch it without throwing it again.
class Interrupted final : public std::exception {
 public:
  const char* what() const noexcept override { return "interrupted by the caller"; }
};

// While it lives, check_interrupt() in this thread asks `wanted`. An inner scope replaces the outer
// ones. So an undo, which must not be interrupted again, runs in a scope that asks nobody.
class InterruptScope {
 public:
  explicit InterruptScope(std::function<bool()> wanted);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  friend void check_interrupt();
  const std::function<bool()> wanted_;
  InterruptScope* const outer_;
};

// Throws Interrupted if the innermost scope of this thread says so; does nothing without one.
void check_interrupt();

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_INTERRUPT_H_
