#include <thread>
#include <vector>

#include "check.h"
#include "kernels/measured_choice.h"

namespace cxl_offload::kernels {
namespace {

using Choice = MeasuredChoice<3>;

// Runs trials in which way `which` takes so many seconds, until a choice is made.
size_t chosen_of(const std::vector<float>& seconds) {
  Choice choice;
  for (int trial = 0; choice.is_open() && trial < 10000; ++trial) {
    const size_t which = choice.turn();
    // A few trials are disturbed by something else.
    choice.note(which, trial % 11 == 0 ? 100 : seconds.at(which));
  }
  CHECK(!choice.is_open());
  const size_t found = choice.way();
  for (size_t which = 0; which < seconds.size(); ++which) choice.note(which, 0);
  CHECK_EQ(choice.way(), found);  // it stays
  return found;
}

TEST(a_way_is_chosen_for_being_clearly_faster) {
  CHECK_EQ(chosen_of({1, 1, 1}), size_t{0});
  CHECK_EQ(chosen_of({1, 0.99f, 1.2f}), size_t{0});
  CHECK_EQ(chosen_of({1, 0.9f, 1}), size_t{1});
  CHECK_EQ(chosen_of({1, 0.9f, 0.8f}), size_t{2});
}

TEST(a_way_is_chosen_while_threads_note_at_once) {
  Choice choice;
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      while (choice.is_open()) {
        const size_t which = choice.turn();
        choice.note(which, which == 2 ? 1 : 2);
      }
    });
  }
  threads.clear();
  CHECK_EQ(choice.way(), size_t{2});
}

TEST(only_pieces_that_are_large_enough_are_trials) {
  Choice choice;
  std::vector<int> calls(3);
  for (int i = 0; i < 300; ++i) choice.run(9, 10, [&](size_t way) { ++calls.at(way); });
  CHECK(choice.is_open());
  CHECK((calls == std::vector<int>{300, 0, 0}));
  for (int i = 0; i < 300; ++i) choice.run(10, 10, [&](size_t way) { ++calls.at(way); });
  CHECK(!choice.is_open());
}

}  // namespace
}  // namespace cxl_offload::kernels
