"""Programs that train and measure models of transformers, over models in tiers.

TRL and lm-evaluation-harness bring hundreds of megabytes with them, so only
``make test-ecosystem`` installs them.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from cxl_offload import offload_activations, offload_optimizer
from cxl_offload.integrations.transformers import offload
from cxl_offload.memory import Session
from tests.docs.blocks import make_model

from .ecosystem import needed
from .models import VOCAB, make
from .training_recipes import assert_trains_alike_in_a_tier

POLICIES = {"kv": "bind:2", "weights": "bind:1"}
WORDS = ["a good day for all", "no day is as good as this", "all of this is for a day"]


def test_package_that_is_missing_fails_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXL_OFFLOAD_REQUIRE_ECOSYSTEM", "1")
    for name in ("no_such_package", "torch.no_such_part"):
        with pytest.raises(pytest.fail.Exception, match=f"{name} is not installed"):
            needed(name)
    monkeypatch.delenv("CXL_OFFLOAD_REQUIRE_ECOSYSTEM")
    with pytest.raises(pytest.skip.Exception, match="make test-ecosystem"):
        needed("no_such_package")


def words() -> PreTrainedTokenizerFast:
    known = sorted({word for text in WORDS for word in text.split()})
    ids = {"<unk>": 0, "<pad>": 1, "</s>": 2, **{word: at for at, word in enumerate(known, 3)}}
    made = Tokenizer(WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def tuned(folder: Path, session: Session | None) -> list[float]:
    """Losses of TRL's supervised tuning; with a session states and activations are in its tier."""
    datasets, trl = needed("datasets"), needed("trl")
    torch.manual_seed(0)
    model = make("llama").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = trl.SFTConfig(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, logging_steps=1,
        use_cpu=True, bf16=False, report_to=[], save_strategy="no", disable_tqdm=True,
        max_length=16, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"text": WORDS * 4}),
        processing_class=words(),
        optimizers=(optimizer, None),
    )
    if session is None:
        trainer.train()
    else:
        handle = offload_optimizer(optimizer, "bind:2", session=session)
        with offload_activations("bind:2", min_bytes=1, session=session) as activations:
            trainer.train()
        assert activations.use.copies > 0
        assert session.stats().nodes[2].peak_bytes > 0
        handle.remove()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def test_supervised_tuning_of_trl_learns_alike_with_states_and_activations_in_a_tier(
    tmp_path: Path, session: Session
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock, ours = tuned(tmp_path, None), tuned(tmp_path, session)
    assert len(stock) == 3
    assert stock[-1] != stock[0]
    assert ours == pytest.approx(stock, abs=1e-4)


def test_recipe_of_trl_runs_as_pasted_with_the_losses_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed("datasets"), needed("trl")
    make_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert_trains_alike_in_a_tier("SFTTrainer", monkeypatch)


def local_tasks(folder: Path) -> Any:
    """Two tasks over a file: which of two endings is likelier, and what is generated."""
    tasks = needed("lm_eval.tasks")
    rows = [
        {"text": text.rsplit(" ", 1)[0], "good": text.rsplit(" ", 1)[1], "bad": "no"}
        for text in WORDS
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
doc_to_text: "{{{{text}}}}"
"""
    (folder / "endings.yaml").write_text(
        f"""task: endings{common}output_type: multiple_choice
doc_to_choice: "{{{{[good, bad]}}}}"
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
    )
    (folder / "writes.yaml").write_text(
        f"""task: writes{common}output_type: generate_until
doc_to_target: "{{{{good}}}}"
generation_kwargs: {{until: ["</s>"], max_gen_toks: 5, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
    )
    return tasks.TaskManager(include_path=str(folder), include_defaults=False)


def test_lm_evaluation_harness_says_the_same_of_a_model_in_tiers(
    tmp_path: Path, session: Session
) -> None:
    lm_eval = needed("lm_eval")
    huggingface = needed("lm_eval.models.huggingface")
    manager, model, tokenizer = local_tasks(tmp_path), make("llama"), words()
    assert len(tokenizer) < VOCAB

    def measured() -> Any:
        ran = lm_eval.simple_evaluate(
            model=huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2),
            tasks=["endings", "writes"],
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0,
        )
        return {
            task: [(each["resps"], each["filtered_resps"]) for each in samples]
            for task, samples in ran["samples"].items()
        }

    stock = measured()
    with offload(model, POLICIES, session=session) as done:
        ours = measured()
        assert done.calls.kernel > 0
    assert ours["writes"] == stock["writes"]
    for (one, _), (other, _) in zip(ours["endings"], stock["endings"], strict=True):
        for mine, its in zip(one, other, strict=True):
            assert float(mine[0][0]) == pytest.approx(float(its[0][0]), rel=1e-4)
            assert str(mine[0][1]) == str(its[0][1])
