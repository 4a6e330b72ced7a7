"""PEFT's adapters: wrapped models and folders of adapters, with tokens of PEFT without tiers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cxl_offload import _C
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import load, offload
from cxl_offload.memory import Session

from .commands import run
from .conftest import machine
from .models import generate, make

peft = pytest.importorskip("peft", reason="PEFT is not installed")

POLICIES = {"kv": "bind:2", "weights": "bind:1"}


def lora(model: PreTrainedModel) -> peft.PeftModel:
    """Adapters that change what the model says."""
    torch.manual_seed(5)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(model, config).eval()


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    """A folder of an adapter for the model in ``folder``, without a tokenizer."""
    lora(AutoModelForCausalLM.from_pretrained(folder)).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def stock_tokens(folder: Path, adapter: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config = make("llama").generation_config
    return generate(peft.PeftModel.from_pretrained(model, adapter).eval())


def test_wrapped_model_generates_in_the_block(session: Session) -> None:
    adapted = lora(make("llama"))
    expected = generate(adapted)
    assert not torch.equal(expected, generate(make("llama")))
    with offload(adapted, POLICIES, session=session) as done:
        assert torch.equal(generate(adapted), expected)
        assert done.calls.kernel > 0
        weight = adapted.get_base_model().model.layers[0].self_attn.q_proj.lora_A.default.weight
        assert set(session.bytes_per_node(weight.data_ptr(), weight.nbytes)) == {1}
    assert torch.equal(generate(adapted), expected)


def test_prompt_that_was_tuned_is_used_in_the_block(session: Session) -> None:
    torch.manual_seed(5)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6)
    adapted = peft.get_peft_model(make("llama"), config).eval()
    expected = generate(adapted)
    with offload(adapted, POLICIES, session=session) as done:
        assert torch.equal(generate(adapted), expected)
        assert done.calls.kernel > 0


def test_folder_of_an_adapter_is_loaded_with_its_model(
    folder: Path, adapter: Path, session: Session
) -> None:
    expected = stock_tokens(folder, adapter)
    assert not torch.equal(expected, generate(make("llama")))
    model = load(adapter, POLICIES, session=session)
    model.generation_config = make("llama").generation_config
    for name, weight in model.named_parameters():
        assert set(session.bytes_per_node(weight.data_ptr(), weight.nbytes)) == {1}, name
    held = sum(weight.nbytes for weight in model.parameters())
    assert session.stats().asked_bytes.current == held
    with offload(model, POLICIES, session=session) as done:
        assert torch.equal(generate(model), expected)
        assert done.calls.kernel > 0


def test_command_generates_with_an_adapter(
    folder: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    shutil.copytree(folder, tmp_path / "model")
    for model in (folder, adapter):
        given = ["generate", "--model", str(model), "--prompts", str(folder / "prompts.txt")]
        given += ["--place", "kv=cxl", "--place", "weights=cxl", "--gen-len", "8"]
        given += ["--machine", "epyc9354-cxl-a", "--json", str(tmp_path / "said.json")]
        assert run(given) == 0, capsys.readouterr().err
        found.append(json.loads((tmp_path / "said.json").read_text())["answers"])
        (tmp_path / "said.json").unlink()
    assert found[0] != found[1]
    assert [len(text.split()) for text in found[1]] == [8, 8]


def test_adapter_whose_model_is_not_there_is_refused_in_one_line(
    adapter: Path, session: Session, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    file = adapter / "adapter_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "base_model_name_or_path": "somebody/model"}))
    with pytest.raises(ConfigError, match="somebody/model is no folder"):
        load(adapter, POLICIES, session=session)
    given = ["generate", "--model", str(adapter), "--prompts", str(folder / "prompts.txt")]
    assert run([*given, "--place", "kv=cxl"]) == 2
    assert "write the path" in capsys.readouterr().err
    for text in ("{}", "[]", "{", '{"base_model_name_or_path": null}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="base_model_name_or_path"):
            load(adapter, POLICIES, session=session)


def test_wrapped_model_on_an_accelerator_has_its_adapters_streamed(
    driver: _C.FakeDriver, accelerator: str
) -> None:
    session = Session.simulated(machine(), driver=driver)
    adapted = lora(make("llama"))
    expected = generate(adapted)
    policies = {"weights": "bind:2", "kv": "bind:0"}
    with offload(adapted, policies, accelerator=accelerator, session=session) as done:
        assert torch.equal(generate(adapted), expected)
        assert done.streamed is not None
        layers = adapted.get_base_model().model.layers
        held = sum(weight.nbytes for weight in layers.parameters())
        assert done.streamed.copied_bytes > 9 * held
    assert torch.equal(generate(adapted), expected)
