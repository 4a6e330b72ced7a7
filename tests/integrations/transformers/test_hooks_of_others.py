"""Models whose layers are wrapped by others: dispatched to files, compiled, with adapters."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cxl_offload.integrations.transformers import offload
from cxl_offload.memory import Session

from .models import generate, make

KV = {"kv": "bind:2"}
WEIGHTS = {"weights": "bind:1"}
IN_MEMORY = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
FILES = {**dict.fromkeys(IN_MEMORY, "cpu"), "model.layers.1": "disk"}


def nodes(weight: torch.Tensor, session: Session) -> set[int]:
    return set(session.bytes_per_node(weight.data_ptr(), weight.nbytes))


@pytest.mark.parametrize("policies", [KV, WEIGHTS, {**KV, **WEIGHTS}, {**KV, "mlp": "bind:1"}])
def test_model_that_accelerate_dispatched_to_files_runs(
    policies: dict[str, str], session: Session, tmp_path: Path
) -> None:
    """Weights in files stay accelerate's, which reads them for each step; the others are placed."""
    accelerate = pytest.importorskip("accelerate")
    model = make("llama")
    stock = generate(model, "sdpa")
    accelerate.dispatch_model(model, FILES, main_device="cpu", offload_dir=tmp_path)
    first, second = (layer.mlp.down_proj.weight for layer in model.model.layers)
    assert second.is_meta
    for _ in range(2):
        with offload(model, policies, session=session) as done:
            assert torch.equal(generate(model), stock)
            assert (done.calls.kernel > 0) == ("kv" in policies)
            if policies != KV:
                assert nodes(first, session) == {1}
                placed = done.store.use()[("mlp", "host")].peak_bytes
                assert placed == sum(each.nbytes for each in model.model.layers[0].mlp.parameters())
        assert model.model.layers[1].mlp.down_proj.weight.is_meta
        assert torch.equal(generate(model), stock)


def test_adapter_that_transformers_added_by_itself_generates_over_a_base_in_tiers(
    session: Session,
) -> None:
    """Its small weights are placed with their layers; it may be switched off in the block."""
    peft = pytest.importorskip("peft")
    model = make("llama")
    stock = generate(model, "sdpa")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model.add_adapter(config)
    expected = generate(model.eval())
    assert not torch.equal(expected, stock)
    with offload(model, {**KV, **WEIGHTS}, linear_rows=4, session=session) as done:
        assert torch.equal(generate(model), expected)
        projection = model.model.layers[0].self_attn.q_proj
        assert nodes(projection.base_layer.weight, session) == {1}
        assert nodes(projection.lora_A["default"].weight, session) == {1}
        model.disable_adapters()
        assert torch.equal(generate(model), stock)
        model.enable_adapters()
        assert torch.equal(generate(model), expected)
        assert done.calls.kernel > 0
    assert torch.equal(generate(model), expected)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("removed", ["in the block", "after it"])
def test_hook_on_a_layer_that_computes_rows_in_parts_comes_and_goes(
    before: bool, removed: str, session: Session
) -> None:
    """What others do to a layer in the block holds, and nothing of the block is left in it."""
    hooks = pytest.importorskip("accelerate.hooks")
    seen: list[int] = []

    class Counting(hooks.ModelHook):  # type: ignore[misc, name-defined]
        def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(args[0].shape[0] if args else kwargs["hidden_states"].shape[0])
            return args, kwargs

    model = make("llama")
    stock, layer = generate(model, "sdpa"), model.model.layers[0]
    if before:
        hooks.add_hook_to_module(layer, Counting())
    with offload(model, KV, rows_at_once=2, session=session):
        if not before:
            hooks.add_hook_to_module(layer, Counting())
        assert torch.equal(generate(model), stock)
        assert seen
        assert (max(seen) == 2) == before  # the one that came later is around the block's own
        if removed == "in the block":
            hooks.remove_hook_from_module(layer)
            seen.clear()
            assert torch.equal(generate(model), stock)
            assert not seen
    assert torch.equal(generate(model), stock)
    if removed == "after it":
        hooks.remove_hook_from_module(layer)
    seen.clear()
    assert torch.equal(generate(model), stock)
    assert not seen


@pytest.mark.slow(reason="torch's compiler writes C++ for a layer, and g++ builds it")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_layer_that_inductor_compiled_gives_the_same_tokens(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a cache that grows, and over a fixed one."""
    logging.getLogger("torch.__trace").setLevel(logging.WARNING)  # it writes megabytes
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = make("llama")
    stock = generate(model, "sdpa", max_new_tokens=3)
    with offload(model, {**KV, **WEIGHTS}, session=session) as done:
        model.model.layers[1].compile(backend="inductor", dynamic=True)
        tokens = generate(model, max_new_tokens=3)
        fixed = generate(model, max_new_tokens=3, cache_implementation="static")
        assert done.calls.kernel > 0
        assert not done.calls.own
    torch._dynamo.reset()
    assert torch.equal(tokens, stock)
    assert torch.equal(fixed, stock)
    assert any(tmp_path.rglob("*.so")), "nothing was compiled"
