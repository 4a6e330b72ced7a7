// Keeps a forked child from using locks that a thread of the parent may have held, threads that it
// does not have, and counts that belong to the parent.
//
// Every object with one of these has a ForkGuard, or is held by a ProcessOwned. Both cost two loads
// to ask, and no system call.
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
  // In such a child throws InvalidArgument: `what`, and what to do instead. Elsewhere does nothing.
  void refuse_in_child(const std::string& what) const;

 private:
  uint64_t process_;
};

// Whether this process was forked and has not started a program since (exec). Libraries loaded into
// such a process cannot know what they inherited; false where /proc cannot be read.
bool is_forked_process();

// An object of one process. A forked child that drops it leaves it undestroyed: it may not touch
// what the parent uses, nor wait for threads that are not there.
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
  // Throws as ForkGuard::refuse_in_child.
  Object& use(const char* what) const {
    if (in_child()) guard_.refuse_in_child(what);
    return *object_;
  }
  // For what never changes, and is read in children as well.
  const Object& constants() const noexcept { return *object_; }
  // Null in a forked child.
  Object* here() const noexcept { return in_child() ? nullptr : object_.get(); }

 private:
  ForkGuard guard_;
  std::unique_ptr<Object> object_;
};

}  // namespace cxl_offload

#endif  // CXL_OFFLOAD_CORE_FORK_GUARD_H_
