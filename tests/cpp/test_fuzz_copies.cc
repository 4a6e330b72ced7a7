// Replays the fuzz target of copies.
#include "check.h"
#include "fuzz_copies.cc"
#include "fuzz_replay.h"

namespace cxl_offload {
namespace {

TEST(generated_transfers_move_all_their_bytes_or_fail) {
  for (uint64_t seed = 1; seed <= 600; ++seed) replay_generated(seed, 1 + seed % 300);
}

TEST(short_inputs_to_copies_are_fine) {
  for (size_t bytes = 0; bytes < 12; ++bytes) {
    for (uint64_t seed = 1; seed <= 20; ++seed) replay_generated(seed, bytes);
  }
}

}  // namespace
}  // namespace cxl_offload
