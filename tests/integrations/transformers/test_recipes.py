"""What people use beside generate(): compiled layers, adapters, dispatched models, the Trainer."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from cxl_offload import _C, offload_activations, offload_optimizer
from cxl_offload.integrations.transformers import offload
from cxl_offload.memory import Session
from tests.docs.blocks import make_model

from .conftest import machine
from .models import VOCAB, generate, make
from .training_recipes import assert_trains_alike_in_a_tier

POLICIES = {"kv": "bind:2", "weights": "bind:1"}


@pytest.mark.slow(reason="torch's compiler traces a layer for every shape")
@pytest.mark.parametrize("rows_at_once", [None, 3])
def test_compiled_layers_give_the_same_tokens(rows_at_once: int | None, session: Session) -> None:
    """Attention and cache are called as they are; what is around them is compiled."""
    logging.getLogger("torch.__trace").setLevel(logging.WARNING)  # it writes megabytes
    model = make("llama")
    stock = generate(model, "sdpa", max_new_tokens=3)
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    with offload(model, POLICIES, rows_at_once=rows_at_once, session=session) as done:
        model.model.layers[1].compile(backend=backend, dynamic=True)
        tokens = generate(model, max_new_tokens=3)
        assert done.calls.kernel > 0
        assert not done.calls.own
    torch._dynamo.reset()
    assert torch.equal(tokens, stock)
    assert compiled


@pytest.mark.slow(reason="torch's compiler traces a layer for every shape")
def test_compiled_layers_read_a_cache_in_two_places(
    driver: _C.FakeDriver, accelerator: str
) -> None:
    """What is around attention is compiled; states in two places are passed from it to it."""
    model = make("llama")
    stock = generate(model, "sdpa", max_new_tokens=3)
    ours = Session.simulated(machine(), driver=driver)
    options = {"accelerator": accelerator, "accelerator_kv": 0.5, "session": ours}
    with offload(model, POLICIES, **options) as done:
        for layer in model.model.layers:
            layer.self_attn.compile(backend="eager", dynamic=True)
        tokens = generate(model, max_new_tokens=3)
        assert done.calls.joined > 0
    torch._dynamo.reset()
    assert torch.equal(tokens, stock)


def test_adapters_of_peft_generate_with_base_and_cache_in_tiers(session: Session) -> None:
    peft = pytest.importorskip("peft")
    model = make("llama")
    stock = generate(model, "sdpa")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    expected = generate(adapted)
    assert not torch.equal(expected, stock)
    with offload(adapted.get_base_model(), POLICIES, linear_rows=4, session=session) as done:
        tokens = generate(adapted)
        assert done.calls.kernel > 0
        base = adapted.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
        assert set(session.bytes_per_node(base.data_ptr(), base.nbytes)) == {1}
        with adapted.disable_adapter():
            assert torch.equal(generate(adapted), stock)
    assert torch.equal(tokens, expected)


def test_model_that_accelerate_dispatched_runs(session: Session) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = make("llama")
    stock = generate(model, "sdpa")
    model = accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)
    assert hasattr(model, "_hf_hook")
    with offload(model, POLICIES, session=session) as done:
        tokens = generate(model)
        assert done.calls.kernel > 0
    assert torch.equal(tokens, stock)


class _Texts(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(3, VOCAB, (16,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": ids, "labels": ids}


def _trained(folder: Path, session: Session | None) -> list[float]:
    """Losses of four steps; with a session states and activations are in its tier."""
    torch.manual_seed(0)
    model = make("llama").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    args = TrainingArguments(
        output_dir=str(folder), max_steps=4, per_device_train_batch_size=2, logging_steps=1,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=_Texts(), optimizers=(optimizer, None))
    if session is None:
        trainer.train()
    else:
        handle = offload_optimizer(optimizer, "bind:2", session=session)
        states = 2 * 4 * sum(weight.numel() for weight in model.parameters())
        with offload_activations("bind:2", min_bytes=1, session=session) as activations:
            trainer.train()
        assert activations.use.copies > 0
        assert activations.use.copied_bytes > activations.use.copies  # not scalars alone
        assert session.stats().nodes[2].peak_bytes > states  # the optimizer has no more of its own
        handle.remove()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_trainer_learns_alike_with_states_and_activations_in_a_tier(
    tmp_path: Path, session: Session
) -> None:
    pytest.importorskip("accelerate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock = _trained(tmp_path, None)
        ours = _trained(tmp_path, session)
    assert len(stock) == 4
    assert ours == pytest.approx(stock, abs=1e-4)
    assert stock[-1] != stock[0]


def test_recipe_of_the_trainer_runs_as_pasted_with_the_losses_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    make_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert_trains_alike_in_a_tier("Trainer", monkeypatch)
