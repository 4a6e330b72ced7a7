"""The command line, one module a subcommand.

A module of this folder is a subcommand when it has ``register(app)``; main.py finds it. Names that
start with an underscore are not looked at. Such a module must be cheap to import: torch and the
frameworks are imported inside the command.
"""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 and the number of the signal."""

STOPPED = "\ncxl-offload: stopped by Ctrl-C"

TERMINATED = 143
"""Exit status after SIGTERM, in the same way."""

TOLD_TO_END = "cxl-offload: ended by SIGTERM"
