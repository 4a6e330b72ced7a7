"""The heap of a vLLM engine grows with its requests: ``python -m tests.soak.engine_heap``.

It runs where vLLM is installed. The same requests go to an engine without tiers and to one with a
hot tier and a kept cold one, each in a process of its own, so that what the tiers add can be told
from what the engine takes by itself.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from cxl_offload.kept import kept_path
from tests.integrations.vllm.conftest import ENVIRONMENT, ROOT, kv_offload

from .left import Held
from .serve import PROMPTS, ServedEngine
from .serving import CHUNK, ENGINE

STEPS = 100
"""Between two looks at the heap."""


def step(engine: ServedEngine, rng: random.Random) -> int:
    """One thing that callers do; how many requests it was."""
    draw = rng.random()
    if draw < 0.70:
        asked = rng.sample(PROMPTS, rng.randint(1, 5))
        engine.tokens(asked)
        return len(asked)
    if draw < 0.88:
        seeds = rng.sample(range(20), rng.randint(1, 6))
        engine.abort_after(rng.randint(0, 12), *seeds)
        return len(seeds)
    engine.forget()
    return 0


def serve(kind: str, model: Path, requests: int) -> None:
    """Prints what the heap has more than after the first hundred steps."""
    name = f"engine-heap-{os.getpid()}"
    cold = {"bytes": 80 * CHUNK, "policy": "bind:0", "persist": name}
    tiers = kv_offload(cpu_bytes_to_use=20 * CHUNK, policy="bind:0", cold=cold)
    engine = ServedEngine(str(model), ENGINE | (tiers if kind == "tiers" else {}))
    rng, seen, first = random.Random(1), 0, None
    try:
        while seen < requests:
            seen += sum(step(engine, rng) for _ in range(STEPS))
            held = Held.now()
            first = first or held
            added = (held.heap_bytes - first.heap_bytes) / 2**20
            blocks = held.python_blocks - first.python_blocks
            sys.stderr.write(f"{kind}: {seen} requests, heap {added:+.1f} MiB, ")
            sys.stderr.write(f"{blocks:+d} blocks of Python\n")
        engine.llm.llm_engine.engine_core.shutdown()
    finally:
        kept_path(name).unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2500)
    parser.add_argument("--kind", choices=["stock", "tiers"], help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        serve(options.kind, options.model, options.requests)
        return
    from tests.integrations.vllm.tiny_model import make_model

    with tempfile.TemporaryDirectory(prefix="engine-heap-") as folder:
        model = Path(folder) / "model"
        make_model(model)
        for kind in ("stock", "tiers"):
            arguments = ["--kind", kind, "--model", str(model), "--requests", str(options.requests)]
            command = [sys.executable, "-m", "tests.soak.engine_heap", *arguments]
            environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
            environment["VLLM_LOGGING_LEVEL"] = "ERROR"
            subprocess.run(command, cwd=ROOT, check=True, env=environment)


if __name__ == "__main__":
    main()
