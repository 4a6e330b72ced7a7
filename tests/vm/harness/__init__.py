"""Boots a real Linux with several NUMA nodes, or with real CXL, and runs pytest inside it."""
