// Keeps a forked child from using locks that a thread of the parent may have held, threads that it
// does not have, and counts that belong to the parent.
//
// Every object that has such locks, threads or counts has a ForkGuard, or is held by a
// ProcessOwned. Asking either takes two loads and no system call.
#ifndef CXL_OFFLOAD_CORE_FORK_GUARD_H_
#define CXL_OFFLOAD_CORE_FORK_GUARD_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace cxl_offload {

class ForkGuard {
 public:
  ForkGuard();

  // Whether this is a child forked after the guard was made.
  bool in_child() const noexcept;
  // In such a child it throws InvalidArgument, which names `what` was asked for and what to do
  // instead. Elsewhere it does nothing.
  void refuse_in_child(const std::string& what) const;

 private:
  uint64_t process_;
};

// Whether this process was forked and has not started a program since (exec). Libraries loaded into
// such a process cannot know what they inherited; false where /proc cannot be read.
bool is_forked_process();

// An object of one process. A forked child that drops it does not destroy it, because the child
// must not touch what the parent uses, nor wait for threads that it does not have.
template <typename Object>
class ProcessOwned {
 public:
  explicit ProcessOwned(std::unique_ptr<Object> object) : object_(std::move(object)) {}
  ~ProcessOwned() {
    if (in_child()) static_cast<void>(object_.release());
  }
  ProcessOwned(const ProcessOwned&) = delete;
  ProcessOwned& operator=(const ProcessOwned&) = delete;

  bool in_child() const noexcept { return guard_.in_child(); }
  // Throws what ForkGuard::refuse_in_child throws.
  Object& use(const char* what) const {
    if (in_child()) guard_.refuse_in_child(what);
    return *object_;
  }
  // Returns the object in children too, for what never changes.
  const Object& constants() const noexcept { return *object_; }
  // Returns null in a forked child.
  Object* here() const noexcept { return in_child() ? nullptr : object_.get(); }

 private:
  ForkGuard guard_;
  std::unique_ptr<Object> object_;
};

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_FORK_GUARD_H_
