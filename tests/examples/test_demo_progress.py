"""What the demonstration says while it works: a line a step, and how long it still takes."""

from __future__ import annotations

import importlib.util
import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

FILE = Path(__file__).parents[2] / "examples" / "demo_progress.py"


@pytest.fixture(scope="module")
def demo_progress() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_progress", FILE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_every_step_is_a_plain_line_with_its_number_and_the_time_left(
    demo_progress: ModuleType,
) -> None:
    clock, console = Clock(), Console(file=io.StringIO(), width=30, markup=False)
    steps = demo_progress.Steps(console, (2, 1, 3), clock=clock)
    with steps.step("learns"):
        clock.now += 20
    with steps.step("answers"):
        clock.now += 400
    with steps.step("draws, with a line that is longer than the console"):
        pass
    assert lines(console) == [
        "[1/3] learns",
        "[2/3] answers; about 40 s left",
        "[3/3] draws, with a line that is longer than the console; about 7 min left",
    ]


def test_long_step_says_how_far_it_is_and_a_short_one_nothing(demo_progress: ModuleType) -> None:
    clock, console = Clock(), Console(file=io.StringIO())
    with demo_progress.Steps(console, (1,), clock=clock).step("answers") as tell:
        for token in range(1, 6):
            clock.now += 6
            tell("generate", token, 16)
    assert lines(console) == ["[1/1] answers", "[1/1] tokens: 3 of 16"]


def test_terminal_gets_a_bar_and_no_line_within_a_step(demo_progress: ModuleType) -> None:
    clock, console = Clock(), Console(file=io.StringIO(), force_terminal=True, width=80)
    with demo_progress.Steps(console, (1,), clock=clock).step("answers") as tell:
        clock.now += 60
        tell("generate", 4, 16)
    shown = "\n".join(lines(console))
    assert "4/16" in shown
    assert "4 of 16" not in shown


def test_step_that_was_not_announced_is_refused(demo_progress: ModuleType) -> None:
    steps = demo_progress.Steps(Console(file=io.StringIO()), ())
    with pytest.raises(ValueError, match="a step more than the 0"), steps.step("more"):
        pass
