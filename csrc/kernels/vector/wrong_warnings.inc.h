// Turns wrong warnings off for the rest of a source that has intrinsics.

// GCC 12 takes the placeholder operands of its own intrinsics for uninitialised (GCC bug 105593),
// where they are inlined, which is everywhere here.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
