"""``python -m tests.kept MINUTES [SEED]``: kills, power cuts, readers and spoilt files, for longer.

Unlike the ordinary tests, writers are also killed at random moments, wherever they are.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from cxl_offload.kept import KeptBlocks, KeptStore
from tests.kept.ground import FACTS, LAYOUT
from tests.kept.hostile import check_device, check_file
from tests.kept.test_kills import faults_of_a_death
from tests.kept.test_power_cuts import UNITS, after_cut, cut, recorded
from tests.kept.test_readers import read_beside


def kill_once(folder: Path, seed: int) -> list[str]:
    path = folder / "killed"
    store = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
    there = store.keys
    store.close()
    return faults_of_a_death(path, seed, there)


def cut_once(folder: Path, seed: int) -> list[str]:
    path = folder / "recorded"
    path.unlink(missing_ok=True)
    made, changes = recorded(path, seed)
    faults = []
    for number in range(50):
        for unit in UNITS.values():
            numbers = random.Random(f"cut {seed} {unit} {number}")
            faults += after_cut(folder / "after", cut(made, changes, unit, numbers))[0]
    return faults


def read_once(folder: Path, seed: int) -> list[str]:
    """Its writer is killed wherever it is when the reader has seen enough."""
    return read_beside(folder / "read", seed, random.Random(seed).randrange(1, 400))[1]


def spoil_once(folder: Path, seed: int) -> list[str]:
    check_file(f"hostile {seed}".encode())
    check_device(f"hostile {seed}".encode())
    return []


ROUNDS = {"kills": kill_once, "cuts": cut_once, "readers": read_once, "spoilt files": spoil_once}


def main() -> None:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(1 << 30)
    sys.stdout.write(f"seed {seed}, {minutes} minutes\n")
    sys.stdout.flush()
    logging.disable(logging.WARNING)
    counts: Counter[str] = Counter()
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            for name, run in ROUNDS.items():
                faults = run(Path(folder), seed)
                counts[name] += 1
                if faults:
                    sys.exit(f"{name}, seed {seed}: {faults}")
            seed += 1
    done = ", ".join(f"{count} {name}" for name, count in counts.items())
    sys.stdout.write(f"no fault: {done}\n")


if __name__ == "__main__":
    main()
