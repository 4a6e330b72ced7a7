"""``python -m cxl_offload``: the command line, where ``cxl-offload`` is not on the path."""

from __future__ import annotations

from cxl_offload.cli.main import main

if __name__ == "__main__":
    main()
