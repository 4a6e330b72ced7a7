// Threads that stay alive between jobs, in groups bound near the nodes whose bytes they read.
#ifndef CXL_OFFLOAD_KERNELS_WORKER_TEAM_H_
#define CXL_OFFLOAD_KERNELS_WORKER_TEAM_H_

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

namespace cxl_offload::kernels {

struct WorkerGroup {
  int node = -1;          // the group works on the bytes of this node first; -1: on any
  size_t threads = 1;     // at least 1
  std::vector<int> cpus;  // the CPUs that its threads may use; if empty, those of the process
};

class WorkerTeam {
 public:
  // Throws InvalidArgument for no group, a group without threads, a node named twice, or a CPU that
  // this process may not use. No thread is started before the first job.
  explicit WorkerTeam(std::vector<WorkerGroup> groups);
  ~WorkerTeam();
  WorkerTeam(const WorkerTeam&) = delete;
  WorkerTeam& operator=(const WorkerTeam&) = delete;

  const std::vector<WorkerGroup>& groups() const { return groups_; }
  size_t threads() const;

  // Runs job(group) on every thread and returns when all of them are done.
  //
  // The team uses the threads of OpenMP (kernels/openmp.h) if OpenMP has as many, and if the team
  // has one thread for every CPU of its groups or a single group that is bound to no CPUs.
  // Otherwise it uses threads of its own. The caller is one of the threads if they are OpenMP's, or
  // if there is a single group that is not bound; otherwise it waits for them. Several callers take
  // turns.
  //
  // A job must not throw. It has to take its work from a queue, that of its group first, because
  // fewer threads than asked for may run it. All threads compute in the caller's mode
  // (kernels/float_mode.h). A forked child has none of the parent's threads, so the team starts new
  // ones there. Throws SystemError when a thread cannot be made or bound; then no job has run.
  void run(const std::function<void(size_t group)>& job);

 private:
  class Crew;
  Crew& crew();

  std::vector<WorkerGroup> groups_;
  std::atomic<Crew*> crew_;
};

}  // namespace cxl_offload::kernels

#endif  // CXL_OFFLOAD_KERNELS_WORKER_TEAM_H_
