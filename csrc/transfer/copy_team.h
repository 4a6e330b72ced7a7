// Threads that are kept and share pieces of work: making threads takes longer than most copies.
#ifndef CXL_OFFLOAD_TRANSFER_COPY_TEAM_H_
#define CXL_OFFLOAD_TRANSFER_COPY_TEAM_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "core/fork_guard.h"

namespace cxl_offload::transfer {

// Thread-safe: one sharing out at a time, others wait for it. In a forked child the helpers are
// not there, and the caller does all pieces.
class CopyTeam {
 public:
  // One thread on each of these CPUs, beside the caller's own. Throws InvalidArgument for a CPU
  // that this process may not run on, SystemError when a thread cannot be made or bound.
  explicit CopyTeam(const std::vector<int>& helper_cpus);
  ~CopyTeam();
  CopyTeam(const CopyTeam&) = delete;
  CopyTeam& operator=(const CopyTeam&) = delete;

  // With the caller.
  size_t threads() const { return helpers_ + 1; }
  // work(i) once for every i below `pieces`, which must not throw, by up to `threads` threads;
  // returns when all are done.
  void share_out(size_t pieces, size_t threads, const std::function<void(size_t)>& work);

 private:
  class Crew;

  const size_t helpers_;
  const ProcessOwned<Crew> crew_;
};

}  // namespace cxl_offload::transfer

#endif  // CXL_OFFLOAD_TRANSFER_COPY_TEAM_H_
