// Forked children: they read tensors, and leave the parent's pool alone.
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>

#include "check.h"
#include "core/fork_guard.h"
#include "fake_regions.h"
#include "memory/pool.h"

namespace cxl_offload::memory {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

struct Fixture {
  explicit Fixture(FakeRules rules = {})
      : source(std::make_shared<FakeSource>(rules)), pool(std::make_shared<Pool>(source)) {}
  std::shared_ptr<FakeSource> source;
  std::shared_ptr<Pool> pool;
};

using Block = std::shared_ptr<Allocation>;

// The child's report as an exit status: 0 is good.
int in_child(const std::function<int()>& body) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

TEST(forked_child_reads_blocks_and_does_not_touch_the_pool) {
  FakeRules rules;
  rules.backed = true;
  Fixture f(rules);
  auto block = f.pool->allocate(kMiB);
  auto small = f.pool->allocate(100);
  std::memset(block->address(), 42, block->bytes());
  const auto before = f.pool->statistics();
  const int status = in_child([&] {
    if (block->address()[kMiB - 1] != std::byte{42}) return 1;
    try {
      f.pool->allocate(10);
      return 2;
    } catch (const InvalidArgument&) {
    }
    if (f.pool->trim().bytes != 0) return 3;
    if (f.pool->statistics().mapped.bytes.current != 0) return 4;
    block.reset();
    small.reset();
    f.pool.reset();  // the last owner: were the pool destroyed, its regions would go
    return f.source->account().now() > kMiB ? 0 : 5;
  });
  CHECK_EQ(status, 0);
  f.pool->check_invariants();
  CHECK_EQ(f.pool->statistics().held.bytes.current, before.held.bytes.current);
  CHECK(block->address()[0] == std::byte{42});
  block.reset();
  small.reset();
  CHECK_EQ(f.pool->trim().bytes, before.mapped.bytes.current);
}

TEST(child_forked_under_the_lock_of_the_pool_does_not_hang) {
  int status = -1;
  Block dropped;
  FakeRules rules;
  rules.cycle_bytes = kMiB;
  rules.on_rule = [&] {  // the pool holds its lock now
    if (dropped == nullptr) return;
    status = in_child([&] {
      alarm(10);
      dropped->displace();
      dropped.reset();
      return 0;
    });
  };
  Fixture f(rules);
  f.pool->allocate(2 * kMiB).reset();
  dropped = f.pool->allocate(kMiB);
  const auto other = f.pool->allocate(kMiB);
  CHECK_EQ(status, 0);
  f.pool->check_invariants();
}

TEST(fork_guard_tells_children_and_their_children) {
  const ForkGuard guard;
  guard.refuse_in_child("use it");
  CHECK(!guard.in_child());
  const auto child = [&] {
    if (!guard.in_child()) return 1;
    const ForkGuard own;
    if (own.in_child()) return 2;
    const int status = in_child([&] { return guard.in_child() && own.in_child() ? 0 : 1; });
    return status != 0 ? 3 : own.in_child() ? 4 : 0;
  };
  CHECK_EQ(in_child(child), 0);
  CHECK(!guard.in_child());
}

TEST(forked_process_knows_that_it_was_forked) {
  CHECK(!is_forked_process());
  CHECK_EQ(in_child([] { return is_forked_process() ? 0 : 1; }), 0);
}

TEST(what_a_process_owns_is_left_alone_by_its_children) {
  int ends = 0;
  struct Counted {
    int& ends;
    ~Counted() { ++ends; }
  };
  auto owned = std::make_unique<ProcessOwned<Counted>>(std::make_unique<Counted>(ends));
  CHECK(owned->here() != nullptr);
  const auto child = [&] {
    if (owned->here() != nullptr) return 1;
    CHECK_THROWS(InvalidArgument, owned->use("use it"));
    owned.reset();
    return ends;
  };
  CHECK_EQ(in_child(child), 0);
  owned.reset();
  CHECK_EQ(ends, 1);
}

TEST(forked_child_can_make_a_pool_of_its_own) {
  const int status = in_child([] {
    Fixture f;
    auto block = f.pool->allocate(kMiB);
    block.reset();
    return f.pool->trim().bytes == kMiB ? 0 : 1;
  });
  CHECK_EQ(status, 0);
}

}  // namespace
}  // namespace cxl_offload::memory
