"""Imported before torch: an example that lacks a package says which one, and how to get it."""

import sys
from importlib.util import find_spec
from pathlib import Path

for _package in ("torch", "transformers", "tokenizers"):
    if find_spec(_package) is None:
        sys.exit(
            f"{Path(sys.argv[0]).name}: {_package} is not installed; pip install "
            "'.[transformers]' in the clone, or run it with .venv/bin/python after make"
        )
