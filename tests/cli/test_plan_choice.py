"""Which executor ``--executor auto`` takes, and what it says of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cxl_offload.cli._plan_choice import fastest
from cxl_offload.errors import ConfigError
from cxl_offload.plan.executor_rules import ExecutorName
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.topology import load_machine


@pytest.fixture(scope="module")
def made() -> Plan:
    asked = TransformersRequest(
        model=load_model("opt-125m"),
        machine=load_machine("xeon8468"),
        prompt=16,
        generated=8,
        model_name="opt-125m",
        replay=None,
        most_batches=1,
    )
    return plan_transformers(asked)


def plan_of(
    made: Plan, executor: ExecutorName, rate: float, advice: str = ""
) -> Callable[[], Plan]:
    plan = replace(
        made, executor=executor, tokens_per_s=rate, runs=not advice, advice=advice, notes=()
    )
    return lambda: plan


def refused() -> Plan:
    raise ValueError("no GPU")


def test_fastest_that_is_installed_is_taken_here(made: Plan) -> None:
    plans = {
        "vllm": plan_of(made, "vllm", 30.0),
        "transformers": plan_of(made, "transformers", 20.0),
        "flexgen": plan_of(made, "flexgen", 10.0),
    }
    found = fastest(plans, lines=False, here=True, has=lambda name: name != "vllm")
    assert found.executor == "transformers"
    assert found.notes == (
        "vllm: 30 tokens/s (predicted), passed over: vllm is not installed here",
        "flexgen: 10 tokens/s (predicted)",
    )


def test_advice_is_taken_here_only_where_nothing_runs(made: Plan) -> None:
    plans = {
        "transformers": plan_of(made, "transformers", 20.0, advice="for your own program"),
        "flexgen": plan_of(made, "flexgen", 10.0),
    }
    assert fastest(plans, lines=False, here=True, has=lambda _: True).executor == "flexgen"
    del plans["flexgen"]
    assert fastest(plans, lines=False, here=True, has=lambda _: True).executor == "transformers"


def test_fastest_is_taken_for_another_machine(made: Plan) -> None:
    """Nobody knows what is installed there."""
    plans = {"vllm": plan_of(made, "vllm", 30.0), "flexgen": plan_of(made, "flexgen", 10.0)}
    assert fastest(plans, lines=False, has=lambda _: False).executor == "vllm"


def test_executor_that_cannot_is_named_with_its_reason(made: Plan) -> None:
    plans = {"vllm": refused, "flexgen": plan_of(made, "flexgen", 10.0)}
    assert fastest(plans, lines=False).notes == ("vllm: passed over: no GPU",)
    with pytest.raises(ValueError, match="no GPU"):
        fastest({"vllm": refused}, lines=False)


def test_where_none_can_every_reason_is_said() -> None:
    def without_gpu() -> Plan:
        raise ConfigError("no GPU")

    def without_tier() -> Plan:
        raise ConfigError("no tier 'ldram'")

    def without_room() -> Plan:
        raise MemoryError("no room")

    plans = {"flexgen": without_gpu, "transformers": without_tier, "vllm": without_gpu}
    with pytest.raises(ConfigError, match=r"^flexgen: no GPU; transformers: no tier 'ldram'; vllm"):
        fastest(plans, lines=False)
    with pytest.raises(MemoryError, match=r"^no room$"):
        fastest({**plans, "vllm": without_room}, lines=False)
