"""The entry point of ``cxl-offload``; ``python -m cxl_offload`` where it is not on the path."""

from __future__ import annotations

import sys

from cxl_offload.cli import INTERRUPTED, STOPPED


def main() -> None:
    """Runs the command line and exits; Ctrl-C ends it in one line also while it is still loaded."""
    try:
        from cxl_offload.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write(f"{STOPPED}\n")
        sys.exit(INTERRUPTED)
    finally:
        # Where Ctrl-C passed code that was made of a text, as dataclasses are, Python ends by the
        # signal whatever the exit status is, until other such code runs.
        exec("")


if __name__ == "__main__":
    main()
