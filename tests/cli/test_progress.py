"""How far a command is: bars on a terminal, lines in a log, nothing for a program."""

from __future__ import annotations

import functools
import io

import pytest
from rich.console import Console
from rich.text import Text

from cxl_offload.cli import _progress


@pytest.mark.parametrize("length", [20, 45, 60, 200])
def test_progress_keeps_its_numbers_beside_a_label_of_any_length(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    terminal = functools.partial(Console, file=shown, force_terminal=True, width=80)
    monkeypatch.setattr(_progress, "Console", lambda stderr: terminal())
    with _progress.progress_bar() as tell:
        tell("x" * length, 120, 120)
    last = Text.from_ansi(shown.getvalue()).plain.splitlines()[-1]
    assert "━ 120/120 0:00:00 " in last
    assert last.count("x") >= min(length, 30)


class Clock:
    """Seconds that pass when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_log_hears_every_ten_seconds_how_far_a_command_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with _progress.progress_bar(clock=clock) as tell:
        for done in range(5):
            tell("sizes of memory planned", done, 8)
            clock.now += 4
    assert capsys.readouterr().err == "sizes of memory planned: 3 of 8; about 20 s left\n"
    with _progress.progress_bar(clock=clock, lines=False) as tell:
        clock.now += 1000
        tell("sizes of memory planned", 0, 8)
    assert capsys.readouterr().err == ""


def test_stages_of_a_run_have_times_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with _progress.progress_bar(clock=clock) as tell:
        for at, label, done in ((0, "load", 0), (8, "load", 2), (9, "generate", 0)):
            clock.now = at
            tell(label, done, 4)
        clock.now = 11
        tell("generate", 1, 4)
    assert capsys.readouterr().err == "tokens: 1 of 4; about 6 s left\n"


def test_counted_tells_of_every_item_and_of_the_end() -> None:
    told: list[tuple[str, int, int]] = []
    assert list(_progress.counted("ab", "letters", lambda *said: told.append(said))) == ["a", "b"]
    assert told == [("letters", 0, 2), ("letters", 1, 2), ("letters", 2, 2)]
