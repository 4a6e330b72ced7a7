"""What the reports of all runs say in words."""

from __future__ import annotations

from cxl_offload.cli._run_report import answer_lines, load_line
from cxl_offload.objects.load_parts import AT_ONCE, FAULT_IN, READING, REST, LoadPart

NOTHING = [LoadPart(FAULT_IN, 0.0), LoadPart(READING, 0.0), LoadPart(AT_ONCE, 0.0)]


def test_load_that_puts_no_weights_in_a_tier_is_the_frameworks() -> None:
    said = "Load (measured): 4.75 s by the framework; no weights were read into a tier."
    assert load_line([*NOTHING, LoadPart(REST, 4.75)]) == said


def test_parts_of_a_load_that_took_no_time_are_left_out() -> None:
    parts = [LoadPart(FAULT_IN, 0.5, 1 << 30), LoadPart(READING, 1.0, 1 << 30)]
    assert load_line([*parts, NOTHING[-1], LoadPart(REST, 0.25)]) == (
        "Load (measured): fault-in 500 ms (1 GiB, 2.15 GB/s), reading 1 s (1 GiB, 1.07 GB/s), "
        "rest 250 ms."
    )


def test_rows_next_to_each_other_that_say_the_same_share_a_line() -> None:
    assert [*answer_lines(("a", "b", "b", "b", "a"))] == ["0: a", "1 to 3: b", "4: a"]
    assert [*answer_lines(())] == []
