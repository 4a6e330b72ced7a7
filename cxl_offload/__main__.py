"""The entry point of ``cxl-offload``; ``python -m cxl_offload`` where it is not on the path."""

from __future__ import annotations

import sys

from cxl_offload.cli._ending import ended_by_sigterm, last_words


def main() -> None:
    """Runs the command line and exits.

    Ctrl-C and SIGTERM end it in one line also while it is still loaded.
    """
    try:
        with ended_by_sigterm():
            from cxl_offload.cli.main import main as run

            run()
    except KeyboardInterrupt as stopped:
        line, status = last_words(stopped)
        sys.stderr.write(f"{line}\n")
        sys.exit(status)
    finally:
        # Where Ctrl-C passed code that was made of a text, as dataclasses are, Python ends by the
        # signal whatever the exit status is, until other such code runs.
        exec("")


if __name__ == "__main__":
    main()
