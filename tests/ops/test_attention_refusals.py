"""What no attention can be asked for is refused by its name, before anything is computed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from cxl_offload.ops.attention import combine, decode_attention, decode_attention_partial
from cxl_offload.ops.int4_cache import Int4Cache


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = draw(2, 4, 64), draw(2, 4, 9, 64, seed=1), draw(2, 4, 9, 64, seed=2)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"window": 2.5}, TypeError, r"^window 2\.5 is no integer"),
        ({"window": "x"}, TypeError, r"^window 'x' is no integer"),
        ({"scale": "x"}, TypeError, "^scale 'x' is no number"),
        ({"scale": [1.0]}, TypeError, "^scale .* is no number"),
        ({"scale": 1e300}, ValueError, "the scale is not finite in float32"),
        ({"soft_cap": "x"}, TypeError, "^soft_cap 'x' is no number"),
        ({"soft_cap": 1e-46}, ValueError, "soft_cap 1e-46; give a positive number that float32"),
        ({"soft_cap": 1e300}, ValueError, "soft_cap 1e.300; give a positive number that float32"),
        ({"causal": "no"}, TypeError, "^causal 'no' is neither True nor False"),
        ({"lengths": [2**64, 1]}, ValueError, "^lengths must be whole numbers of positions"),
        ({"lengths": [1, 2.0]}, ValueError, "^lengths must be whole numbers of positions"),
        ({"block_table": [[0]], "lengths": [1, 1]}, TypeError, "^block_table is a list; pass a"),
        ({"mask": [True]}, TypeError, "^mask is a list; pass a"),
    ],
    ids=str,
)
def test_argument_that_is_none_is_named(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as told:
        decode_attention(Q, K, V, **options)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("form", ["rate,low", "zero, step", "", None, 5], ids=repr)
def test_codes_of_a_form_that_there_is_not_are_refused(form: Any) -> None:
    codes = torch.zeros(2, 4, 9, 32, dtype=torch.uint8)
    cache = Int4Cache(codes, torch.ones(2, 4, 9, 1, 2).half(), form)
    with pytest.raises(ValueError, match=r"^form .*; it is one of 'low, step', 'rate, low'"):
        decode_attention(Q, cache, cache)


def test_least_cap_and_longest_window_are_taken() -> None:
    least = decode_attention(Q, K, V, soft_cap=1e-45)
    torch.testing.assert_close(least, V.mean(2), rtol=0, atol=1e-6)
    assert torch.equal(decode_attention(Q, K, V, window=2**70), decode_attention(Q, K, V))


def test_parts_may_come_from_a_generator() -> None:
    cuts = ((0, 4), (4, 9))
    parts = (decode_attention_partial(Q, K[:, :, a:b], V[:, :, a:b]) for a, b in cuts)
    torch.testing.assert_close(combine(parts).out, decode_attention(Q, K, V))  # type: ignore[arg-type]


CHANGED_TABLE = """
import threading
import torch
from cxl_offload.ops.attention import decode_attention

q, cache = torch.randn(2, 4, 64), torch.randn(200, 16, 2, 64)
table = torch.randint(0, 200, (2, 200), dtype=torch.int32)
good, done = table.clone(), threading.Event()

def flip():
    while not done.is_set():
        table.fill_(2**30)
        table.copy_(good)

other = threading.Thread(target=flip)
other.start()
computed = refused = 0
while computed < 400:
    try:
        found = decode_attention(q, cache, cache, block_table=table, lengths=[3200, 3200])
        assert torch.isfinite(found).all()
        computed += 1
    except ValueError:
        refused += 1
done.set()
other.join()
print(computed, refused)
"""


def test_table_that_another_thread_writes_is_read_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHANGED_TABLE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    computed, refused = map(int, done.stdout.split())
    assert computed == 400
    assert refused > 0, "the check never met the other thread's entries"
