"""Plans that keep hidden states on the host are carried out; the GPU is one that is not there.

Its link is a slow one, so that it pays to read the weights of tiny models once for many rows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel

from cxl_offload import _C
from cxl_offload.integrations import fit
from cxl_offload.integrations.transformers import generation, offload
from cxl_offload.memory import Session
from cxl_offload.plan.equations.row_states import BUFFERS, STATES
from cxl_offload.plan.model.file import load_model
from cxl_offload.plan.plan_file import Plan, load_plan, parse_plan, plan_text, save_plan
from cxl_offload.plan.transformers.job import decoder_job
from cxl_offload.plan.transformers.layout import Layout
from cxl_offload.plan.transformers.plan import TransformersRequest, plan_transformers
from cxl_offload.plan.transformers.states import copied_states
from cxl_offload.topology import load_machine

from . import test_streamed_states as streamed_states
from .commands import run
from .fake_accelerator import FakeCopies, fake_accelerator, pinning_session
from .models import PAD, generate, prompts
from .test_planned_gpu import LAYERS, llama
from .test_state_sizes import buffers_seen

CONFIGS = Path(__file__).parents[3] / "configs" / "machines"
PROMPT, NEW, WIDTH = 100, 12, 128


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine file whose GPU has a link of 40 MB/s."""
    text = (CONFIGS / "epyc9354-cxl-a.yaml").read_text()
    file = tmp_path_factory.mktemp("machine") / "slow.yaml"
    file.write_text(text.replace("{value: 25 GB/s,", "{value: 0.04 GB/s,"))
    link = load_machine(str(file)).gpus[0].link
    assert link is not None
    assert link.h2d_bandwidth_bytes_per_s == link.d2h_bandwidth_bytes_per_s == 4e7
    return file


@pytest.fixture
def session(slow: Path, driver: _C.FakeDriver, accelerator: str) -> Iterator[Session]:
    with pinning_session(load_machine(str(slow)), driver) as session:
        yield session


def opt(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=256, hidden_size=WIDTH, num_hidden_layers=LAYERS, ffn_dim=256,
        num_attention_heads=4, max_position_embeddings=512, word_embed_proj_dim=WIDTH,
        pad_token_id=PAD, bos_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = OPTForCausalLM(config).to(dtype).eval()
    model.generation_config.eos_token_id = None
    return model


MODELS = {"llama": llama, "opt": opt}
CASES = [("llama", 1_600_000), ("llama", 1_250_000), ("opt", 1_600_000)]
"""By the GPU's room: in the second one the embedding is there, and what it finds goes out."""


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(
    request: pytest.FixtureRequest, tmp_path: Path, slow: Path
) -> tuple[Plan, str, TransformersRequest]:
    """The best plan, read back from its file; nobody asks for hidden states on the host."""
    family, gpu_bytes = request.param
    MODELS[family]().config.save_pretrained(tmp_path)
    machine = load_machine(str(slow))
    memory = machine.gpus[0].memory_bytes
    assert memory is not None
    asked = TransformersRequest(
        model=load_model(str(tmp_path)),
        machine=machine,
        prompt=PROMPT,
        generated=NEW,
        model_name=family,
        gpu_usable=gpu_bytes / memory,
        batches=(1, 2),
        most_batches=6,
        replay=None,
        prices=False,
    )
    plan = parse_plan(plan_text(plan_transformers(asked)), file="plan.yaml")
    assert plan.policies[STATES].startswith("bind:")
    assert plan.batch.count > 2
    return plan, family, asked


def answers(model: PreTrainedModel, plan: Plan, attention: str | None = None) -> torch.Tensor:
    given = prompts(plan.batch.size * plan.batch.count, PROMPT)
    return generate(model, attention, **given, max_new_tokens=NEW)


@pytest.mark.sampled(1)
def test_tier_and_buffers_take_the_bytes_that_are_planned(
    case: tuple[Plan, str, Any], session: Session
) -> None:
    """To the byte, in half precision as plans are."""
    plan, family, _ = case
    model = MODELS[family](torch.float16)
    homes = dict(plan.of(STATES))
    there = homes.pop("gpu")
    (tier,) = homes
    with offload(model, plan, session=session) as done, buffers_seen(done) as seen:
        answers(model, plan)
        use = done.store.use()[STATES, "host"]
    assert use.peak_bytes == homes[tier]
    assert set(use.granted) <= set(session.machine.tier(tier).nodes)
    assert max(seen) == there == BUFFERS * 2 * plan.batch.size * PROMPT * WIDTH


@pytest.mark.sampled(1)
def test_passes_copy_the_bytes_that_are_charged(
    case: tuple[Plan, str, TransformersRequest], session: Session
) -> None:
    """In the prefill and at every token, in and out."""
    plan, family, asked = case
    job = decoder_job(asked.model, prompt=PROMPT, generated=NEW)
    kinds = frozenset(job.kinds)
    away = frozenset(kind for kind in kinds if plan.policies[kind] != "gpu")
    layout = Layout(plan.batch.size, away - {"embedding"}, frozenset(), away & {"embedding"})
    charged = copied_states(job, layout, plan.batch.size * plan.batch.count)
    model = MODELS[family](torch.float16)
    with offload(model, plan, session=session) as done:
        answers(model, plan)
        states = done.streamed_states
    assert states is not None
    steps = NEW - 1
    assert states.copied_in_bytes == charged.bytes_in(PROMPT) + steps * charged.bytes_in(1)
    assert states.copied_out_bytes == charged.bytes_out(PROMPT) + steps * charged.bytes_out(1)
    if plan.policies["embedding"] == "gpu":
        assert charged.token_out > charged.token_in


@pytest.mark.sampled(1)
def test_accelerator_never_has_the_hidden_states_of_all_rows(
    case: tuple[Plan, str, TransformersRequest], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is planned for those of four batches, and for a layer, holds all that are there."""
    plan, family, asked = case
    job = decoder_job(asked.model, prompt=PROMPT, generated=NEW)
    monkeypatch.setattr(streamed_states, "WIDTH", WIDTH)
    model, count = MODELS[family](torch.float16), streamed_states.StatesThere(session)
    with offload(model, plan, session=session), count:
        answers(model, plan)
    size = plan.batch.size
    all_rows = 2 * size * plan.batch.count * PROMPT * WIDTH
    planned = plan.of(STATES)["gpu"] + job.work_bytes(size)
    assert all_rows / plan.batch.count < count.peak_bytes <= planned
    assert planned < 4 * all_rows  # what the same plan without a tier holds


@pytest.mark.sampled(1)
def test_planned_run_gives_the_tokens_of_stock(
    case: tuple[Plan, str, Any], session: Session
) -> None:
    plan, family, _ = case
    model = MODELS[family]()
    stock = answers(model, plan, "sdpa")
    with offload(model, plan, session=session) as done:
        assert torch.equal(answers(model, plan), stock)
        assert done.rows_at_once == plan.batch.size
        assert done.streamed_states is not None


# On the command line -----------------------------------------------------------------------------


@pytest.fixture
def made(
    folder: Path, slow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[str]]:
    """A plan that the planner wrote, and a command that runs it on the accelerator."""
    there = tmp_path / "model"
    shutil.copytree(folder, there)  # its words are numbers
    llama().save_pretrained(there)
    words = [str(at) for at in range(22, 99) if at % 10 != 1]  # 1 is what fills short prompts
    lines = [" ".join((words[at:] + words + words)[:PROMPT]) for at in range(12)]
    (tmp_path / "prompts.txt").write_text("\n".join(lines) + "\n")
    plan, memory = tmp_path / "plan.yaml", load_machine(str(slow)).gpus[0].memory_bytes
    assert memory is not None
    given = ["--model", str(there), "--machine", str(slow)]
    lengths = ["--prompt-len", str(PROMPT), "--gen-len", str(NEW), "--max-batches", "12"]
    room = ["--gpu-usable", str(1_250_000 / memory), "--executor", "transformers"]
    assert run(["plan", "inference", *given, *lengths, *room, "--output", str(plan)]) == 0
    driver = _C.FakeDriver()
    session = Session.simulated(load_machine(str(slow)), driver=driver)
    monkeypatch.setattr(fit, "session_on", lambda *_: session)
    fake_accelerator(monkeypatch, lambda session: FakeCopies(session, driver))
    return plan, ["generate", *given, "--prompts", str(tmp_path / "prompts.txt")]


def test_command_of_a_plan_keeps_hidden_states_on_the_host(
    made: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, asked = tmp_path / "report.json", made[1]
    plan = load_plan(made[0])
    assert plan.policies[STATES].startswith("bind:")
    assert plan.batch.size * plan.batch.count >= 12
    assert run([*asked, "--plan", str(made[0]), "--output", str(file)]) == 0
    report = json.loads(file.read_text())
    (states,) = (row for row in report["placement"] if row["kind"] == STATES)
    tier = plan.policies[STATES].removeprefix("bind:")
    assert set(states["granted_bytes_per_tier"]) == {tier}
    assert states["requested_bytes"] == 3 * 4 * 12 * report["prompt_len"] * WIDTH
    assert report["prompt_len"] == PROMPT
    alone = [*asked, "--place", "kv=ldram", "--gen-len", str(NEW), "--output", str(file)]
    assert run(alone) == 0
    assert json.loads(file.read_text())["tokens"] == report["tokens"]


@pytest.mark.parametrize(
    ("more", "count", "message"),
    [
        (("--limit", "ldram=11MiB"), None, " + activations 1.76 MiB), capacity 11 MiB"),
        ((), 1, "a policy of activations is for hidden states of rows that are computed in parts"),
    ],
    ids=["no room", "one batch"],
)
def test_plan_that_cannot_be_carried_out_is_refused_before_the_model_loads(
    made: tuple[Path, list[str]],
    more: tuple[str, ...],
    count: int | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = load_plan(made[0])
    if count is not None:
        batch = replace(plan.batch, size=plan.batch.size * plan.batch.count, count=count)
        save_plan(replace(plan, batch=batch), made[0])
    monkeypatch.setattr(generation, "load", lambda *_, **__: pytest.fail("loaded"))
    capsys.readouterr()
    assert run([*made[1], "--plan", str(made[0]), *more]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line
