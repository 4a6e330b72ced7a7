// Numbers read from the kernel's own text files.
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <string>

#include "check.h"
#include "os/linux_files.h"
#include "os/populate.h"

namespace cxl_offload::os {
namespace {

// Abridged /proc/zoneinfo: a low zone that is kept for others, a zone above its watermark, one
// below it, and per-CPU counters with names of their own.
constexpr const char* kZoneinfo = R"(Node 0, zone    DMA32
  per-node stats
      nr_inactive_anon 0
      workingset_nodes 0
  pages free     1000
        boost    0
        min      80
        low      100
        high     120
        managed  2000
        protection: (0, 0, 471, 471, 471)
      nr_free_pages 1000
  pagesets
    cpu: 0
              count:    7
              high:  764
              low:   9
Node 0, zone   Normal
  pages free     50
        min      60
        low      75
        high     90
        managed  3000
        protection: (0, 0, 0, 0, 0)
Node 1, zone  Movable
  pages free     4000
        min      30
        low      40
        high     50
        managed  4000
        protection: (0, 0, 0, 0, 0)
)";

constexpr const char* kMaps = R"(1000-3000 rw-p 00000000 00:00 0
3000-4000 rw-s 00000000 00:19 1234 /dev/shm/some file
4000-5000 r--p 00000000 00:00 0
7000-9000 rw-p 00000000 00:00 0 [stack]
)";

}  // namespace

TEST(range_is_writable_where_every_byte_is_mapped_for_it) {
  CHECK(is_writable(kMaps, 0x1000, 0x4000));
  CHECK(is_writable(kMaps, 0x2000, 0x3001));
  CHECK(is_writable(kMaps, 0x7fff, 0x9000));
  CHECK(!is_writable(kMaps, 0x3000, 0x5000));  // read-only
  CHECK(!is_writable(kMaps, 0x0fff, 0x2000));  // begins before
  CHECK(!is_writable(kMaps, 0x8000, 0x9001));  // ends after
  CHECK(!is_writable(kMaps, 0x5000, 0x6000));  // a hole
  CHECK(!is_writable("", 0x1000, 0x2000));
}

TEST(withheld_are_watermarks_and_protection_but_no_more_than_is_free) {
  CHECK_EQ(withheld_bytes(kZoneinfo, 0, 4096), (571u + 50u) * 4096u);
  CHECK_EQ(withheld_bytes(kZoneinfo, 1, 4096), 40u * 4096u);
}

TEST(nothing_is_withheld_on_a_node_that_is_not_listed) {
  CHECK_EQ(withheld_bytes(kZoneinfo, 2, 4096), 0u);
  CHECK_EQ(withheld_bytes("", 0, 4096), 0u);
  CHECK_EQ(withheld_bytes("Node 0, zone Normal\n", 0, 4096), 0u);
}

TEST(node_one_is_not_node_eleven) {
  const std::string eleven = "Node 11, zone Normal\n  pages free 9\n low 5\n protection: (0, 0)\n";
  CHECK_EQ(withheld_bytes(eleven, 1, 1), 0u);
  CHECK_EQ(withheld_bytes(eleven, 11, 1), 5u);
}

TEST(transparent_huge_pages_are_as_large_as_the_kernel_says) {
  const std::string path = "/tmp/cxl_offload_hpage_pmd_size_" + std::to_string(getpid());
  for (const auto& [text, bytes] : std::map<std::string, size_t>{{"536870912\n", size_t{512} << 20},
                                                                 {"2097152\n", size_t{2} << 20},
                                                                 {"0\n", size_t{2} << 20},
                                                                 {"nonsense", size_t{2} << 20}}) {
    std::ofstream(path) << text;
    CHECK_EQ(read_transparent_huge_bytes(path), bytes);
  }
  std::remove(path.c_str());
  CHECK_EQ(read_transparent_huge_bytes(path), size_t{2} << 20);
}

}  // namespace cxl_offload::os
