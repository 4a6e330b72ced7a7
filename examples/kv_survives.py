"""KV blocks that outlive their process: it is killed in the middle of a write, and they are found.

First the store by itself: a child writes blocks until it is killed, then the file is opened again,
every block is checked, and one is spoilt to show that it is found. Where vLLM is installed, an
engine is killed next; the one that is started after it finds its KV cache, computes less, and
answers with the same tokens.

    python examples/kv_survives.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cxl_offload.kept import (
    KeptBlocks,
    KeptLayout,
    KeptStore,
    drop_kept,
    find_kept,
    kept_path,
    verify_kept,
)
from cxl_offload.units import MIB

LAYOUT = KeptLayout(block_bytes=4 * MIB, slots=16)
FACTS = {"model": "an example", "dtype": "bytes"}
"""All that a block depends on besides its key. A store with other facts is never read."""

ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "block_size": 32,
    "seed": 0,
    "max_num_seqs": 4,
}
ON_THE_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
QUESTIONS = 4
LONGEST_ANSWER = 72
"""Tokens, which are bytes here; no line of the Zen has more."""


def block(number: int) -> bytes:
    """What is written under a key: anybody can make it again, and compare."""
    return random.Random(number).randbytes(LAYOUT.block_bytes)


def key(number: int) -> bytes:
    return number.to_bytes(8, "big")


def write_for_ever(path: Path) -> None:
    """Of a child: says each block that was finished, until somebody kills it."""
    store = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
    for number in range(1 << 30):
        store.put(key(number), block(number))
        say(number)


def say(answer: Any) -> None:
    """A line for who started this process."""
    print(json.dumps(answer), flush=True)


@contextmanager
def child(
    *arguments: str, script: str = __file__, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """This file, or another, in a process of its own, which is killed at the end."""
    command = [sys.executable, script, *arguments]
    environment = os.environ | variables
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def answer_of(process: subprocess.Popen[str]) -> Any:
    """The next line of JSON that a child says; others' lines are left out."""
    assert process.stdout is not None
    for line in process.stdout:
        try:
            return json.loads(line)
        except ValueError:
            continue
    raise RuntimeError("the child ended without an answer")


def store_alone(path: Path) -> int:
    """Kills a writer, opens its store again and spoils a block; how many are not as they should."""
    with child("write", str(path)) as process:
        finished = [answer_of(process) for _ in range(10)]
        process.kill()
        finished += map(int, process.communicate()[0].split())  # what it said meanwhile
    print(f"killed after block {finished[-1]} of {LAYOUT.block_bytes // MIB} MiB was finished")
    expected = finished[1 - LAYOUT.slots :]  # the one that was being written has taken a place
    store = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
    there = [number for number in expected if key(number) in store]
    right = [number for number in there if store.get(key(number)) == block(number)]
    slots = {entry.key: entry.slot for entry in store.store.entries}
    store.close()
    print(f"opened again: {len(there)} of {len(expected)} are there, {len(right)} are right")

    spoilt = key(right[-1])
    with path.open("r+b") as file:
        file.seek(LAYOUT.block_at(slots[spoilt]))
        file.write(b"\0" * 100)
    damaged = [*verify_kept(path).damaged.values()]
    print(f"block {right[-1]} was spoilt in the file; the check names {damaged}")
    return len(expected) - len(right) + (damaged != [spoilt.hex()])


def passages() -> list[tuple[str, str]]:
    """Two lines of the Zen of Python, and the one that follows; the longest questions."""
    from zen import zen_lines

    lines = zen_lines()
    asked = [
        (f"{first}\n{second}\n", third)
        for first, second, third in zip(lines, lines[1:], lines[2:], strict=False)
    ]
    return sorted(asked, key=lambda one: len(one[0]))[-QUESTIONS:]


def learn(folder: Path) -> None:
    """Of a child: the small model of zen.py, which here learns each question with its answer."""
    from zen import train_zen

    say(train_zen(folder, texts=[f"{question}{line}\n" for question, line in passages()]))


def serve(folder: str, name: str) -> None:
    """Of a child: an engine of the real vLLM, which answers and then waits to be killed."""
    from vllm import LLM, SamplingParams

    tiers = {
        "spec_name": "cxl",
        "cpu_bytes_to_use": 4 * MIB,
        "policy": "bind:0",
        "cold": {"bytes": 16 * MIB, "policy": "bind:0", "persist": name},
    }
    engine = LLM(
        folder,
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": tiers,
        },
        **ENGINE,
    )
    greedy = SamplingParams(max_tokens=LONGEST_ANSWER, temperature=0)
    questions = [question for question, _ in passages()]
    for _ in range(2):  # a store may still be under way when its request has ended
        made = engine.generate(questions, greedy, use_tqdm=False)
        say(
            [
                [list(each.outputs[0].token_ids), each.outputs[0].text, each.num_cached_tokens]
                for each in made
            ]
        )
        engine.reset_prefix_cache()
    time.sleep(3600)


def kept_blocks(name: str) -> int:
    """How many blocks the file has, once that no longer changes."""
    seen = -1
    for _ in range(60):
        now = next((file.blocks for file in find_kept() if file.name == name), 0)
        if now == seen and now:
            break
        seen = now
        time.sleep(1)
    return seen


def engine_killed(folder: Path, name: str) -> int:
    """Answers of an engine that is killed, and of the next; the number of those that differ."""
    with child("learn", str(folder), OMP_NUM_THREADS="1") as process:
        print(f"vLLM: learned lines of the Zen of Python, loss {answer_of(process):.3f}")
    with child("serve", str(folder), name, **ON_THE_CPU) as process:
        before = answer_of(process)
        answer_of(process)
        there = kept_blocks(name)
    print(f"vLLM: the engine was killed; it leaves {there} blocks")
    with child("serve", str(folder), name, **ON_THE_CPU) as process:
        after = answer_of(process)
    differ = 0
    for (question, line), old, new in zip(passages(), before, after, strict=True):
        differ += old[0] != new[0]
        answer = new[1].partition("\n")[0]
        print(
            f"vLLM: {question.splitlines()[-1]!r} -> {answer!r}"
            f"{'' if answer == line else '   (not the Zen)'}; {old[2]}, then {new[2]} of "
            f"{len(question) + 1} tokens found"
        )
    print(f"vLLM: {len(before) - differ} of {len(before)} answers are the same tokens")
    return differ + (sum(new[2] for new in after) == 0)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="cxl-offload-kept-") as scratch:
        failed = store_alone(Path(scratch, "blocks.kv"))
        if importlib.util.find_spec("vllm") is None:
            print("vLLM is not installed: no engine is killed here")
            return min(failed, 1)
        name = f"example-{os.getpid()}"
        try:
            failed += engine_killed(Path(scratch, "zen"), name)
        finally:
            if kept_path(name).exists():
                drop_kept(kept_path(name))
    return min(failed, 1)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", path]:
            write_for_ever(Path(path))
        case ["learn", folder]:
            learn(Path(folder))
        case ["serve", folder, name]:
            serve(folder, name)
        case _:
            sys.exit(main())
