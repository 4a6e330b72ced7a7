#include "core/interrupt.h"

#include <utility>

namespace cxl_offload {
namespace {

thread_local InterruptScope* innermost = nullptr;

}  // namespace

InterruptScope::InterruptScope(std::function<bool()> wanted)
    : wanted_(std::move(wanted)), outer_(innermost) {
  innermost = this;
}

InterruptScope::~InterruptScope() { innermost = outer_; }

void check_interrupt() {
  if (innermost != nullptr && innermost->wanted_ && innermost->wanted_()) throw Interrupted();
}

}  // namespace cxl_offload
