"""Fuzz targets in Python; those in C++ are tests/cpp/fuzz_*.cc."""
