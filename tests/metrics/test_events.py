"""Moves and decisions as lines of JSON, and nothing of it in the program's own log."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import cxl_offload
from cxl_offload import ConfigError, Session
from cxl_offload.events import EVENTS
from cxl_offload.metrics import JsonLines, log_events
from cxl_offload.tune.counts import count_decision

from ..placement.child import run_in_child

MIB = 1 << 20


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_moves_and_decisions_are_a_line_each(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tensor = cxl_offload.zeros(4 * MIB, dtype=torch.uint8, policy="ldram")
    with log_events(path):
        cxl_offload.move(tensor, "cxl")
        count_decision("script", "share", "moved", nbytes=9, reason='the "far" share pays')
        with pytest.raises(ValueError, match="77"):
            cxl_offload.move(tensor, "bind:77")
    cxl_offload.move(tensor, "ldram")  # nobody asks any more
    move, decision, refused = lines(path)
    assert move["event"] == "move"
    assert (move["nbytes"], move["target"], move["refused"]) == (4 * MIB, "cxl", None)
    assert move["seconds"] > 0
    assert move["process"] == os.getpid()
    assert decision["reason"] == 'the "far" share pays'
    assert (decision["outcome"], decision["moved_bytes"]) == ("moved", 9)
    assert "77" in refused["refused"]


def test_program_s_own_log_stays_as_it_is(
    session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    tensor = cxl_offload.zeros(MIB, dtype=torch.uint8, policy="ldram")
    logger = logging.getLogger("cxl_offload.events")
    before = (logger.level, logger.propagate, list(logger.handlers))
    with log_events(tmp_path / "events.jsonl"):
        cxl_offload.move(tensor, "cxl")
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    assert not [record for record in caplog.records if record.name == logger.name]


def test_two_logs_at_once_get_all_of_their_time(session: Session, tmp_path: Path) -> None:
    tensor = cxl_offload.zeros(MIB, dtype=torch.uint8, policy="ldram")
    first, second = log_events(tmp_path / "first"), log_events(tmp_path / "second")
    cxl_offload.move(tensor, "cxl")
    first.close()
    cxl_offload.move(tensor, "ldram")
    second.close()
    assert len(lines(tmp_path / "first")) == 1
    assert len(lines(tmp_path / "second")) == 2
    assert logging.getLogger("cxl_offload.events").propagate


def test_forked_child_writes_nothing(session: Session, tmp_path: Path) -> None:
    with log_events(tmp_path / "events.jsonl") as log:

        def child() -> None:
            count_decision("child", "share", "kept")
            log.close()

        run_in_child(child)
        count_decision("parent", "share", "kept")
    assert [line["framework"] for line in lines(tmp_path / "events.jsonl")] == ["parent"]


@pytest.mark.parametrize("name", ["", "no/such/folder/events", "a\0b"])
def test_file_that_cannot_be_written_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="events") as refused:
        log_events(f"{tmp_path}/{name}")
    assert str(refused.value).isprintable()


def test_formatter_takes_records_of_others() -> None:
    record = logging.LogRecord("other", logging.INFO, "file", 1, "said %d", (3,), None)
    assert json.loads(JsonLines().format(record))["message"] == "said 3"


def test_fifo_is_refused_without_waiting_for_a_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="FIFO"):
        log_events(tmp_path / "fifo")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_full_disk_costs_events_and_not_the_program(
    session: Session, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    weight = cxl_offload.zeros(1 << 20, policy="bind:0", session=session)

    def program() -> None:
        with log_events("/dev/full"):
            for node in (2, 0, 2):
                cxl_offload.move(weight, f"bind:{node}", session=session)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        program()
    assert caplog.text.count("what cannot be written is left out") == 1
    assert "Traceback" not in capfd.readouterr().err


def test_half_a_line_of_another_process_is_ended_first(session: Session, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"time": "part')
    with log_events(path):
        count_decision("script", "share", "moved", nbytes=1)
        EVENTS.info("%d items", "none")  # cannot be written
        count_decision("script", "share", "kept")
    first, *rest = path.read_text().splitlines()
    assert first == '{"time": "part'
    assert [json.loads(line)["event"] for line in rest] == ["decision", "decision"]


def test_warning_of_what_cannot_be_written_does_not_say_that_nothing_more_is(
    session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with log_events(tmp_path / "events.jsonl"):
        EVENTS.info("%d items", "none")
    assert "what cannot be written is left out" in caplog.text
