"""Text and tokens without a hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.flexgen import FlexGenRun, run
from cxl_offload.integrations.flexgen.tokens import (
    ByteTokenizer,
    load_tokenizer,
    pad_prompts,
)
from cxl_offload.memory import Session


@given(st.text())
def test_bytes_come_back_as_the_text_they_were(text: str) -> None:
    tokens = ByteTokenizer().encode(text)

    assert tokens[0] == 2
    assert all(4 <= token < 260 for token in tokens[1:])
    assert ByteTokenizer().decode(tokens) == text


def test_tokens_that_are_no_text_are_shown() -> None:
    assert ByteTokenizer().decode([2, 4 + 0x68, 4 + 0x69, 300, 4 + 0xFF, 1]) == "hi<300>\\xff"


def _write_tokenizer(folder: Path) -> None:
    words = {"<unk>": 0, "<pad>": 1, "</s>": 2, "memory": 3, "tiers": 4}
    raw = RawTokenizer(WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')


def test_tokenizer_files_of_the_folder_are_used(tmp_path: Path) -> None:
    _write_tokenizer(tmp_path)

    tokenizer = load_tokenizer(tmp_path, vocab_size=5)

    assert tokenizer.encode("memory tiers") == [3, 4]
    assert tokenizer.decode([3, 4]) == "memory tiers"


def test_damaged_tokenizer_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")

    with pytest.raises(ConfigError, match="tokenizer cannot be read") as refused:
        load_tokenizer(tmp_path, vocab_size=272)

    assert "\n" not in str(refused.value)


def test_vocabulary_too_small_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="259"):
        load_tokenizer(tmp_path, vocab_size=259)
    assert isinstance(load_tokenizer(tmp_path, vocab_size=260), ByteTokenizer)


def test_prompts_are_padded_on_the_left() -> None:
    rows = pad_prompts([[5, 6], [7]], 3, pad=1, vocab_size=10)

    assert rows.tolist() == [[1, 5, 6], [1, 1, 7]]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [([[5, 6, 7]], "3 tokens"), ([[]], "prompt 1 is empty"), ([[5], [10]], "token 10")],
)
def test_prompts_that_do_not_fit_are_refused(prompts: list[list[int]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pad_prompts(prompts, 2, pad=1, vocab_size=10)


def test_tokenizer_of_another_folder_is_used_when_named(
    tiny: Path, session: Session, tmp_path: Path
) -> None:
    _write_tokenizer(tmp_path)
    request = FlexGenRun(
        model=str(tiny),
        prompts=("memory", "tiers"),
        gpu_batch_size=2,
        gen_len=2,
        tokenizer=str(tmp_path),
    )

    named = run(request, session=session)
    of_bytes = run(replace(request, tokenizer=None), session=session)

    assert named.tokens[:, 0].tolist() == [3, 4]
    assert named.notes == ()
    assert of_bytes.tokens[0, :2].tolist() == [2, 4 + ord("m")]
    assert "a byte" in of_bytes.notes[0]
    with pytest.raises(ConfigError, match="--tokenizer"):
        run(replace(request, tokenizer=str(tiny)), session=session)
