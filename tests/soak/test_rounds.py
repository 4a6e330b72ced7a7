"""One very short round of each kind, and what its checks find when something is planted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import cxl_offload
from cxl_offload.memory import Bind, Session
from cxl_offload.memory.shared import SHARED_ROOT
from cxl_offload.ops.activations import OffloadedActivations
from tests.faults.ground import KIB, MIB, Account

from . import __main__ as command_line
from . import ending, generation, memory, serve, serving, tiny_gpt, training
from .left import ENOUGH_ROUNDS, PROCESS, Around, Growth, Held, trend
from .rounds import round_of

SECONDS = 0.2
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
WRONG = r"losses|not as without tiers"
COUNTED = {
    "simulated": "contents checked",
    "linux": "contents checked",
    "model": "model runs",
    "fork": "forked children",
    "training": "training steps",
    "generation": "tokens compared",
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("kind", "seed"), [*((kind, 3) for kind in COUNTED), ("training", 5), ("generation", 6)]
)
def test_round_counts_what_it_did_and_leaves_nothing(kind: str, seed: int) -> None:
    around = Around.now()
    counts = round_of(kind)(seed, SECONDS)
    around.check()
    assert counts[COUNTED[kind]] > 0


def test_block_that_a_training_leaves_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    placed = tiny_gpt.TieredTraining.placed

    def keeps(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        made = placed(self, tensor)
        kept[:] = [made]
        return made

    monkeypatch.setattr(tiny_gpt.TieredTraining, "placed", keeps)
    with pytest.raises(AssertionError):
        training.training_round(3, SECONDS)
    kept.clear()


@pytest.mark.parametrize("what", ["state", "saved"])
def test_bit_that_flips_in_a_training_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a state between two steps, or in a checkpoint between its save and its load."""
    if what == "state":
        update = tiny_gpt.TieredTraining.update

        def flips(self: Any) -> None:
            update(self)
            state = self.optimizer.state[self.params[0]]["exp_avg"]
            state.view(torch.int32)[0, 0] ^= 1

        monkeypatch.setattr(tiny_gpt.TieredTraining, "update", flips)
    else:
        saved = training.Run.saved

        def changed(self: Any, path: Path) -> dict[str, torch.Tensor]:
            found = saved(self, path)
            found["state.3.exp_avg"].view(torch.int32).flatten()[0] ^= 1
            return found

        monkeypatch.setattr(training.Run, "saved", changed)
    monkeypatch.setattr(training, "OPTIMIZERS", ("float32",))
    with pytest.raises(AssertionError, match=WRONG):
        training.training_round(3, SECONDS)


def test_activation_that_comes_back_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = OffloadedActivations._unpack

    def flips(self: Any, packed: Any) -> torch.Tensor:
        found = unpack(self, packed)
        return found + 1e-3 if found.is_floating_point() and found.numel() > 1000 else found

    monkeypatch.setattr(OffloadedActivations, "_unpack", flips)
    with pytest.raises(AssertionError, match=WRONG):
        training.training_round(3, SECONDS)


def test_token_that_is_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: Any) -> None:
        with torch.no_grad():
            self.model.get_output_embeddings().weight.neg_()

    step = generation.Writer.step

    def steps(self: Any) -> None:
        changed(self)
        step(self)

    monkeypatch.setattr(generation.Writer, "step", steps)
    with pytest.raises(AssertionError, match="is not"):
        generation.generation_round(3, SECONDS)


def test_cache_that_an_exception_keeps_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    fail = generation.Writer._fail_midway

    def keeps(self: Any, at: int) -> None:
        fail(self, at)
        kept.append(cxl_offload.empty(10, session=self.session))

    monkeypatch.setattr(generation.Writer, "_fail_midway", keeps)
    with pytest.raises(AssertionError):
        generation.generation_round(3, 2.0)
    kept.clear()


def test_page_that_this_kernel_does_not_get_back_is_found() -> None:
    session = Session.linux(limits={0: MIB})
    block = session.allocate(10 * KIB, Bind((0,)))
    with pytest.raises(AssertionError):
        memory.check_returned(session)
    del block
    memory.check_returned(session)
    assert Account.of(session) == Account(0, 0, 0)


def test_thread_that_a_round_leaves_is_named() -> None:
    around, stop = Around.now(), threading.Event()
    thread = threading.Thread(target=stop.wait, name="planted")
    thread.start()
    with pytest.raises(AssertionError, match=r"threads are left: .'planted'"):
        around.check()
    stop.set()
    thread.join()
    around.check()


def test_child_that_a_round_leaves_is_named() -> None:
    around = Around.now()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        with pytest.raises(AssertionError, match=f"children are left: .{child.pid}"):
            around.check()
        child.kill()
        with pytest.raises(AssertionError, match="children are left"):
            around.check()  # nobody has waited for it
    around.check()


def test_file_that_a_round_leaves_in_shared_memory_is_named() -> None:
    around = Around.now()
    path = SHARED_ROOT / f"planted-{os.getpid()}"
    path.touch()
    try:
        with pytest.raises(AssertionError, match=f"files are left in .*{path.name}"):
            around.check()
    finally:
        path.unlink()
    around.check()


def held(bytes_of_heap: int) -> Held:
    return Held(bytes_of_heap, 0, 0, 0, 0, 0)


def test_growth_of_a_few_mib_an_hour_is_found_and_a_single_jump_is_none() -> None:
    leaks, jumps, swings = Growth(), Growth(), Growth()
    for at in range(40):
        leaks.add(PROCESS, held(0), held(100 * KIB + (at * 7919 % 13 - 6) * 50 * KIB))
        jumps.add(PROCESS, held(0), held(8 * MIB if at == 30 else 0))
        swings.add(PROCESS, held(0), held((-1) ** at * MIB))
        swings.add("one kind", held(0), held(MIB))  # which another one gives back
    assert [line.partition(" heap_bytes")[0] for line in leaks.too_much()] == [
        f"rounds of the process add {leaks.trends(PROCESS)['heap_bytes']:,}"
    ]
    assert jumps.too_much() == swings.too_much() == []
    for _ in range(40):
        leaks.add("vllm", held(0), held(MIB))
    assert len(leaks.too_much()) == 1, "the heap of an engine is not judged"
    for _ in range(40):
        leaks.add("vllm", held(0), Held(MIB, 0, 2, 0, 0, 0))
    assert len(leaks.too_much()) == 2, "its mappings are"
    assert trend([5] * ENOUGH_ROUNDS) == 5 * ENOUGH_ROUNDS


def test_heap_that_is_not_given_back_is_seen() -> None:
    before = Held.now()
    lost = [torch.empty(25_000) for _ in range(10)]
    assert Held.now().heap_bytes - before.heap_bytes >= 1_000_000
    lost.clear()
    assert abs(Held.now().heap_bytes - before.heap_bytes) < 100_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_soak_in_order(number: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.soak", "--only", "simulated", "--minutes", "5"]
    with subprocess.Popen(
        [*command, "--round-seconds", "0.2", "--json", path], stdout=subprocess.PIPE, text=True
    ) as soak:
        assert soak.stdout is not None
        for line in soak.stdout:
            if "round " in line:
                soak.send_signal(number)
                break
        rest = soak.stdout.read()
    assert soak.returncode == 128 + number
    assert f"ended by signal {int(number)}" in rest
    assert '"contents checked"' in path.read_text()


def test_failure_names_its_seed_and_kind(tmp_path: Path) -> None:
    """No block's contents are as written."""
    (tmp_path / "sitecustomize.py").write_text(
        "import tests.faults.ground as ground\nground.has_stamp = lambda block, value: False\n"
    )
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--only", "fork", "--seed", "7", "--minutes", "0.01"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "FAILED in round 0 (fork): repeat with --seed 7 --only fork" in done.stdout


class QuietEngine:
    """Stands for :class:`tests.soak.serve.ServedEngine`, with what is wrong with it."""

    def __init__(self, **wrong: Any) -> None:
        self.wrong = wrong

    def tokens(self, asked: list[serve.Asked]) -> list[tuple[list[int], int]]:
        return [([sum(one) + self.wrong.get("token", 0)], 0) for one in asked]

    def chunks_in_use(self) -> list[int]:
        return [0, self.wrong.get("chunks", 0)]

    def blocks_in_use(self) -> int:
        return int(self.wrong.get("blocks", 0))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"token": 1}, "is not"), ({"chunks": 2}, "chunks in use"), ({"blocks": 3}, "3 blocks")],
)
def test_engine_that_says_or_holds_what_it_should_not_is_found(
    wrong: dict[str, int], said: str
) -> None:
    right = [[sum(one)] for one in serve.PROMPTS]
    stint = serve.Stint(cast("Any", QuietEngine(**wrong)), 3, right)

    def ask_and_check() -> None:
        stint.ask()
        stint.check()

    with pytest.raises(AssertionError, match=said):
        ask_and_check()


def test_environment_without_vllm_is_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_VENV", "no-such-environment")
    with pytest.raises(serving.NotInstalledError, match="there is no no-such-environment"):
        serving.interpreter()


def stand_in(folder: Path, script: str) -> serving.Server:
    """A server whose interpreter runs a script of the shell instead."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o700)
    return serving.Server(str(python), folder, {}, folder / "log")


def test_engine_that_ends_is_said_with_its_last_words(tmp_path: Path) -> None:
    server = stand_in(tmp_path, "echo no room; exit 3")
    with pytest.raises(AssertionError, match="the engine ended: no room"):
        server.answer()
    server.close()


def test_engine_that_starts_while_the_soak_is_ended_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    monkeypatch.setattr(ending, "asked", asked)
    monkeypatch.setattr(ending, "received", [signal.SIGTERM])
    server = stand_in(tmp_path, "exec sleep 600")
    asked.set()
    with pytest.raises(SystemExit, match="143"):
        server.answer(starting=True)
    assert server.process.returncode == -signal.SIGKILL
    server.close()


def test_soaks_of_different_kinds_make_one_table() -> None:
    one = {"counts": {"linux": {"moves": 1000}}, "growth": {"linux": {"files": 0}}}
    two = {"counts": {"vllm": {"requests": 7}}, "growth": {"vllm": {}}}
    lines = command_line.table(command_line.together([one, two])).splitlines()
    assert lines[0] == "| counted | linux | vllm |"
    assert "| moves | 1,000 | 0 |" in lines
    assert "| added files | 0 |  |" in lines
