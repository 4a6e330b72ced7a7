"""The bars of the tuners, each with its figure and its verdict."""

from __future__ import annotations

from typing import Any

__all__ = ["print_bars"]

WITHIN = 0.95
WATCHED_STEP_S = 0.01


def print_bars(result: dict[str, Any]) -> None:
    """One row a bar: what is asked, what was found, and whether it is met."""
    print("\n| bar | found | |")
    print("|---|---|---|")
    for bar, found, met in _rows(result):
        print(f"| {bar} | {found} | {'met' if met else 'NOT MET'} |")


def _rows(result: dict[str, Any]) -> list[tuple[str, str, bool]]:
    return [*_rows_of_workloads(result), *_rows_of_phases(result), *_rows_of_experts(result)]


def _rows_of_workloads(result: dict[str, Any]) -> list[tuple[str, str, bool]]:
    model, caption = result["random"]["model"], result["random"]["caption"]
    worse = model["over_2_percent_worse_than_first_touch"]
    zero = model["back_to_zero_where_near_is_best"]
    ratio = model["mean_decisions"] / caption["mean_decisions"]
    return [
        (
            "within 3 % of the best share in 95 % of random workloads",
            f"{model['within_3_percent']:.1%}, simulated",
            model["within_3_percent"] >= WITHIN,
        ),
        (
            "the same on published machines and kinds of load",
            f"{result['published']['model']['within_3_percent']:.1%}, simulated",
            result["published"]["model"]["within_3_percent"] >= WITHIN,
        ),
        (
            "never over 2 % worse than first touch at the end",
            f"{worse:.1%} of workloads are, simulated",
            worse == 0.0,
        ),
        (
            "back to 0 where the near tier is best",
            f"{zero:.0%}, simulated",
            zero == 1.0,
        ),
        (
            "at most half of Caption's decisions",
            f"{ratio:.2f} of them, simulated",
            ratio <= 0.5,
        ),
    ]


def _rows_of_phases(result: dict[str, Any]) -> list[tuple[str, str, bool]]:
    moved, gained = result["phase_change"]["model"], result["phase_shares"]
    return [
        (
            "a change of phase recovered within 10 decisions in 95 %",
            f"{moved['recovered_within_10']:.1%}, {moved['mean_decisions']:.1f} in the mean, "
            "simulated",
            moved["recovered_within_10"] >= WITHIN,
        ),
        (
            "80 % of what a share for each phase can gain",
            f"{gained['gained_mean']:.0%} in the mean of {gained['pairs_that_differ']:.0f} pairs, "
            f"80 % reached in {gained['gained_80_percent']:.0%} of them, simulated",
            gained["gained_mean"] >= 0.8,
        ),
    ]


def _rows_of_experts(result: dict[str, Any]) -> list[tuple[str, str, bool]]:
    watching = result["watching_a_step_s"] / WATCHED_STEP_S
    rows = result["experts"]
    return [
        (
            "most used experts within 10 % of the oracle on every machine",
            f"at worst {max(row['over_oracle'] for row in rows):.1%} slower, requests measured, "
            "times simulated",
            all(row["over_oracle"] <= 0.1 for row in rows),
        ),
        (
            "at most 1 % of the experts' traffic spent on moving them",
            f"at most {max(row['moved_of_traffic'] for row in rows):.2%}",
            all(row["moved_of_traffic"] <= 0.01 for row in rows),
        ),
        (
            "watching costs at most 0.1 % of a step of 10 ms",
            f"{watching:.3%}, measured",
            watching <= 0.001,
        ),
    ]
