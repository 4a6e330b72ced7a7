"""Peers of bench_attention: compared with float64, and missing ones are named with the reason."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import attention_peers, bench_attention, ggml_attention, vllm_attention
from benchmarks.measurements import Ratio
from benchmarks.results import UNCOMPRESSED, rows_of

needs_llama_cpp = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)


def made(dtype: torch.dtype, *, queries: int = 3) -> tuple[torch.Tensor, ...]:
    """A query a head, K and V: two sequences, three heads of K and V, 37 positions of 64."""
    source = torch.Generator().manual_seed(5)
    k, v = (torch.randn(2, 3, 37, 64, generator=source).to(dtype) for _ in "kv")
    return torch.randn(2, queries, 64, generator=source).to(dtype), k, v


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """In float64, written out."""
    share = q.shape[1] // k.shape[1]
    k, v = (each.double().repeat_interleave(share, dim=1) for each in (k, v))
    scores = torch.einsum("bhd,bhsd->bhs", q.double(), k) * q.shape[2] ** -0.5
    return torch.einsum("bhs,bhsd->bhd", scores.softmax(dim=2), v)


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@needs_llama_cpp
@pytest.mark.parametrize("dtype", ggml_attention.TYPES)
@pytest.mark.parametrize("queries", [3, 6])
def test_llama_cpp_attends_as_float64_does(dtype: torch.dtype, queries: int) -> None:
    q, k, v = made(dtype, queries=queries)
    attend = ggml_attention.Attention(q, k, v, threads=2)
    assert off(attend(), expected(q, k, v)) <= ggml_attention.tolerance(k)
    v[1, 2, 36] += 64  # it reads the cache where it lies: another value, another result
    assert off(attend(), expected(q, k, v)) <= ggml_attention.tolerance(k)


@needs_llama_cpp
def test_llama_cpp_refuses_a_cache_with_strides_of_its_own() -> None:
    q, k, v = made(torch.float16)
    with pytest.raises(ValueError, match="contiguous"):
        ggml_attention.Attention(q, k.transpose(2, 3).contiguous().transpose(2, 3), v, threads=1)


@needs_llama_cpp
def test_llama_cpp_says_which_type_it_does_not_have() -> None:
    assert "float64" in ggml_attention.why_not(made(torch.float64)[1])


def test_a_peer_that_is_not_installed_is_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    attends, left_out = attention_peers.peers_of(["llama.cpp", "vLLM"], *made(torch.float16), 1)
    assert not attends
    assert left_out == {
        "llama.cpp": "llama-cpp-python is not installed",
        "vLLM": "vllm is not installed",
    }
    assert attention_peers.peers_of(["torch SDPA"], *made(torch.float16), 1) == ({}, {})


def test_a_package_without_its_library_is_left_out_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)  # where the package is installed
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    reason = ggml_attention.why_not(made(torch.float16)[1])
    assert "libggml.so" in reason
    assert "interface" in reason


def test_vllm_wants_the_threads_of_torch() -> None:
    with pytest.raises(ValueError, match="threads: torch has"):
        vllm_attention.Attention(*made(torch.float16), threads=torch.get_num_threads() + 1)


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Any:
    """The document of a quick run."""
    file = folder / "attention.json"
    size = ["--batch", "1", "--heads", "2", "--seq", "40", "--dim", "64", "--rounds", "2"]
    threads = torch.get_num_threads()
    asked = [*size, "--dtypes", "fp16", "--json", str(file), *options]
    monkeypatch.setattr(sys, "argv", ["bench_attention", *asked])
    try:
        assert bench_attention.main() in (0, 1)  # such a small run may miss its bars
    finally:
        torch.set_num_threads(threads)
    return json.loads(file.read_text())


def test_a_run_of_some_peers_has_their_rows_and_no_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = run(tmp_path, monkeypatch, "--peers", "torch SDPA")
    assert document["peers"] == ["torch SDPA"]
    assert list(document["cases"]["fp16"]) == [
        *("read bound", bench_attention.OURS, bench_attention.OURS_FLEXGEN, "torch SDPA"),
    ]
    assert [row.beside for row in rows_of("attention", document)] == ["torch SDPA"]


def test_a_whole_run_has_every_peer_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = run(tmp_path, monkeypatch)
    rows = rows_of("attention", document)
    beside = {row.beside for row in rows}
    told = capsys.readouterr().out
    assert {"torch SDPA", "FlexGen's path", "read bound"} <= beside
    for peer in attention_peers.MODULES:
        reason = document["left_out"]["fp16"].get(peer)
        assert (peer in beside) == (reason is None)
        assert (f"{peer} is left out: {reason}" in told) == (reason is not None)
    for layout in ("4-bit", "4-bit, FlexGen's layout"):
        case = f"fp16: this, {layout}"
        assert {row.beside for row in rows if row.case == case} == {"read bound", UNCOMPRESSED}
    for row in rows:
        if row.beside == UNCOMPRESSED:
            name = row.case.removeprefix("fp16: ")
            assert row.ratio == document["cases"]["fp16"][name]["over_ours"]["median"]


def test_a_contender_that_is_wrong_ends_the_benchmark() -> None:
    q, k, v = made(torch.float16)
    inputs = bench_attention.Inputs(q, k, v, k, v, {})
    right = expected(q, k, v)
    for name in bench_attention.PEERS:
        bench_attention.check(name, lambda: right, inputs)
        with pytest.raises(SystemExit, match="wrong by"):
            bench_attention.check(name, lambda: right * 1.1, inputs)


def test_a_cache_in_fewer_bits_is_compared_with_the_same_one_in_all_of_them() -> None:
    share = {"of_bound": vars(Ratio(0.5, 0.4, 0.6))}
    four = {"this, 4-bit": share | {"over_ours": vars(Ratio(0.9, 0.8, 0.95))}}
    bound, beside = rows_of("attention", {"cases": {"fp16": four}})
    assert (bound.beside, bound.ratio) == ("read bound", 0.5)
    assert (beside.beside, beside.ratio, beside.low) == (UNCOMPRESSED, 0.9, 0.8)
    assert not beside.slower  # than a peer: it stands beside this package itself


def test_peers_of_other_projects_have_rows_in_the_results() -> None:
    ratio = {"of_bound": vars(Ratio(0.5, 0.4, 0.6)), "ours_over_it": vars(Ratio(2.0, 1.9, 2.1))}
    document = {"cases": {"bf16": dict.fromkeys(("read bound", "llama.cpp", "vLLM"), ratio)}}
    rows = rows_of("attention", document)
    assert [(row.beside, row.ratio) for row in rows] == [("llama.cpp", 2.0), ("vLLM", 2.0)]
