"""``python -m tests.packaging.elsewhere --python 3.13 --processor aarch64``: builds and tries."""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from pathlib import Path

from ..contents import libraries, needed_from_others, processor
from ..trial import ROOT, try_wheel
from .build import build_wheel
from .debian import ARCHITECTURES, SUITES, CannotBuildError, unpack_python
from .environment import is_foreign, make_environment, pip_for

CACHE = ROOT / "build" / "elsewhere"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", choices=SUITES, default="3.11")
    parser.add_argument("--processor", choices=ARCHITECTURES, default=platform.machine())
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="folder for the wheel")
    parser.add_argument("--archive", help="address of Debian's archive; by default apt-get's")
    parser.add_argument("--no-trial", action="store_true", help="build and check the contents only")
    return parser.parse_args()


def check_contents(wheel: Path, wanted: str) -> None:
    """Each library is for that processor and needs no other; says whether CUDA kernels are in."""
    held = libraries(wheel)
    for name, library in held.items():
        assert processor(library) == f"EM_{wanted.upper()}", name
        assert needed_from_others(library) == [], name
    cuda = [name for name in held if "cuda" in name]
    say(f"{wheel.name}: {'with' if cuda else 'WITHOUT'} CUDA kernels, no library of others needed")


def main() -> None:
    chosen = options()
    folder = CACHE / f"{chosen.processor}-{chosen.python}"
    python = unpack_python(chosen.python, chosen.processor, folder, archive=chosen.archive)
    wheel = build_wheel(python, folder, chosen.into)
    check_contents(wheel, chosen.processor)
    if chosen.no_trial:
        return
    with tempfile.TemporaryDirectory() as fresh:
        environment = make_environment(python, Path(fresh) / "environment")
        pip = pip_for(environment)
        last = try_wheel(wheel, environment, pip, emulated=is_foreign(python))
    say(f"{wheel.name}: topology, doctor, plan, env; {last}; uninstalled without a trace")


if __name__ == "__main__":
    try:
        main()
    except CannotBuildError as error:
        sys.exit(f"wheel-for: {error}")
