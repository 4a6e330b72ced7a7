"""Plans over several GPUs that share every layer: written out by hand, limits, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cxl_offload.cli._plan_inputs import as_advice
from cxl_offload.cli.main import app
from cxl_offload.errors import ConfigError
from cxl_offload.plan.equations.collectives import all_reduce_seconds
from cxl_offload.plan.gpu import LAYER_S, MEMORY_SHARE, REQUEST_S, SEQUENCE_S
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.vllm.flags import flags_of_plan
from cxl_offload.plan.vllm.tensor_parallel import kv_parts
from cxl_offload.topology import load_machine

from ..model.test_config import SMALL
from .test_plan import flag, plan_vllm, request

GIB = 1 << 30
RUN = CliRunner()


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_rate_is_that_of_the_step_written_out(gpus: int) -> None:
    """All in GPU memory: bytes over what a GPU reads, arithmetic over peak, sums over the link."""
    wanted = request("llama-3-8b", gpus=gpus, cxl_margin=0.0, most_sequences=64)
    plan = plan_vllm(wanted)
    model, gpu = wanted.model, wanted.machine.gpus[0]
    link = wanted.hardware().link_bytes_per_s
    assert plan.of("weights").keys() == {"gpu"}
    running, context = 64, 350.0  # KV of all has room: 64 sequences of 300 + 100 / 2 tokens
    weights = model.checkpoint_bytes - 2 * model.vocab * model.hidden  # a row of the table a token
    nbytes = (weights + running * context * model.kv_bytes_per_token()) / gpus
    flops = running * model.forward_flops(tokens=1, context=context) / gpus
    rate = MEMORY_SHARE * (gpu.memory_bandwidth_bytes_per_s or 0)
    peak = 0.33 * (gpu.peak_flops_per_s or 0)  # what products reach on an H100
    compute = max(nbytes / rate, flops / peak) + model.layers * LAYER_S + running * SEQUENCE_S
    prompts = running / 100
    prefill = prompts * model.forward_flops(tokens=300, context=150) / gpus
    prefill = prefill / peak + prompts * REQUEST_S
    tokens = running + prompts * 300  # each is summed twice a layer, in 16 bits
    ring = 2 * (gpus - 1) / gpus * tokens * model.hidden * 2 / link
    seconds = compute + prefill + 2 * model.layers * ring
    assert plan.tokens_per_s == pytest.approx(running / seconds, rel=1e-9)
    assert plan.phases[0].terms["sums over the GPUs"] == pytest.approx(2 * model.layers * ring)


def test_one_gpu_is_planned_as_before() -> None:
    assert plan_vllm(request()) == plan_vllm(request(gpus=1))
    assert all_reduce_seconds(1e9, 1, 1e9) == 0


def test_more_gpus_are_never_slower_on_a_link_without_end_and_each_has_its_part() -> None:
    base = request("llama-3-70b", cxl_margin=0.0)
    gpu = base.machine.gpus[0]
    assert gpu.link is not None
    fast = replace(
        gpu, link=replace(gpu.link, h2d_bandwidth_bytes_per_s=1e15, peak_bandwidth_bytes_per_s=1e15)
    )
    machine = replace(base.machine, gpus=(fast,))
    plans = [plan_vllm(replace(base, machine=machine, gpus=gpus)) for gpus in (1, 2, 4, 8)]
    speeds = [plan.tokens_per_s for plan in plans]
    assert speeds == sorted(speeds)
    for gpus, plan in zip((1, 2, 4, 8), plans, strict=True):
        assert plan.gpu_bytes == gpus * plans[0].gpu_bytes
        weights = sum(plan.of("weights").values())
        assert weights == pytest.approx(base.model.checkpoint_bytes, abs=1)


@pytest.mark.parametrize(("gpus", "tier"), [(1, "ldram"), (2, "ldram"), (8, "ldram"), (8, "cxl")])
def test_links_add_up_until_the_node_gives_all_that_cpus_read_there(gpus: int, tier: str) -> None:
    left = 1 * GIB  # of each GPU, for KV and what stays of the weights
    wanted = request("llama-2-7b", "epyc9354-cxl-a", gpus=gpus, most_sequences=4, tiers=(tier,))
    usable = int(wanted.hardware().gpu_memory_bytes * wanted.gpu_usable)
    plan = plan_vllm(replace(wanted, gpu_reserved_bytes=usable - left))
    off, machine = plan.of("weights")[tier], wanted.machine
    link = wanted.hardware().link_bytes_per_s
    access = machine.access(machine.initiator, machine.tier(tier).nodes[0])
    assert access is not None
    read = access.read_bandwidth_bytes_per_s or 0.0
    one = machine.dma_bandwidth(machine.gpus[0], access.target) or read  # not printed: reads bound
    rate = min(gpus * min(link, one), max(one, read))
    assert plan.phases[0].terms["weight copies"] == pytest.approx(off / rate, rel=1e-6)


def test_offload_is_of_each_gpu_and_the_command_says_how_many_there_are() -> None:
    plan = plan_vllm(request("llama-3-70b", gpus=2, gpu_reserved_bytes=30 * GIB))
    off = plan.of("weights")["ldram"]
    assert flag(plan, "--tensor-parallel-size") == "2"
    assert off / 2 < float(flag(plan, "--cpu-offload-gb")) * GIB < off / 2 * 1.002
    made = flags_of_plan(plan)
    assert made[made.index("--tensor-parallel-size") + 1] == "2"
    assert made[made.index("--cpu-offload-gb") + 1] == flag(plan, "--cpu-offload-gb")
    assert "--tensor-parallel-size" not in plan_vllm(request()).command


def test_kv_that_no_head_divides_is_whole_on_every_gpu(tmp_path: Path) -> None:
    few = load_model("qwen2-7b")  # 28 heads, 4 of KV
    assert [kv_parts(few, gpus) for gpus in (1, 2, 4)] == [1, 2, 4]
    assert kv_parts(few, 28) == 4
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "deepseek_v3", **SMALL["deepseek_v3"]}))
    latent = load_model(str(path))
    assert kv_parts(latent, 4) == 1


@pytest.mark.parametrize(
    ("model", "gpus", "why"),
    [
        ("llama-3-8b", 0, "1 to 64"),
        ("llama-3-8b", 65, "1 to 64"),
        ("llama-3-8b", 3, "32 attention heads"),
        ("qwen2-7b", 14, "4 KV heads"),
    ],
)
def test_numbers_that_vllm_refuses_are_refused(model: str, gpus: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        request(model, gpus=gpus)


def test_a_plan_whose_command_was_changed_is_refused_in_one_line() -> None:
    plan = plan_vllm(request("llama-3-70b", gpus=2, gpu_reserved_bytes=30 * GIB))
    at = plan.command.index("--tensor-parallel-size") + 1
    for wrong in ("0", "-1", "two", "9" * 5000, "65"):
        changed = replace(plan, command=(*plan.command[:at], wrong, *plan.command[at + 1 :]))
        with pytest.raises(ConfigError, match="tensor-parallel-size"):
            flags_of_plan(changed)


def test_command_line_plans_for_several_gpus_and_only_for_vllm() -> None:
    words = ["plan", "inference", "--model", "llama-3-70b", "--machine", "spr3-h100", "--gpus", "4"]
    found = RUN.invoke(app, [*words, "--json"])
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["executor"] == "vllm"
    assert "--tensor-parallel-size" in document["command"]
    assert any("4 GPUs compute every layer together" in note for note in document["notes"])
    assert (document["runs"], document["advice"]) == (False, "planned as if 4 GPUs were there")
    assert any("spr3-h100 has one GPU" in note for note in document["notes"])
    refused = RUN.invoke(app, [*words, "--executor", "flexgen"])
    assert refused.exit_code == 2
    assert "--gpus: flexgen has no such option" in refused.output


def test_gpus_that_the_machine_has_are_no_supposition() -> None:
    plan, machine = plan_vllm(request("llama-3-70b", gpus=2)), load_machine("spr3-h100")
    gpus = tuple(replace(machine.gpus[0], name=f"H100-{at}") for at in range(2))
    two = replace(machine, gpus=gpus, dma_paths=())
    assert as_advice(plan, None, None, two, 2) is plan
    assert as_advice(plan, None, None, machine, None) is plan
    assert not as_advice(plan, None, None, machine, 2).runs
    assert as_advice(plan, None, "h100", two, 2).advice == "planned as if GPU h100 were there"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("inference", "--gpus 3: --gpu none plans without any; leave one of them out"),
        ("training", "--gpu none: no training is planned for CPUs alone; leave it out"),
    ],
)
def test_several_gpus_of_a_machine_without_any_are_refused(kind: str, message: str) -> None:
    words = ["plan", kind, "--model", "opt-1.3b", "--machine", "spr3-h100", "--gpus", "3"]
    refused = RUN.invoke(app, [*words, "--gpu", "none"])
    assert refused.exit_code == 2
    assert message in refused.output
    assert "heads" not in refused.output
