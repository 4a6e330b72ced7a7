// Devices as a source of memory: the account of their pieces against a model, regions returned in
// parts, and the claim on the file of a device.
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "core/error.h"
#include "gpu/fake_driver.h"
#include "memory/dax_region.h"
#include "memory/session.h"
#include "os/linux_dax.h"
#include "simulated_ground.h"

namespace cxl_offload::memory {
namespace {

using os::DaxPiece;

constexpr size_t kAlign = 2 * kMiB;
constexpr size_t kPages = 48;
constexpr char kName[] = "dax0.0";

std::shared_ptr<os::SimulatedKernel> kernel_with_device() {
  os::SimulatedMachine machine = ground_machine();
  machine.dax.push_back({kName, kPages * kAlign, kAlign, "devdax", -1});
  return std::make_shared<os::SimulatedKernel>(machine);
}

TEST(pieces_are_those_of_a_model_whatever_is_taken_and_given_back) {
  const auto kernel = kernel_with_device();
  DaxStore store(kernel->open_dax(kName), std::nullopt);
  std::vector<bool> taken(kPages, false);
  std::vector<std::vector<DaxPiece>> held;
  std::mt19937 random(7);
  const auto mark = [&](const DaxPiece& piece, bool now) {
    CHECK(piece.bytes > 0 && piece.offset % kAlign == 0 && piece.bytes % kAlign == 0);
    for (size_t page = piece.offset / kAlign; page < (piece.offset + piece.bytes) / kAlign;
         ++page) {
      CHECK(taken.at(page) != now);
      taken[page] = now;
    }
  };
  for (int step = 0; step < 20000; ++step) {
    if (!held.empty() && random() % 2 == 0) {
      std::swap(held[random() % held.size()], held.back());
      for (const DaxPiece& piece : held.back()) {
        mark(piece, false);
        store.give_back(piece);
      }
      held.pop_back();
    }
    size_t free = 0, run = 0, longest = 0;
    for (const bool page : taken) {
      run = page ? 0 : run + 1;
      free += page ? 0 : 1;
      longest = std::max(longest, run);
    }
    const size_t wanted = 1 + random() % 12;
    if (wanted > free) {
      CHECK_THROWS(OutOfMemory, store.take(wanted * kAlign));
      continue;
    }
    held.push_back(store.take(wanted * kAlign));
    CHECK_EQ(held.back().size() == 1, longest >= wanted);
    size_t bytes = 0;
    for (const DaxPiece& piece : held.back()) {
      mark(piece, true);
      bytes += piece.bytes;
    }
    CHECK_EQ(bytes, wanted * kAlign);
    CHECK_EQ(store.use().current_bytes, (kPages - free + wanted) * kAlign);
  }
  for (const auto& pieces : held) {
    for (const DaxPiece& piece : pieces) store.give_back(piece);
  }
  CHECK_EQ(store.hole_count(), 1u);
  CHECK_EQ(store.use().current_bytes, 0u);
}

TEST(region_returned_in_random_parts_keeps_the_rest) {
  std::mt19937 random(11);
  for (int round = 0; round < 40; ++round) {
    const auto kernel = kernel_with_device();
    const auto store = std::make_shared<DaxStore>(kernel->open_dax(kName), std::nullopt);
    // Every second page is taken, so that the region is of many pieces.
    std::vector<DaxPiece> odd;
    for (size_t page = 0; page < kPages; ++page) odd.push_back(store->take(kAlign).front());
    for (size_t page = 0; page < kPages; page += 2) store->give_back(odd[page]);
    auto region = std::make_unique<DaxRegion>(store, kPages / 2 * kAlign);
    const size_t pages = region->range().size() / kAlign;
    const auto byte_of = [&](size_t page) -> std::byte& { return region->range()[page * kAlign]; };
    for (size_t page = 0; page < pages; ++page) byte_of(page) = std::byte(page + 1);
    std::vector<bool> left(pages, false);
    for (size_t first = random() % 4; first < pages; first += random() % 5 + 1) {
      const size_t count = std::min(pages - first, 1 + random() % 3);
      region->release(first * kAlign, count * kAlign);
      for (size_t i = 0; i < count; ++i) left[first + i] = true;
      first += count;
    }
    size_t kept = 0;
    for (size_t page = 0; page < pages; ++page) {
      if (left[page]) continue;
      ++kept;
      CHECK(byte_of(page) == std::byte(page + 1));
    }
    CHECK_EQ(kernel->dax_mapped_bytes(kName), kept * kAlign);
    CHECK_EQ(store->use().current_bytes, (kPages / 2 + kept) * kAlign);
    region.reset();
    CHECK_EQ(kernel->dax_mapped_bytes(kName), 0u);
    for (size_t page = 1; page < kPages; page += 2) store->give_back(odd[page]);
    CHECK_EQ(store->hole_count(), 1u);
  }
}

TEST(refused_mapping_gives_its_pieces_back) {
  const auto kernel = kernel_with_device();
  const auto store = std::make_shared<DaxStore>(kernel->open_dax(kName), std::nullopt);
  kernel->faults().add({os::Operation::kMapDax, os::FaultEffect::kRefuse, 1, EIO, -1});
  CHECK_THROWS(SystemError, DaxRegion(store, 5 * kAlign));
  CHECK_EQ(store->use().current_bytes, 0u);
  CHECK_EQ(store->hole_count(), 1u);
}

TEST(threads_share_one_device_without_overlap) {
  const auto kernel = kernel_with_device();
  auto budget = std::make_shared<NodeBudget>(std::map<os::NodeId, uint64_t>{});
  const auto session =
      std::make_shared<Session>(Placer{kernel, std::move(budget), Reserve{0.0, 0, 0}, 2});
  const auto driver = std::make_shared<gpu::FakeDriver>();
  Rule rule;
  rule.kind = RuleKind::kDevice;
  rule.device = kName;
  std::atomic<int> served = 0;
  {
    std::vector<std::jthread> threads;
    for (int id = 0; id < 3; ++id) {
      threads.emplace_back([&, id] {
        for (size_t i = 0; i < 80; ++i) {
          try {
            const size_t bytes = (i * 977 + 1) * 4096 % (9 * kAlign) + 64;
            const auto block = session->allocate(bytes, rule, id == 0 ? driver : nullptr);
            std::memset(block->range().data(), id + 1, 64);
            std::memset(block->range().data() + bytes - 64, id + 1, 64);
            CHECK(block->range()[0] == std::byte(id + 1));
            CHECK(block->range()[bytes - 1] == std::byte(id + 1));
            ++served;
          } catch (const OutOfMemory&) {
          }
        }
      });
    }
  }
  CHECK(served > 80);
  session->trim();
  CHECK_EQ(kernel->dax_mapped_bytes(kName), 0u);
  CHECK_EQ(driver->counts().registered_ranges, 0u);
}

// A folder with the files of a device, gone with this.
class Files {
 public:
  Files() {
    char name[] = "/tmp/cxl_offload_dax_XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    root_ = name;
    const auto device = root_ / "sys/bus/dax/devices" / kName;
    std::filesystem::create_directories(device);
    std::filesystem::create_directories(root_ / "dev");
    std::ofstream(device / "size") << kPages * kAlign << "\n";
    std::ofstream(device / "align") << kAlign << "\n";
    std::filesystem::create_symlink("drivers/device_dax", device / "driver");
    std::ofstream file(root_ / "dev" / kName);
    file.close();
    CHECK(truncate((root_ / "dev" / kName).c_str(), kPages * kAlign) == 0);
  }
  ~Files() { std::filesystem::remove_all(root_); }

  std::string root() const { return root_; }

 private:
  std::filesystem::path root_;
};

TEST(file_of_a_device_is_claimed_once_and_mapped_in_the_order_of_its_pieces) {
  const Files files;
  auto device = os::open_linux_dax(files.root(), kName);
  CHECK_EQ(device->size_bytes(), kPages * kAlign);
  CHECK_THROWS(SystemError, os::open_linux_dax(files.root(), kName));
  const std::vector<DaxPiece> pieces{{4 * kAlign, kAlign}, {0, 2 * kAlign}};
  std::byte* begin = device->map(pieces);
  CHECK_EQ(reinterpret_cast<uintptr_t>(begin) % kAlign, 0u);
  begin[0] = std::byte{4};
  begin[kAlign] = std::byte{1};
  const std::vector<DaxPiece> whole{{0, 5 * kAlign}};
  std::byte* again = device->map(whole);
  CHECK(again[4 * kAlign] == std::byte{4});
  CHECK(again[0] == std::byte{1});
  device->unmap({begin, 3 * kAlign});
  device->unmap({again, 5 * kAlign});
  device.reset();
  CHECK_EQ(os::open_linux_dax(files.root(), kName)->name(), kName);
}

TEST(names_of_devices_are_told_from_others) {
  for (const char* name : {"dax0.0", "dax12.3"}) CHECK(os::is_dax_name(name));
  for (const char* name :
       {"", "dax", "dax.", "dax0", "dax0.", "dax.0", "xdax0.0", "dax0.0/..", "dax-1.0"}) {
    CHECK(!os::is_dax_name(name));
  }
}

}  // namespace
}  // namespace cxl_offload::memory
