// Threads that are kept to share pieces of work. Making threads would take longer than most copies.
#ifndef CXL_OFFLOAD_TRANSFER_COPY_TEAM_H_
#define CXL_OFFLOAD_TRANSFER_COPY_TEAM_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "core/fork_guard.h"

namespace cxl_offload::transfer {

// Thread-safe: one caller at a time shares out pieces, and others wait. A forked child has no
// helpers, and the caller does all pieces there.
class CopyTeam {
 public:
  // Makes one thread on each of these CPUs, beside the caller's own. Throws InvalidArgument for a
  // CPU that this process may not run on, SystemError when a thread cannot be made or bound.
  explicit CopyTeam(const std::vector<int>& helper_cpus);
  ~CopyTeam();
  CopyTeam(const CopyTeam&) = delete;
  CopyTeam& operator=(const CopyTeam&) = delete;

  // How many threads there are, with the caller.
  size_t threads() const { return helpers_ + 1; }
  // Calls work(i) once for every i below `pieces`, on up to `threads` threads, and returns when all
  // are done. `work` must not throw.
  void share_out(size_t pieces, size_t threads, const std::function<void(size_t)>& work);

 private:
  class Crew;

  const size_t helpers_;
  const ProcessOwned<Crew> crew_;
};

}  // namespace cxl_offload::transfer

#endif  // CXL_OFFLOAD_TRANSFER_COPY_TEAM_H_
