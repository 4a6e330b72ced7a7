#include <signal.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "check.h"
#include "core/threads.h"
#include "kernels/openmp.h"
#include "kernels/shared_cpus.h"
#include "os/run_delays.h"

namespace cxl_offload {
namespace {

using kernels::SharingJudge;

constexpr double kLook = 1.0 / 16;  // sums are exact

// Judges looks in which a thread waited so much, one after the other; the answers to the last.
bool after(SharingJudge& judge, double& now, int looks, double waited) {
  bool sleep = false;
  for (int i = 0; i < looks; ++i) sleep = judge.judge(waited, now += kLook);
  return sleep;
}

// How many looks without waits it takes until threads spin again.
int quiet_looks(SharingJudge& judge, double& now) {
  int looks = 1;
  while (judge.judge(0, now += kLook)) ++looks;
  return looks;
}

TEST(one_busy_look_is_not_enough) {
  SharingJudge judge;
  double now = 0;
  for (int i = 0; i < 100; ++i) {
    CHECK(!after(judge, now, 1, 0.9));
    CHECK(!after(judge, now, 1, 0.19));
  }
  CHECK(after(judge, now, 2, 0.21));
}

TEST(threads_sleep_while_one_waits_and_spin_after_a_while) {
  SharingJudge judge;
  double now = 100;
  CHECK(after(judge, now, 2, 0.5));
  CHECK(after(judge, now, 1000, 0.11));
  for (int i = 0; i < 100; ++i) {
    CHECK(after(judge, now, 7, 0));
    CHECK(after(judge, now, 1, 0.5));
  }
  CHECK_EQ(quiet_looks(judge, now), 8);
  CHECK(!after(judge, now, 1000, 0.05));
}

TEST(every_mistake_doubles_the_while_up_to_a_limit) {
  SharingJudge judge;
  double now = 0;
  int expected = 8;
  for (int mistake = 0; mistake < 10; ++mistake) {
    CHECK(after(judge, now, 2, 0.5));
    CHECK_EQ(quiet_looks(judge, now), expected);
    expected = std::min(2 * expected, 256);
  }
  // Spinning went well for longer than that: no mistake.
  CHECK(!after(judge, now, 400, 0));
  CHECK(after(judge, now, 2, 0.5));
  CHECK_EQ(quiet_looks(judge, now), 8);
}

TEST(longest_wait_is_of_one_thread_and_without_its_wake_ups) {
  const os::RunDelays before = {{1, {1000, 10}}, {2, {500, 5}}, {3, {90000, 9}}};
  const os::RunDelays after = {{1, {5000, 20}}, {2, {4500, 6}}, {4, {300, 1}}};
  CHECK_EQ(os::longest_wait(before, after, 0), 4000u);
  CHECK_EQ(os::longest_wait(before, after, 100), 3900u);
  CHECK_EQ(os::longest_wait(before, after, 5000), 0u);
  CHECK_EQ(os::longest_wait(before, before, 0), 0u);
}

TEST(thread_that_got_the_number_of_one_that_ended_began_anew) {
  CHECK_EQ(os::longest_wait({{7, {9000, 90}}}, {{7, {700, 2}}}, 100), 500u);
}

std::jthread thread_that_waits() {
  return std::jthread([](const std::stop_token& stop) {
    while (!stop.stop_requested()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
}

TEST(reading_finds_every_thread_but_the_caller) {
  const std::jthread first = thread_that_waits();  // a sanitizer makes one of its own beside it
  const size_t before = os::read_run_delays().size();
  const std::jthread second = thread_that_waits();
  const os::RunDelays then = os::read_run_delays();
  CHECK_EQ(then.size(), before + 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(os::read_run_delays().rbegin()->second.runs > then.rbegin()->second.runs);
}

sigset_t mask_of_this_thread() {
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  return mask;
}

TEST(threads_of_the_core_are_given_no_signals_but_those_of_faults) {
  sigset_t inside;
  start_thread("test", [&inside] { inside = mask_of_this_thread(); }).join();
  for (const int signal : {SIGINT, SIGTERM, SIGALRM, SIGUSR1}) {
    CHECK_EQ(sigismember(&inside, signal), 1);
  }
  for (const int signal : {SIGBUS, SIGSEGV, SIGFPE}) CHECK_EQ(sigismember(&inside, signal), 0);
  const sigset_t here = mask_of_this_thread();
  CHECK_EQ(sigismember(&here, SIGINT), 0);
}

TEST(nothing_is_done_without_openmp) {
  CHECK(!kernels::why_openmp_cannot_sleep().empty());
  const kernels::SleepingWaits waits;
  const kernels::SharedCpus shared;
  CHECK_EQ(shared.sleeping_seconds(), 0.0);
  CHECK(!shared.why_off().empty());
}

}  // namespace
}  // namespace cxl_offload
