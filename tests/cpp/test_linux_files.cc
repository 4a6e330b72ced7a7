// Numbers read from the kernel's own text files.
#include "check.h"
#include "os/linux_files.h"

using namespace cxl_offload;

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

}  // namespace

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
