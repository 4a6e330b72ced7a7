"""Checkpoints of GPTQ and AWQ, written by their published formulas, against the same in numpy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import load, offload
from cxl_offload.integrations.transformers.int4_layers import Int4Linear
from cxl_offload.integrations.transformers.weights import meta_model, weight_bytes
from cxl_offload.memory import Session
from cxl_offload.plan.transformers.layout import COPIED_ROWS

from .commands import command, run
from .conftest import machine
from .ecosystem import needed
from .models import generate, make, prompts

POLICIES = {"kv": "bind:2", "weights": "bind:1"}
GROUP = 32
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that is the n-th code of a word, from the lowest bits: AutoAWQ packs so."""

PLAIN_LAYERS = {"gptq": "torch", "awq": "torch_awq"}
"""Of gptqmodel. Those that it prefers on a CPU are C++, which it compiles for four minutes."""

Array = NDArray[Any]


def rounded(weight: Array) -> tuple[Array, Array, Array]:
    """Codes ``(outputs, width)``, zeros and float16 steps ``(outputs, groups)``."""
    grouped = weight.reshape(len(weight), -1, GROUP)
    low, high = np.minimum(grouped.min(2), 0), np.maximum(grouped.max(2), 0)
    steps = ((high - low) / 15).astype(np.float16)
    zeros = np.clip(np.round(-low / steps.astype(np.float32)), 1, 15)
    codes = np.round(grouped / steps.astype(np.float32)[..., None]) + zeros[..., None]
    return np.clip(codes, 0, 15).reshape(weight.shape).astype(int), zeros.astype(int), steps


def worth(weight: Array) -> Array:
    """What the checkpoint says a weight is: ``(code - zero) * step``, in float32."""
    codes, zeros, steps = rounded(weight)
    spread = (np.repeat(each, GROUP, 1) for each in (zeros, steps.astype(np.float32)))
    zero, step = spread
    return ((codes - zero) * step).astype(np.float32)


def words(codes: Array, places: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight codes of the last dimension an int32, the ``places[n]``-th at bit ``4 n``."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    packed = np.zeros(eights.shape[:-1], np.uint32)
    for at, place in enumerate(places):
        packed |= eights[..., place] << np.uint32(4 * at)
    return torch.from_numpy(packed.view(np.int32).copy())


def gptq(weight: Array, stored_less: int) -> dict[str, torch.Tensor]:
    codes, zeros, steps = rounded(weight)
    return {
        "qweight": words(codes).t().contiguous(),
        "qzeros": words(zeros.T - stored_less),
        "scales": torch.from_numpy(steps.T.copy()),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


def awq(weight: Array) -> dict[str, torch.Tensor]:
    codes, zeros, steps = rounded(weight)
    return {
        "qweight": words(codes.T, AWQ_PLACES),
        "qzeros": words(zeros.T, AWQ_PLACES),
        "scales": torch.from_numpy(steps.T.copy()),
    }


FORMATS: dict[str, tuple[Callable[[Array], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "gptq": (lambda w: gptq(w, 1), {"quant_method": "gptq", "desc_act": False, "sym": False}),
    "gptq_v2": (
        lambda w: gptq(w, 0),
        {"quant_method": "gptq", "desc_act": False, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "version": "gemm", "zero_point": True}),
}


def write(family: str, form: str, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A checkpoint, and the model of its numbers as the formulas say."""
    model = make(family).to(dtype)
    model.save_pretrained(folder)
    quantize, config = FORMATS[form]
    kept: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            kept[name] = weight
            continue
        for key, each in quantize(weight.float().numpy()).items():
            kept[name.removesuffix("weight") + key] = each
        with torch.no_grad():
            exact = torch.from_numpy(worth(weight.float().numpy()))
            model.get_parameter(name).copy_(exact)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"] = {**config, "bits": 4, "group_size": GROUP}
    (folder / "config.json").write_text(json.dumps(said))
    return model


def layers(model: PreTrainedModel) -> list[Int4Linear]:
    return [each for each in model.modules() if isinstance(each, Int4Linear)]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_checkpoint_says_what_its_formula_says(
    family: str, form: str, tmp_path: Path, session: Session
) -> None:
    exact = write(family, form, tmp_path, torch.float32)
    assert not torch.equal(generate(exact), generate(make(family))), "it was rounded"
    model = load(tmp_path, POLICIES, session=session)
    model.generation_config = exact.generation_config
    assert len(layers(model)) == 14
    for layer in layers(model):
        found = session.bytes_per_node(layer.weight.data_ptr(), layer.weight.nbytes)
        assert set(found) == {1}
    given = prompts()
    with torch.no_grad():
        wanted = exact(**given).logits
        torch.testing.assert_close(model(**given).logits, wanted, atol=2e-4, rtol=2e-4)
        one = {"input_ids": given["input_ids"][:1, -COPIED_ROWS // 8 :]}
        torch.testing.assert_close(model(**one).logits, exact(**one).logits, atol=2e-4, rtol=2e-4)
    with offload(model, POLICIES, session=session) as done:
        assert torch.equal(generate(model), generate(exact))
        assert done.calls.kernel > 0
        assert session.stats().nodes[1].current_bytes > 0


def test_codes_take_a_quarter_of_the_room_of_half_precision(
    tmp_path: Path, session: Session
) -> None:
    exact = write("llama", "gptq", tmp_path, torch.float16)
    model = load(tmp_path, {"mlp": "bind:1", "attention": "bind:1"}, session=session)
    codes = sum(layer.weight.nbytes for layer in layers(model))
    halves = sum(w.nbytes for name, w in exact.named_parameters() if name.endswith("proj.weight"))
    assert codes == halves // 4 + halves // 2 // GROUP * 4
    assert session.stats().asked_bytes.current == codes
    assert model.dtype is torch.float16
    with torch.no_grad():
        wanted = exact.float()(**prompts()).logits
        torch.testing.assert_close(model(**prompts()).logits.float(), wanted, atol=5e-2, rtol=5e-2)


def test_model_that_offload_moves_is_back_after_it(tmp_path: Path, session: Session) -> None:
    write("llama", "awq", tmp_path, torch.float32)
    model = load(tmp_path, {"norm": "bind:0"}, session=session)
    stock = generate(model)
    with offload(model, POLICIES, session=session):
        assert torch.equal(generate(model), stock)
    assert torch.equal(generate(model), stock)


def test_gradients_flow_through_layers_to_what_is_trained(tmp_path: Path, session: Session) -> None:
    exact = write("llama", "gptq", tmp_path, torch.float32)
    model = load(tmp_path, {"norm": "bind:0"}, session=session)
    grads = []
    for each in (model, exact):
        each(**prompts(), labels=prompts()["input_ids"]).loss.backward()
        grads.append(each.get_input_embeddings().weight.grad)
        each.zero_grad()
    torch.testing.assert_close(grads[0], grads[1], atol=1e-4, rtol=1e-3)
    del model


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("order", "another order"), ("shape", "do not fit|rows"), ("experts", "such a model is not")],
)
def test_checkpoint_that_cannot_be_read_is_refused_in_one_line(
    fault: str, reason: str, tmp_path: Path, session: Session
) -> None:
    write("llama", "gptq", tmp_path, torch.float32)
    file = tmp_path / "model.safetensors"
    kept, layer = load_file(file), "model.layers.0.mlp.down_proj."
    if fault == "order":
        kept[layer + "g_idx"] = kept[layer + "g_idx"].flip(0)
    elif fault == "shape":
        kept[layer + "scales"] = kept[layer + "scales"][:1].contiguous()
    else:
        kept["model.layers.0.mlp.experts.0.w1.qweight"] = torch.zeros(1, dtype=torch.int32)
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=reason) as caught:
        load(tmp_path, POLICIES, session=session)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", PLAIN_LAYERS)
def test_logits_are_those_of_gptqmodel(form: str, tmp_path: Path) -> None:
    for name in ("gptqmodel", "optimum.gptq"):
        needed(name)
    write("llama", form, tmp_path, torch.float16)
    session = Session.simulated(machine())  # of its own: what gptqmodel patches keeps our model
    ours = load(tmp_path, POLICIES, session=session)
    said = json.loads((tmp_path / "config.json").read_text())
    said["quantization_config"]["backend"] = PLAIN_LAYERS[form]
    (tmp_path / "config.json").write_text(json.dumps(said))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert type(theirs.model.layers[0].mlp.down_proj).__module__.startswith("gptqmodel.")
        for given in (prompts(), {"input_ids": prompts()["input_ids"][2:3]}):  # by torch, by codes
            wanted = theirs(**given).logits
            torch.testing.assert_close(ours(**given).logits, wanted, atol=5e-2, rtol=5e-2)


def test_tier_that_is_too_small_for_the_codes_is_refused_before_the_model_loads(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("llama", "gptq", tmp_path, torch.float16)
    for file in ("tokenizer.json", "tokenizer_config.json", "prompts.txt"):
        shutil.copy(folder / file, tmp_path)
    kept = load_file(tmp_path / "model.safetensors")
    integers = sum(each.nbytes for each in kept.values() if each.dtype is torch.int32)
    least = weight_bytes(meta_model(tmp_path), folder=tmp_path)
    assert least["mlp"] + least["attention"] == integers
    asked = command(tmp_path, "--place", "mlp=cxl", "--gen-len", "2", "--limit", "cxl=10kB")
    assert run(asked) == 2
    said = capsys.readouterr().err
    assert "mlp" in said
    assert said.count("\n") == 1
    assert run([*asked[:-1], "cxl=10MB"]) == 0
