"""Several GPUs: what each host holds, what a ring sends, and that no plan beats as many alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.plan.training.ranks import Ranks
from cxl_offload.topology import load_machine


def planned(ranks: Ranks, *, batch: int, model: str = "opt-6.7b", links: int = 1) -> Plan:
    """On a machine whose link is as fast as so many."""
    machine = load_machine("epyc9354-cxl-a")
    link = machine.gpus[0].link
    assert link is not None
    assert link.h2d_bandwidth_bytes_per_s is not None
    assert link.d2h_bandwidth_bytes_per_s is not None
    link = replace(
        link,
        h2d_bandwidth_bytes_per_s=links * link.h2d_bandwidth_bytes_per_s,
        d2h_bandwidth_bytes_per_s=links * link.d2h_bandwidth_bytes_per_s,
    )
    machine = replace(machine, gpus=(replace(machine.gpus[0], link=link),))
    request = TrainingRequest(
        model=load_model(model), machine=machine, batch=batch, tokens=1024,
        ranks=ranks, cxl_margin=0.0,
    )  # fmt: skip
    return plan_training(request)


def ring_seconds(ranks: int, nbytes: float, rate: float) -> float:
    """An all-gather in a ring, round by round: everyone sends the part that came last."""
    held = [{rank} for rank in range(ranks)]
    sent = list(range(ranks))
    seconds = 0.0
    while any(len(parts) < ranks for parts in held):
        arrived = [sent[(rank - 1) % ranks] for rank in range(ranks)]
        for rank, part in enumerate(arrived):
            held[rank].add(part)
        sent = arrived
        seconds += nbytes / ranks / rate
    return seconds


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_an_exchange_takes_as_long_as_a_ring(count: int) -> None:
    assert Ranks(gpus=count).exchange_seconds(6e9, 2e10) == pytest.approx(
        ring_seconds(count, 6e9, 2e10)
    )


def test_the_slower_of_link_and_network_bounds_an_exchange_between_hosts() -> None:
    slow = Ranks(gpus=4, hosts=2, network_bytes_per_s=5e9)
    fast = replace(slow, network_bytes_per_s=1e12)
    assert slow.exchange_seconds(8e9, 2e10) == pytest.approx(8e9 * 7 / 8 / 5e9)
    assert fast.exchange_seconds(8e9, 2e10) == pytest.approx(8e9 * 7 / 8 / 2e10)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_gpus_of_a_host_share_its_optimizer_and_never_beat_as_many_machines(gpus: int) -> None:
    """Each copies its part of the gradients, as if a machine's link were so many times as fast."""
    one, several = planned(Ranks(), batch=4), planned(Ranks(gpus=gpus), batch=4 * gpus)
    fast = planned(Ranks(), batch=4, links=gpus)
    assert one.tokens_per_s < several.tokens_per_s <= gpus * fast.tokens_per_s * (1 + 1e-9)
    assert sum(several.node_bytes.values()) == pytest.approx(sum(one.node_bytes.values()), rel=0.3)
    times = [plan.phases[-1].terms["optimizer (CPU)"] for plan in (one, several)]
    assert times[0] == pytest.approx(times[1])
    assert several.batch.size * several.batch.count == 4


def test_hosts_divide_the_states() -> None:
    one, two = (
        planned(Ranks(gpus=2, hosts=hosts, network_bytes_per_s=2.5e10), batch=8 * hosts)
        for hosts in (1, 2)
    )
    kinds = ("fp32_master", "exp_avg", "exp_avg_sq")
    for kind in kinds:
        assert sum(two.of(kind).values()) == pytest.approx(sum(one.of(kind).values()) / 2)
    assert two.command[:3] == ("deepspeed", "--num_gpus=2", "--num_nodes=2")
    assert one.command[:2] == ("deepspeed", "--num_gpus=2")


def test_a_slower_network_is_never_faster() -> None:
    rates = [
        planned(Ranks(hosts=2, network_bytes_per_s=rate), batch=8).tokens_per_s
        for rate in (1e9, 5e9, 2.5e10, 1e12)
    ]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "3"], "batch 16 over 3 GPUs: a multiple"),
        (["--gpus", "0"], "0 GPUs on 1 hosts"),
        (["--hosts", "2"], "network between them has no rate"),
        (["--hosts", "2", "--network", "fast"], "--network"),
        (["--hosts", "2", "--network", "1B/s"], "from 0.001 to 10000"),
        (["--network", "25GB/s"], "--network 25GB/s: one host sends to no other; give --hosts"),
        (["--gpus", "2", "--network", "25GB/s"], "--network 25GB/s: one host"),
    ],
)
def test_ranks_that_mean_nothing_are_refused(words: list[str], message: str) -> None:
    line = ["plan", "training", "--model", "gpt2-xl", "--machine", "epyc9354-cxl-a", *words]
    result = CliRunner().invoke(app, line)
    assert result.exit_code != 0
    assert message in f"{result.output} {result.exception}"


def test_the_plan_of_several_gpus_says_what_is_assumed() -> None:
    plan = planned(Ranks(gpus=2), batch=8, model="gpt2-xl")
    assert any("2 GPUs" in note for note in plan.notes)
    assert any("not replayed" in note for note in plan.notes)
    with pytest.raises(ConfigError, match="1 to 64"):
        Ranks(gpus=65)


def test_gpus_beyond_those_of_the_machine_are_advice() -> None:
    line = ["plan", "training", "--model", "gpt2-xl", "--machine", "epyc9354-cxl-a", "--json"]
    gpus = ([], ["--gpus", "2"])
    one, two = (json.loads(CliRunner().invoke(app, [*line, *more]).stdout) for more in gpus)
    assert one["runs"]
    assert (two["runs"], two["advice"]) == (False, "planned as if 2 GPUs were there")
    assert any("epyc9354-cxl-a has one GPU" in note for note in two["notes"])


def test_the_plan_of_several_hosts_says_that_the_machine_is_one() -> None:
    plan = planned(Ranks(hosts=2, network_bytes_per_s=1e10), batch=8, model="gpt2-xl")
    assert any("the machine is one host, and the plan is for 2 like it" in n for n in plan.notes)
