// Which instruction sets are found, against what the system says of the processor. Where an
// emulator has the processor, the environment says what must be found (the Makefile).
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "core/cpu_features.h"
#include "core/error.h"

namespace cxl_offload {
namespace {

using Names = std::vector<std::string>;

std::string joined(const Names& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " ") + name;
  return text;
}

Names found_names() {
  Names names;
  for (Isa isa : supported_isas()) names.push_back(isa_name(isa));
  return names;
}

#if CXL_OFFLOAD_X86

Names words_of(const std::string& text) {
  std::istringstream stream(text);
  Names words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

// What Linux lists has registers that it saves.
bool all_listed(const Names& flags, const Names& wanted) {
  return std::ranges::all_of(wanted, [&](const std::string& flag) {
    return std::ranges::find(flags, flag) != flags.end();
  });
}

Names listed_names() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line) && !line.starts_with("flags")) continue;
  const Names flags = words_of(line);
  Names names{"scalar"};
  if (all_listed(flags, {"avx2", "fma", "f16c"})) names.push_back("avx2");
  const Names wide{"avx512f", "avx512bw", "avx512dq", "avx512vl"};
  if (all_listed(flags, wide)) names.push_back("avx512");
  return names;
}

#elif CXL_OFFLOAD_NEON

// RDVL returns the length in bytes. AT_HWCAP says whether there is such an instruction.
Names listed_names() {
  constexpr unsigned long kHasSve = 1ul << 22;
  Names names{"scalar", "neon"};
  if ((getauxval(AT_HWCAP) & kHasSve) == 0) return names;
  size_t length = 0;
  asm(".arch_extension sve\n\trdvl %0, #1" : "=r"(length));
  if (length == 32 && CXL_OFFLOAD_SVE256) names.push_back("sve256");
  return names;
}

#else

Names listed_names() { return {"scalar"}; }

#endif

TEST(instruction_sets_are_those_of_the_processor) {
  CHECK_EQ(joined(found_names()), joined(listed_names()));
  if (const char* expected = std::getenv("CXL_OFFLOAD_TEST_ISAS")) {
    CHECK_EQ(joined(found_names()), expected);
  }
}

TEST(the_best_instruction_set_is_the_last) { CHECK_EQ(isa_name(best_isa()), found_names().back()); }

TEST(sve_is_found_by_name_or_refused) {
  const Names found = found_names();
  if (std::ranges::find(found, "sve256") != found.end()) {
    CHECK(parse_isa("sve256") == Isa::kSve256);
    return;
  }
  const std::string message = CHECK_THROWS(InvalidArgument, parse_isa("sve256"));
  CHECK(message.find("'sve256'") != std::string::npos);
  CHECK(message.find(found.back()) != std::string::npos);
}

}  // namespace
}  // namespace cxl_offload
