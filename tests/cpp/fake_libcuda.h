// A shared library with the entry points of libcuda.so.1 and no GPU: what the tests set is what the
// driver finds, and every call is written down.
#ifndef CXL_OFFLOAD_TESTS_FAKE_LIBCUDA_H_
#define CXL_OFFLOAD_TESTS_FAKE_LIBCUDA_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

// Contexts are the numbers 0x1000, 0x2000, ... (the primary contexts of GPUs 0, 1, ...); a stream
// is its context plus 0x10 and up.
struct FakeCuda {
  int gpus = 1;
  std::set<uintptr_t> active;          // primary contexts in use
  std::set<uintptr_t> destroyed;       // contexts that cannot be pushed any more
  std::set<uintptr_t> busy;            // contexts whose work is not done
  std::set<uintptr_t> capturing;       // streams
  std::vector<uintptr_t> current;      // the context stack of the (one) calling thread
  std::map<std::string, int> results;  // function -> what it returns instead of doing its work
  std::map<void*, size_t> registered;
  int retained = 0;
  int live_events = 0;
  int streams = 0;  // made
  std::vector<std::string> calls;
};

// Exported as `fake_cuda`: the one state of the library.
using FakeCudaState = FakeCuda* (*)();

#endif  // CXL_OFFLOAD_TESTS_FAKE_LIBCUDA_H_
