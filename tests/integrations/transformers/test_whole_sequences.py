"""Caches whose sequences lie on one node each, against caches that are striped."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers import load, offload
from cxl_offload.integrations.transformers.cache import kept_tensors
from cxl_offload.integrations.transformers.conventions import text_config
from cxl_offload.integrations.transformers.fit import KvSizes, kv_needs
from cxl_offload.memory import Session, as_policy

from .models import generate, make, prompts

POLICY = {"kv": "weighted:0=2,2=1@4KiB"}


def nodes_of_rows(cache: Any, session: Session) -> list[list[set[int]]]:
    """For each kept tensor, the nodes of every sequence's bytes, asked from the pages."""
    return [
        [set(session.bytes_per_node(row.data_ptr(), row[0].nbytes * row.shape[0])) for row in each]
        for each in kept_tensors(cache)
    ]


def decoded(model: Any, rows: int, **options: Any) -> tuple[torch.Tensor, Any]:
    made = generate(model, return_dict_in_generate=True, **prompts(rows, 300), **options)
    return made.sequences, made.past_key_values


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_every_sequence_is_on_one_node_and_tokens_stay(family: str, session: Session) -> None:
    model = make(family)
    if family == "gemma2":
        model.set_attn_implementation("eager")
    stock, _ = decoded(model, 6, max_new_tokens=4)
    with offload(model, POLICY, whole_sequences=True, session=session) as done:
        tokens, cache = decoded(model, 6, max_new_tokens=4)
        assert done.calls.kernel > 0
    assert torch.equal(tokens, stock)
    for rows in nodes_of_rows(cache, session):
        assert all(len(nodes) == 1 for nodes in rows)
        assert Counter(min(nodes) for nodes in rows) == {0: 4, 2: 2}


def test_striped_cache_has_its_sequences_on_all_nodes(session: Session) -> None:
    model = make("llama")
    with offload(model, POLICY, session=session):
        _, cache = decoded(model, 6, max_new_tokens=4)
    assert all(nodes == {0, 2} for rows in nodes_of_rows(cache, session) for nodes in rows)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"cache_implementation": "static"},
        {"kv_dtype": torch.float8_e4m3fn},
        {"kv_dtype": "int4"},
        {"rows_at_once": 2},
    ],
    ids=str,
)
def test_whatever_is_kept_gives_the_tokens_of_a_striped_cache(
    options: dict[str, Any], session: Session
) -> None:
    model = make("llama")
    kept = {key: options[key] for key in ("kv_dtype", "rows_at_once") if key in options}
    asked = {key: given for key, given in options.items() if key not in kept}
    with offload(model, POLICY, session=session, **kept):
        striped = generate(model, **asked)
    with offload(model, POLICY, whole_sequences=True, session=session, **kept):
        whole = generate(model, **asked)
    assert torch.equal(whole, striped)


def test_kept_cache_goes_on_and_its_copy_too(session: Session) -> None:
    """Room grows, rows are chosen, and both still have every sequence on one node."""
    model = make("llama")
    with offload(model, POLICY, whole_sequences=True, session=session), torch.no_grad():
        cache = DynamicCache(config=model.config)
        ids = prompts(4, 200)["input_ids"]
        model(ids, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([3, 0]))
        model(ids[:2, :100], past_key_values=cache)
        logits = model(ids[:2, :1], past_key_values=cache).logits
    expected = model(torch.cat([ids[[3, 0]], ids[:2, :100], ids[:2, :1]], dim=1)).logits[:, -1:]
    assert torch.allclose(logits, expected, atol=1e-3)
    for rows in nodes_of_rows(cache, session):
        assert all(len(nodes) == 1 for nodes in rows)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_what_a_run_needs_is_what_it_takes(family: str, session: Session, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path)
    model = load(tmp_path, {"norm": "bind:1"}, session=session)
    policy = as_policy(POLICY["kv"], session.machine)
    sizes = KvSizes(rows=5, positions=303)
    needs = kv_needs(text_config(model), torch.float32, policy, sizes, whole_sequences=True)
    with offload(model, POLICY, whole_sequences=True, session=session) as done:
        decoded(model, 5, max_new_tokens=4)
        taken = done.store.use()["kv", "host"].peak_bytes
    least = sum(need.nbytes * need.count for need in needs)
    # Windows keep an eighth of room beside them, and at least 64 positions.
    assert least == taken if family == "llama" else least <= taken


def test_whole_sequences_without_a_policy_of_kv_are_refused(session: Session) -> None:
    with pytest.raises(ConfigError, match="whole_sequences needs the cache in tiers"):
        offload(make("llama"), {"norm": "bind:1"}, whole_sequences=True, session=session)


def test_whole_sequences_of_a_policy_that_divides_none_are_refused(session: Session) -> None:
    with pytest.raises(ConfigError, match="whole_sequences: kv=bind:1 divides no sequence"):
        offload(make("llama"), {"kv": "bind:1"}, whole_sequences=True, session=session)
