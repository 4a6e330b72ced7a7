#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "memory/extent_map.h"

namespace cxl_offload::memory {
namespace {

std::byte* at(uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

Arena arena_of(uintptr_t begin, size_t bytes) {
  Arena arena;
  arena.begin = at(begin);
  arena.bytes = bytes;
  return arena;
}

// Free intervals by address, merged by brute force.
class Model {
 public:
  void insert(uintptr_t begin, size_t bytes, int arena) { free_[begin] = {bytes, arena}; }
  void take(uintptr_t begin, size_t bytes) {
    free_ = merged();
    auto interval = std::prev(free_.upper_bound(begin));
    const auto [from, piece] = *interval;
    free_.erase(interval);
    if (from < begin) free_[from] = {begin - from, piece.arena};
    const uintptr_t end = from + piece.bytes;
    if (begin + bytes < end) free_[begin + bytes] = {end - begin - bytes, piece.arena};
  }
  // The smallest interval that holds `bytes`, the lowest among equals; 0 if none does.
  uintptr_t best_fit(size_t bytes) const {
    uintptr_t best = 0;
    size_t best_bytes = SIZE_MAX;
    for (const auto& [begin, piece] : merged()) {
      if (piece.bytes >= bytes && piece.bytes < best_bytes) {
        best = begin;
        best_bytes = piece.bytes;
      }
    }
    return best;
  }
  size_t bytes() const {
    size_t sum = 0;
    for (const auto& [begin, piece] : free_) sum += piece.bytes;
    return sum;
  }
  size_t count() const { return merged().size(); }

 private:
  struct Piece {
    size_t bytes;
    int arena;
  };
  std::map<uintptr_t, Piece> merged() const {
    std::map<uintptr_t, Piece> result;
    for (const auto& [begin, piece] : free_) {
      if (!result.empty()) {
        auto& [last, last_piece] = *result.rbegin();
        if (last + last_piece.bytes == begin && last_piece.arena == piece.arena) {
          last_piece.bytes += piece.bytes;
          continue;
        }
      }
      result[begin] = piece;
    }
    return result;
  }
  std::map<uintptr_t, Piece> free_;
};

TEST(best_fit_equals_model_under_random_operations) {
  std::mt19937_64 random(20240607);
  ExtentMap map;
  Model model;
  // Side by side, so that merging across arenas would show.
  std::vector<Arena> arenas = {arena_of(1 << 20, 5000), arena_of((1 << 20) + 5000, 3000),
                               arena_of((1 << 20) + 8000, 9000)};
  for (size_t i = 0; i < arenas.size(); ++i) {
    map.give_back(map.add(&arenas[i]));
    model.insert(reinterpret_cast<uintptr_t>(arenas[i].begin), arenas[i].bytes,
                 static_cast<int>(i));
  }
  std::vector<Extent*> live;
  for (int step = 0; step < 20000; ++step) {
    const size_t bytes = 1 + random() % (random() % 4 == 0 ? 2000 : 60);
    const uintptr_t expected = model.best_fit(bytes);
    const auto found = map.best_fit(bytes);
    CHECK_EQ(found == map.end() ? 0 : reinterpret_cast<uintptr_t>(found->second->begin), expected);
    if (expected != 0 && (live.empty() || random() % 2 == 0)) {
      const size_t offset = random() % (found->second->bytes - bytes + 1);
      Extent* taken = map.take(found->second, offset, bytes);
      model.take(expected + offset, bytes);
      CHECK_EQ(reinterpret_cast<uintptr_t>(taken->begin), expected + offset);
      CHECK_EQ(taken->bytes, bytes);
      if (bytes > 1 && random() % 4 == 0) {
        Extent* rest = map.split(taken, 1 + random() % (bytes - 1));
        CHECK(taken->end() == rest->begin);
        live.push_back(rest);
      }
      live.push_back(taken);
    } else if (!live.empty()) {
      std::swap(live[random() % live.size()], live.back());
      const Extent* extent = live.back();
      model.insert(reinterpret_cast<uintptr_t>(extent->begin), extent->bytes,
                   static_cast<int>(extent->arena - arenas.data()));
      map.give_back(live.back());
      live.pop_back();
    }
    CHECK_EQ(map.free_bytes(), model.bytes());
    CHECK_EQ(map.free_count(), model.count());
  }
  for (Extent* extent : live) map.give_back(extent);
  CHECK_EQ(map.free_count(), arenas.size());
  CHECK_EQ(map.free_bytes(), 17000u);
}

TEST(give_back_merges_both_neighbours) {
  ExtentMap map;
  Arena arena = arena_of(4096, 300);
  Extent* whole = map.give_back(map.add(&arena));
  Extent* first = map.take(whole, 0, 100);
  Extent* second = map.take(map.best_fit(1)->second, 0, 100);
  Extent* third = map.take(map.best_fit(1)->second, 0, 100);
  CHECK_EQ(map.free_count(), 0u);
  CHECK_EQ(arena.taken, 3u);
  map.give_back(first);
  map.give_back(third);
  CHECK_EQ(map.free_count(), 2u);
  CHECK_EQ(map.give_back(second)->bytes, 300u);
  CHECK_EQ(map.free_count(), 1u);
  CHECK_EQ(arena.taken, 0u);
}

TEST(removed_extent_leaves_a_hole_that_is_never_merged_over) {
  for (const bool upwards : {true, false}) {
    ExtentMap map;
    Arena arena = arena_of(4096, 300);
    Extent* first = map.add(&arena);
    Extent* second = map.split(first, 100);
    Extent* third = map.split(second, 100);
    map.remove(second);
    map.give_back(upwards ? first : third);
    map.give_back(upwards ? third : first);
    CHECK_EQ(map.free_count(), 2u);
    CHECK_EQ(map.largest()->bytes, 100u);
    map.remove(&arena);
    CHECK_EQ(map.free_count(), 0u);
    CHECK_EQ(map.free_bytes(), 0u);
    CHECK(arena.first == nullptr);
  }
}

TEST(waiting_neighbour_is_not_merged) {
  ExtentMap map;
  Arena arena = arena_of(4096, 200);
  Extent* first = map.add(&arena);
  Extent* second = map.split(first, 100);
  second->state = ExtentState::kWaiting;
  CHECK_EQ(map.give_back(first)->bytes, 100u);
  CHECK_EQ(map.give_back(second)->bytes, 200u);
}

}  // namespace
}  // namespace cxl_offload::memory
