"""The load of benchmarks/bench_vllm_kv.py is what it says it is."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.grid import CELLS, LENGTHS, ROWS
from benchmarks.results import rows_of
from benchmarks.vllm_cases import (
    AGAIN,
    BLOCK_TOKENS,
    GRID,
    KEPT,
    LOADS,
    NEVER,
    NONE,
    ONE,
    REUSE,
    TWO_LOADS,
    Served,
    cell_load,
    flags_of,
)
from benchmarks.vllm_load import Load
from benchmarks.vllm_report import bars_missed


@pytest.fixture(scope="module")
def load() -> Load:
    return Load(
        conversations=3,
        turns=4,
        shared=20,
        document=30,
        message=5,
        answer=7,
        generate=2,
        clients=2,
    )


def test_every_turn_continues_its_conversation_over_the_shared_prefix(load: Load) -> None:
    rounds = load.rounds(seed=1)
    assert len(rounds) == 4
    for before, after in itertools.pairwise(rounds):
        for earlier, later in zip(before, after, strict=True):
            assert later[: len(earlier)] == earlier
            assert len(later) == len(earlier) + 5 + 7
    assert len({tuple(prompt[:20]) for prompt in rounds[0]}) == 1
    assert len({tuple(prompt[20:50]) for prompt in rounds[0]}) == 3


def test_stated_sizes_are_those_of_the_prompts(load: Load) -> None:
    prompts = [prompt for turn in load.rounds(seed=2) for prompt in turn]
    assert load.prompt_tokens == sum(map(len, prompts))
    assert load.longest_prompt == max(map(len, prompts))
    prefixes = {tuple(prompt[: at + 1]) for prompt in prompts for at in range(len(prompt))}
    assert load.working_set_tokens == len(prefixes)
    seen: set[tuple[int, ...]] = set()
    reused = 0
    for prompt in prompts:
        own = {tuple(prompt[: at + 1]) for at in range(len(prompt))}
        reused += len(own & seen)
        seen |= own
    assert load.reusable_tokens == reused


def test_another_seed_has_other_prompts(load: Load) -> None:
    first = {tuple(prompt[:20]) for prompt in load.rounds(seed=1)[0]}
    assert first.isdisjoint(tuple(prompt[:20]) for prompt in load.rounds(seed=3)[0])


@pytest.mark.parametrize(("rows", "tokens"), CELLS.values())
def test_a_cell_of_the_grid_has_so_many_rows_of_so_many_tokens(rows: int, tokens: int) -> None:
    load = cell_load(rows, tokens)
    [prompts] = load.rounds(seed=1)
    assert load.clients == rows
    assert len(prompts) % rows == 0
    assert {len(prompt) for prompt in prompts} == {tokens}
    assert load.reusable_tokens == 0


def test_servers_of_the_grid_hold_its_largest_cell_and_compare_more_than_that() -> None:
    largest = cell_load(max(ROWS), max(LENGTHS))
    blocks = -(-(largest.longest_prompt + largest.generate) // BLOCK_TOKENS)
    assert GRID.cache_blocks >= max(ROWS) * blocks
    flags = flags_of(NONE, GRID, Served())
    assert flags[flags.index("--max-num-seqs") + 1] == str(max(ROWS))
    for setting in (TWO_LOADS, GRID):
        compared = replace(LOADS[REUSE], conversations=setting.compared, turns=1)
        assert compared.working_set_tokens > 1.5 * setting.cache_tokens


def test_tiers_hold_as_many_tokens_in_either_type() -> None:
    sizes = {}
    for dtype in ("bfloat16", "float32"):
        flags = flags_of(ONE, TWO_LOADS, Served(dtype=dtype))
        assert flags[flags.index("--dtype") + 1] == dtype
        connector = json.loads(flags[flags.index("--kv-transfer-config") + 1])
        sizes[dtype] = connector["kv_connector_extra_config"]["cpu_bytes_to_use"]
    assert sizes["float32"] == 2 * sizes["bfloat16"] > 0


def ratio(low: float, median: float = 1.0) -> dict[str, Any]:
    return {"throughput_ratio": {"median": median, "low": low, "high": 3.0}}


def test_a_cell_whose_interval_begins_below_its_bar_is_named() -> None:
    cells = {
        "1 x 32": {NONE: ratio(1), AGAIN: ratio(0.5), ONE: ratio(0.98)},
        "8 x 32": {ONE: ratio(0.97)},
    }
    assert bars_missed({"results": cells}) == [
        "8 x 32, one tier, over no offload: 1.00 (0.97-3.00), the bar is 0.98 by the lower end"
    ]


def test_bars_of_both_loads_are_judged_by_the_lower_end() -> None:
    def document(below: float) -> dict[str, Any]:
        kept = ratio(1.5 - below, 2.0)
        kept["over_two_tiers"] = ratio(0.97 - below)["throughput_ratio"]
        copies = [
            {"of_this_load": here, "ratio": ratio(low)["throughput_ratio"]}
            for here, low in ((True, 0.8 - below), (False, 0.1))
        ]
        without = {NONE: ratio(1), AGAIN: ratio(0.5)}
        loads = {REUSE: {**without, KEPT: kept}, NEVER: {**without, ONE: ratio(0.98 - below)}}
        return {"results": loads, "copies": copies}

    assert bars_missed(document(0.0)) == []
    missed = bars_missed(document(0.01))
    assert [line.partition(":")[0] for line in missed] == [
        f"{KEPT}, throughput over no offload",
        f"{KEPT}, over two tiers",
        f"{ONE}, over no offload for {NEVER}",
        "copy worker, over memcpy",
    ]
    assert "2.00 (1.49-3.00), the bar is 1.5" in missed[0]


def test_a_second_server_without_offload_is_no_row_of_this_package() -> None:
    servers = {NONE: ratio(1), AGAIN: ratio(0.9), ONE: ratio(0.97)}
    assert flags_of(AGAIN, GRID, Served()) == flags_of(NONE, GRID, Served())
    assert [row.case for row in rows_of("vllm_kv", {"results": {NEVER: servers}})] == [
        f"{NEVER}: {ONE}"
    ]
