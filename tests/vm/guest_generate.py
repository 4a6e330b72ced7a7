"""Inside a machine with a small near node: generate() with a model that does not fit there."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cxl_offload.integrations.transformers import load, offload
from cxl_offload.integrations.transformers.cache import kept_tensors
from cxl_offload.memory import Session
from tests.integrations.transformers.models import VOCAB, generate, make
from tests.placement.kernel_calls import PAGE, oom_kills, page_nodes
from tests.vm.harness.machine import load as load_machine

SPEC = load_machine(os.environ["CXL_OFFLOAD_TEST_MACHINE"])
NEAR, FAR = SPEC.node_ids
COPIES = 3_125
"""Of the tiny model's words: embedding and head, 195 MiB each, are more than the near node."""


@pytest.fixture(autouse=True)
def nobody_killed() -> Iterator[None]:
    torch.set_num_threads(1)  # every instruction is emulated, those of waiting threads too
    before = oom_kills()
    yield
    assert oom_kills() == before, "the kernel killed a process"


def wide_model() -> PreTrainedModel:
    """The tiny LLaMA with more weights than the near node has memory; new words lose to old ones.

    Random numbers for all of them would take minutes here.
    """
    model = make("llama")
    with torch.no_grad():
        for layer in (model.model.embed_tokens, model.lm_head):
            words = layer.weight.repeat(COPIES, 1)
            words[VOCAB:] *= 0.5
            layer.weight = torch.nn.Parameter(words)
    model.config.vocab_size = VOCAB * COPIES
    return model


def answered(model: PreTrainedModel, **options: Any) -> Any:
    return generate(model, max_new_tokens=4, **options)


def pages_by_node(tensors: Iterable[torch.Tensor]) -> Counter[int]:
    """Where the kernel says that the pages are which these tensors touch."""
    found: Counter[int] = Counter()
    for tensor in tensors:
        first = tensor.data_ptr() // PAGE * PAGE
        found.update(page_nodes(first, tensor.data_ptr() + tensor.nbytes - first))
    return found


def test_model_larger_than_the_near_node_generates_with_the_rest_on_the_far_one(
    tmp_path: Path,
) -> None:
    stock = wide_model()
    total = sum(weight.nbytes for weight in stock.parameters())
    assert total > SPEC.node(NEAR).memory_bytes
    stock.save_pretrained(tmp_path)
    expected, settings = answered(stock), stock.generation_config
    del stock
    gc.collect()
    session = Session.linux()
    with pytest.raises(MemoryError, match=f"node {NEAR}"):
        load(tmp_path, {"weights": f"bind:{NEAR}"}, session=session)
    gc.collect()
    assert session.stats().asked_bytes.current == 0
    place = {"weights": f"bind:{FAR}", "attention": f"bind:{NEAR}", "mlp": f"bind:{NEAR}"}
    model = load(tmp_path, place, session=session)
    model.generation_config = settings
    assert set(pages_by_node(model.model.layers[0].mlp.parameters())) == {NEAR}
    assert set(pages_by_node(model.model.layers[1].self_attn.parameters())) == {NEAR}
    assert set(pages_by_node([model.lm_head.weight, model.model.embed_tokens.weight])) == {FAR}
    pages = pages_by_node(model.parameters())
    assert pages.total() * PAGE >= total
    with offload(model, {"kv": f"bind:{FAR}"}, session=session) as done:
        made = answered(model, return_dict_in_generate=True)
        assert set(pages_by_node(kept_tensors(made.past_key_values))) == {FAR}
        assert done.calls.kernel > 0
    assert torch.equal(made.sequences, expected)
    assert pages_by_node(model.parameters()) == pages


def test_damaged_weight_on_the_far_node_changes_the_tokens(tmp_path: Path) -> None:
    stock = make("llama")
    stock.save_pretrained(tmp_path)
    expected = generate(stock)
    model = load(tmp_path, {"weights": f"bind:{FAR}"}, session=Session.linux())
    model.generation_config = stock.generation_config
    assert set(pages_by_node(model.parameters())) == {FAR}
    assert torch.equal(generate(model), expected)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.neg_()
    assert not torch.equal(generate(model), expected)
