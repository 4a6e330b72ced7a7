#include "memory/fault_in.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "core/interrupt.h"
#include "core/signals.h"

namespace cxl_offload::memory {
namespace {

using os::Kernel;

// One system call's worth of pages: large enough to amortise it, small enough to keep what a
// failure has wasted low.
constexpr size_t kChunkBytes = size_t{64} << 20;

// What a thread faults in before it takes the next piece. The kernel clears pages at some GB/s, so
// a piece takes a millisecond or so: many times what starting a thread costs. Most weights, and
// every chunk of a pool, are larger than two pieces, so that two threads or more work on them.
constexpr size_t kPieceBytes = size_t{8} << 20;

// How often the kernel is asked about pages that should be there and show as absent.
constexpr int kLooks = 3;

// The node number under which pages that are not there are listed.
constexpr os::NodeId kNoNode = -1;

std::vector<Run> cut_into_chunks(const std::vector<Run>& runs, size_t chunk_bytes,
                                 size_t page_bytes) {
  const size_t chunk = std::max(chunk_bytes, page_bytes);
  std::vector<Run> chunks;
  for (const Run& run : runs) {
    for (size_t done = 0; done < run.bytes; done += chunk) {
      chunks.push_back({run.offset + done, std::min(chunk, run.bytes - done), run.node});
    }
  }
  return chunks;
}

// Appends a page to the runs, joined to its neighbour on the same node.
void append_page(std::vector<Run>& runs, size_t offset, size_t bytes, os::NodeId node) {
  if (!runs.empty() && runs.back().node == node &&
      runs.back().offset + runs.back().bytes == offset) {
    runs.back().bytes += bytes;
  } else {
    runs.push_back({offset, bytes, node});
  }
}

// What was done with the pages of a chunk that were found on other nodes.
struct StrayMoves {
  bool moved = false;  // they were asked to move to their node
  size_t shared = 0;   // pages that did not move, because a forked child has them as well
};

StrayMoves move_strays(Kernel& kernel, std::span<std::byte> range, const Run& chunk,
                       size_t page_bytes) {
  const auto pages = range.subspan(chunk.offset, chunk.bytes);
  std::vector<int> nodes(chunk.bytes / page_bytes);
  kernel.query(pages, page_bytes, nodes);
  const auto is_home = [&](int node) { return node == chunk.node; };
  if (std::ranges::any_of(nodes, [](int node) { return node < 0; })) {
    // The kernel may be moving such pages, or marking them for balancing: this waits for it.
    kernel.populate(pages, chunk.node);
    kernel.query(pages, page_bytes, nodes);
  }
  if (std::ranges::all_of(nodes, is_home)) return {};
  const std::vector<os::NodeId> targets(nodes.size(), chunk.node);
  kernel.move(pages, page_bytes, targets, nodes);
  return {true, static_cast<size_t>(std::ranges::count(nodes, os::kPageShared))};
}

// Runs `work(i)` for i in [0, count) on up to `threads` threads; rethrows the first exception. The
// calling thread is one of them; between two items it checks whether it was interrupted.
template <typename Work>
void share_out(size_t count, size_t threads, const Work& work) {
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto drain = [&] {
    for (size_t i = next++; i < count; i = next++) {
      try {
        check_interrupt();
        work(i);
      } catch (...) {
        const std::lock_guard lock(failure_mutex);
        if (!failure) failure = std::current_exception();
        next = count;
      }
    }
  };
  {
    std::vector<std::jthread> helpers;
    try {
      const NoSignals here;
      for (size_t i = 1; i < std::min(threads, count); ++i) helpers.emplace_back(drain);
    } catch (const std::system_error&) {  // no more threads can be made: go on with those there are
    }
    drain();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

Placed fault_in(Kernel& kernel, std::span<std::byte> range, const std::vector<Run>& runs,
                size_t page_bytes, size_t max_threads) {
  const auto chunks = cut_into_chunks(runs, kPieceBytes, page_bytes);
  const size_t threads = std::clamp<size_t>(range.size() / kPieceBytes, 1, max_threads);
  std::atomic<bool> moved{false};
  std::atomic<size_t> shared{0};
  share_out(chunks.size(), threads, [&](size_t i) {
    kernel.populate(range.subspan(chunks[i].offset, chunks[i].bytes), chunks[i].node);
    const StrayMoves strays = move_strays(kernel, range, chunks[i], page_bytes);
    if (strays.moved) moved = true;
    shared += strays.shared;
  });
  // Asks once more about the whole range: a move may take along pages that were in their place.
  return {moved ? look_for_runs(kernel, range, page_bytes) : runs, shared * page_bytes};
}

Placed move_to_runs(Kernel& kernel, std::span<std::byte> range, const std::vector<Run>& runs,
                    size_t page_bytes) {
  StrayMoves all;
  for (const Run& chunk : cut_into_chunks(runs, kChunkBytes, page_bytes)) {
    check_interrupt();
    const StrayMoves strays = move_strays(kernel, range, chunk, page_bytes);
    all.moved = all.moved || strays.moved;
    all.shared += strays.shared;
  }
  return {all.moved ? look_for_runs(kernel, range, page_bytes) : runs, all.shared * page_bytes};
}

std::vector<Run> look_for_runs(const Kernel& kernel, std::span<const std::byte> range,
                               size_t page_bytes) {
  auto runs = query_runs(kernel, range, page_bytes);
  const auto is_absent = [](const Run& run) { return run.node < 0; };
  for (int look = 1; look < kLooks && std::ranges::any_of(runs, is_absent); ++look) {
    std::this_thread::yield();
    runs = query_runs(kernel, range, page_bytes);
  }
  return runs;
}

std::vector<Run> query_runs(const Kernel& kernel, std::span<const std::byte> range,
                            size_t page_bytes) {
  std::vector<Run> runs;
  const size_t chunk = std::max(kChunkBytes, page_bytes);
  std::vector<int> nodes;
  for (size_t offset = 0; offset < range.size(); offset += chunk) {
    const size_t bytes = std::min(chunk, range.size() - offset);
    nodes.resize(bytes / page_bytes);
    kernel.query(range.subspan(offset, bytes), page_bytes, nodes);
    for (size_t i = 0; i < nodes.size(); ++i) {
      append_page(runs, offset + i * page_bytes, page_bytes, std::max(nodes[i], kNoNode));
    }
  }
  return runs;
}

NodeBytes query_bytes(const Kernel& kernel, std::span<const std::byte> range, size_t page_bytes) {
  NodeBytes total;
  if (range.empty()) return total;
  const auto begin = reinterpret_cast<uintptr_t>(range.data());
  const size_t lead = begin % page_bytes;
  const size_t pages = (lead + range.size() + page_bytes - 1) / page_bytes;
  std::vector<int> nodes(pages);
  kernel.query({range.data() - lead, pages * page_bytes}, page_bytes, nodes);
  for (size_t i = 0; i < pages; ++i) {
    const size_t first = std::max(i * page_bytes, lead);
    const size_t last = std::min((i + 1) * page_bytes, lead + range.size());
    total[std::max(nodes[i], kNoNode)] += last - first;
  }
  return total;
}

}  // namespace cxl_offload::memory
