"""``python -m tests.fuzz [libFuzzer's options] [CORPUS]``: the documents under Atheris, for ever.

Atheris is not among the tools that the project installs: ``pip install atheris``.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["cxl_offload", "yaml"]):
    from tests.fuzz.documents import check_document


def main() -> None:
    atheris.Setup(sys.argv, check_document_and_forget)
    atheris.Fuzz()


def check_document_and_forget(data: bytes) -> None:
    """Atheris takes no result."""
    check_document(data)


if __name__ == "__main__":
    main()
