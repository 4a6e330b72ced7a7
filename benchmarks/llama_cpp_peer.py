"""llama.cpp beside ours at batch 1: the same random weights, written as a GGUF file.

Needs ``gguf`` and ``llama-cpp-python``; :func:`missing` says which of them is not there.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from benchmarks.llama_shape import Pace, decode_seconds, in_turns, make_model, random_ids
from benchmarks.measurements import paired_ratio
from cxl_offload.integrations.transformers import offload

PROMPTS = (32, 512)
TYPES = ("bf16", "f16")
MOST_ERROR = 0.05
"""Of logits, as a share of their deviation: types differ, and so does the order of sums."""

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHER_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def missing() -> str:
    """The packages that are not installed; empty where all are."""
    modules = {"gguf": "gguf", "llama_cpp": "llama-cpp-python"}
    return " and ".join(
        package for module, package in modules.items() if importlib.util.find_spec(module) is None
    )


def gguf_name(name: str) -> str:
    """What llama.cpp calls a weight of a LLaMA."""
    stem = name.removesuffix(".weight")
    if stem in _OTHER_NAMES:
        return f"{_OTHER_NAMES[stem]}.weight"
    number, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_LAYER_NAMES[part]}.weight"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a head in llama.cpp's order: it turns pairs of neighbours, transformers halves."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def write_gguf(model: LlamaForCausalLM, path: Path, kind: str) -> None:
    """The model with matrices of a type of llama.cpp's, and words that mean nothing."""
    import gguf

    numbers = gguf.GGMLQuantizationType[kind.upper()]
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_words(writer, config.vocab_size)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        turned = next((count for part, count in heads.items() if f".{part}." in name), None)
        if turned is not None:
            weight = interleaved(weight, turned)
        kept = gguf.GGMLQuantizationType.F32 if weight.dim() == 1 else numbers
        codes = gguf.quants.quantize(weight.float().numpy(), kept)
        writer.add_tensor(gguf_name(name), codes, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_words(writer: Any, count: int) -> None:
    """A vocabulary as llama.cpp wants one: three special words, all bytes, then numbers."""
    import gguf

    kind = gguf.TokenType
    special = {"<unk>": kind.UNKNOWN, "<s>": kind.CONTROL, "</s>": kind.CONTROL}
    bytes_ = {f"<0x{byte:02X}>": kind.BYTE for byte in range(256)}
    words = {**special, **bytes_}
    words |= {f"w{number}": kind.NORMAL for number in range(len(words), count)}
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(words)[:count])
    writer.add_token_scores([0.0] * count)
    writer.add_token_types(list(words.values())[:count])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def _check(model: LlamaForCausalLM, llama: Any) -> None:
    """The logits after a prompt are alike."""
    import llama_cpp

    ids = random_ids(1, 40)
    llama.reset()
    llama.eval(ids[0].tolist())
    last = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
    found = torch.from_numpy(np.ctypeslib.as_array(last, shape=(llama.n_vocab(),)).copy())
    with torch.no_grad():
        expected = model(ids).logits[0, -1].float()
    error = float((found - expected).norm() / expected.norm())
    if not error <= MOST_ERROR:
        raise SystemExit(f"wrong: llama.cpp's logits differ from ours by {error:.1%}")


def _llama_seconds(llama: Any, prompt: list[int], new: int, pace: Pace) -> float:
    """Of a decode step."""
    llama.reset()
    times = []
    for _ in llama.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0):
        times.append(pace.now())
        if len(times) == new:
            break
    return (times[-1] - times[0]) / (new - 1)


def _loaded(path: Path) -> Any:
    from llama_cpp import Llama

    return Llama(
        str(path),
        n_ctx=max(PROMPTS) + 128,
        n_threads=torch.get_num_threads(),
        n_threads_batch=torch.get_num_threads(),
        verbose=False,
    )


def compare(args: argparse.Namespace, pace: Pace) -> Iterator[dict[str, Any]]:
    """A row for each type of llama.cpp's weights and each prompt; ours are bfloat16."""
    model = make_model(args, args.heads)
    for kind in TYPES:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(model, path, kind)
            llama = _loaded(path)
            _check(model, llama)
            for prompt in PROMPTS:
                yield {"weights": kind, "prompt": prompt, **_row(model, llama, prompt, args, pace)}
            llama.close()


def _row(
    model: LlamaForCausalLM, llama: Any, prompt: int, args: argparse.Namespace, pace: Pace
) -> dict[str, Any]:
    ids = random_ids(1, prompt)

    def in_tiers() -> AbstractContextManager[Any]:
        return offload(model, {"kv": args.policy}, linear_rows=args.linear_rows)

    samples = in_turns(
        {
            "llama_cpp": lambda: _llama_seconds(llama, ids[0].tolist(), args.new, pace),
            "ours": lambda: decode_seconds(model, in_tiers, ids, args.new, pace.now),
        },
        pace,
    )
    ratio = paired_ratio(samples["llama_cpp"], samples["ours"])
    all_bytes = sum(weight.nbytes for weight in model.parameters())
    read = all_bytes - model.model.embed_tokens.weight.nbytes  # of that a row is
    seconds = {name: statistics.median(each) for name, each in samples.items()}
    return {
        "tokens_per_s": {name: 1 / each for name, each in seconds.items()},
        "weight_bytes_per_s": {name: read / each for name, each in seconds.items()},
        "ratio": [ratio.median, ratio.low, ratio.high],
    }
