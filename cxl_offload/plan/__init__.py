"""The cost model: named equations, each with its source and the range it holds in.

Every module holds the equations of one subject as pure functions of numbers; ``preset`` reads the
numbers of a machine, and ``validate`` holds the predictions against published measurements.
Nothing here allocates memory, imports torch or knows a framework.
"""

from __future__ import annotations
