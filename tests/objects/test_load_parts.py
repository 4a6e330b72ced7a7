"""Parts of a load: what is timed, whose blocks count, and what is left."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from cxl_offload.objects.load_parts import (
    AT_ONCE,
    FAULT_IN,
    READING,
    REST,
    LoadClock,
    LoadPart,
    part_of_load,
)

STEP_S = 0.01


def test_seconds_and_bytes_of_blocks_add_up_and_the_rest_is_what_is_left() -> None:
    with LoadClock() as clock:
        for nbytes in (10, 20):
            with part_of_load(FAULT_IN, nbytes):
                time.sleep(STEP_S)
        with part_of_load(READING, 5):
            pass
        time.sleep(STEP_S)
    made, read, both, rest = clock.parts
    assert (made.name, made.nbytes, read.nbytes, rest.name, rest.nbytes) == (
        FAULT_IN,
        30,
        5,
        REST,
        0,
    )
    assert both == LoadPart(AT_ONCE, 0.0)
    assert made.seconds >= 2 * STEP_S
    assert rest.seconds >= STEP_S
    assert made.seconds + read.seconds + rest.seconds == pytest.approx(clock.seconds)


def test_blocks_of_a_part_that_threads_run_at_once_count_once() -> None:
    together, count = threading.Barrier(4), 4

    def read() -> None:
        with part_of_load(READING, 1):
            together.wait()
            time.sleep(5 * STEP_S)

    with LoadClock() as clock:
        threads = [threading.Thread(target=read) for _ in range(count)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    _, reading, _, rest = clock.parts
    assert reading.nbytes == count
    assert 5 * STEP_S <= reading.seconds <= clock.seconds
    assert reading.seconds + rest.seconds == pytest.approx(clock.seconds)


def test_time_of_two_parts_at_once_is_in_both_and_told() -> None:
    with LoadClock() as clock:
        with part_of_load(READING, 1):
            time.sleep(STEP_S)
            with part_of_load(FAULT_IN, 1):
                time.sleep(2 * STEP_S)
        time.sleep(STEP_S)
    made, read, both, rest = (part.seconds for part in clock.parts)
    assert both == made >= 2 * STEP_S
    assert read >= made + STEP_S
    assert rest >= STEP_S
    assert made + read - both + rest == pytest.approx(clock.seconds)


def test_part_that_outlives_its_load_counts_until_the_load_ends() -> None:
    with contextlib.ExitStack() as late, LoadClock() as clock:
        late.enter_context(part_of_load(READING, 1))
        time.sleep(STEP_S)
    _, reading, _, _ = clock.parts
    assert (reading.nbytes, reading.seconds) == (0, pytest.approx(clock.seconds, abs=STEP_S / 2))


def test_what_fails_or_lies_outside_of_a_load_is_no_part_of_it() -> None:
    clock = LoadClock()
    with part_of_load(READING, 1):
        pass
    with pytest.raises(OSError, match="gone"), clock, part_of_load(READING, 2):
        raise OSError("gone")
    with part_of_load(READING, 4):
        pass
    assert [part.nbytes for part in clock.parts] == [0, 0, 0, 0]
    assert clock.seconds > 0


def test_a_second_load_starts_anew() -> None:
    clock = LoadClock()
    for nbytes in (1, 2):
        with clock, part_of_load(READING, nbytes):
            pass
    assert clock.parts[1].nbytes == 2


def test_a_part_without_bytes_or_time_has_no_rate() -> None:
    assert LoadPart(READING, 2.0, 10).to_json() == {
        "name": READING,
        "seconds": 2.0,
        "bytes": 10,
        "bytes_per_s": 5.0,
    }
    assert LoadPart(REST, 2.0).bytes_per_s == 0
    assert LoadPart(READING, 0.0, 10).bytes_per_s == 0
