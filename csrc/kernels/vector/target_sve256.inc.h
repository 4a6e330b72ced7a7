// Opens code that is compiled with SVE, whose vectors have 256 bits here (-msve-vector-bits, see
// sve256_check.cc); target_end.inc.h closes it. It is included after all other headers, because
// what they define must run on every processor.

#include <arm_sve.h>

#pragma GCC push_options
#pragma GCC target("+sve")
