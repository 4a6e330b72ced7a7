// Makes threads that are always joined and are given no signals from outside, and throws a plain
// error where one cannot be made.
#ifndef CXL_OFFLOAD_CORE_THREADS_H_
#define CXL_OFFLOAD_CORE_THREADS_H_

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/signals.h"

namespace cxl_offload {

// Throws SystemError where std::thread throws std::system_error; `what` begins the message. Returns
// a std::jthread, which is joined even when making the next thread fails.
template <typename Work>
std::jthread start_thread(const std::string& what, Work&& work) {
  const NoSignals here;
  try {
    return std::jthread(std::forward<Work>(work));
  } catch (const std::system_error& refused) {
    throw SystemError(refused.code().value(),
                      what +
                          ": no further thread could be made; ask for fewer or raise the limit "
                          "(ulimit -u)");
  }
}

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_THREADS_H_
