"""``python -m tests.vm.harness fetch | run MACHINE [PYTEST ARGUMENTS]``: by hand."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from tests.vm.harness.errors import HarnessError
from tests.vm.harness.guest import REPOSITORY, run_pytest
from tests.vm.harness.machine import load, names
from tests.vm.harness.packages import fetch

RESULTS = REPOSITORY / "out" / "vm"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vm.harness", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch", help="download what is missing in the cache folder")
    run = commands.add_parser("run", help="boot a machine and run tests in it")
    run.add_argument("machine", choices=names())
    run.add_argument("--timeout-s", type=float, default=600.0)
    run.add_argument("selection", nargs=argparse.REMAINDER, help="arguments of pytest instead")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="vm: %(message)s")
    try:
        assets = fetch()
        if arguments.command == "fetch":
            return 0
        outcome = run_pytest(
            load(arguments.machine),
            assets,
            arguments.selection or load(arguments.machine).tests,
            results=RESULTS / arguments.machine,
            timeout_s=arguments.timeout_s,
        )
    except HarnessError as error:
        logging.error("%s", error)
        return 125
    sys.stdout.write(Path(outcome.console).read_text(errors="replace"))
    logging.info("up after %.1f s, done after %.1f s, %.1f s of CPU", *outcome.times)
    return 125 if outcome.status is None else outcome.status


if __name__ == "__main__":
    sys.exit(main())
