"""Configuration that comes with the package: machines (and, beside them, models and policies).

Installed as ``cxl_offload.configs``; in a source tree it is the folder next to the package.
"""
