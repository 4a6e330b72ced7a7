// A test frame in one header: TEST(name) { CHECK(...); } and a main that runs all of them, or those
// whose names hold one of its arguments.
#ifndef CXL_OFFLOAD_TESTS_CHECK_H_
#define CXL_OFFLOAD_TESTS_CHECK_H_

#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*body)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Registered {
  Registered(const char* name, void (*body)()) { tests().push_back({name, body}); }
};

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <class A, class B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream message;
  message << text << ": " << a << " against " << b;
  fail(file, line, message.str());
}

// The message of the exception, which must be an E.
template <class E, class F>
std::string thrown(F&& call, const char* text, const char* file, int line) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    fail(file, line, std::string(text) + " threw something else: " + error.what());
  }
  fail(file, line, std::string(text) + " did not throw");
}

}  // namespace check

#define TEST(name)                                               \
  static void name();                                            \
  static const check::Registered registered_##name(#name, name); \
  static void name()
#define CHECK(condition) \
  if (!(condition)) check::fail(__FILE__, __LINE__, #condition)
#define CHECK_EQ(a, b) check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define CHECK_THROWS(E, call) check::thrown<E>([&] { call; }, #call, __FILE__, __LINE__)

int main(int argc, char** argv) {
  int failures = 0;
  int runs = 0;
  for (const check::Test& test : check::tests()) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::strstr(test.name, argv[i]) != nullptr;
    if (!wanted) continue;
    ++runs;
    try {
      test.body();
      std::printf("ok   %s\n", test.name);
    } catch (const std::exception& error) {
      ++failures;
      std::printf("FAIL %s\n     %s\n", test.name, error.what());
    }
    std::fflush(stdout);
  }
  std::printf("%d tests, %d failures\n", runs, failures);
  return failures == 0 && runs > 0 ? 0 : 1;
}

#endif  // CXL_OFFLOAD_TESTS_CHECK_H_
