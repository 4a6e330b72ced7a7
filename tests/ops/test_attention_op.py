"""The operator that torch compiles."""

from __future__ import annotations

import pytest
import torch

from cxl_offload.ops.attention import decode_attention, from_flexgen
from cxl_offload.ops.attention_op import decode_attention as operator
from cxl_offload.ops.int4_cache import int4_from_flexgen


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    caches = [torch.randn(90, 6, 16, generator=source).bfloat16() for _ in "kv"]
    q = torch.randn(2, 6, 16, generator=source).bfloat16()
    return q, from_flexgen(caches[0], 2)[:, :3], from_flexgen(caches[1], 2)[:, :3]


@pytest.mark.parametrize("ragged", [False, True])
def test_operator_passes_checks_of_torch(ragged: bool) -> None:
    lengths = torch.tensor([5, 90]) if ragged else None
    torch.library.opcheck(operator, (*inputs(), lengths))


def test_compiled_model_keeps_one_graph_and_the_same_bits() -> None:
    q, k, v = inputs()

    def layer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        return torch.ops.cxl_offload.decode_attention(q * 2, k, v, lengths, window=40) + 1

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for lengths in ([5, 90], [90, 0]):
        expected = decode_attention(q * 2, k, v, lengths=lengths, window=40) + 1
        assert torch.equal(compiled(q, k, v, torch.tensor(lengths)), expected)


def test_operator_takes_8_bit_caches_with_their_scales() -> None:
    q, k, v = inputs()
    caches = [cache.to(torch.float8_e4m3fn) for cache in (k, v)]
    scales = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor([1.0, 2.0, 3.0])}
    # Its test of mutation multiplies the inputs, which torch cannot do with these types.
    torch.library.opcheck(operator, (q, *caches), scales, test_utils="test_faketensor")
    assert torch.equal(operator(q, *caches, **scales), decode_attention(q, *caches, **scales))


def codes() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    made = torch.randint(0, 256, (90, 2 * 3, 32), generator=source, dtype=torch.uint8)
    return made, (torch.rand(90, 2 * 3, 1, 2, generator=source) + 0.5).half()


def test_compiled_model_takes_4_bit_caches() -> None:
    q = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0))
    keys, values = (int4_from_flexgen(*codes(), 2) for _ in "kv")
    lengths = torch.tensor([5, 90])
    given = (q, keys.codes, values.codes, lengths)
    scales = {"k_groups": keys.scales, "v_groups": values.scales, "form": keys.form}
    torch.library.opcheck(operator, given, scales)

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.ops.cxl_offload.decode_attention(*tensors, **scales) + 1

    expected = decode_attention(q, keys, values, lengths=lengths) + 1
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given), expected)


def test_operator_refuses_codes_and_scales_that_do_not_belong_together() -> None:
    q, k, v = inputs()
    keys = int4_from_flexgen(*codes(), 2)
    with pytest.raises(ValueError, match=r"k of torch\.uint8"):
        operator(q, keys.codes, keys.codes)
    with pytest.raises(ValueError, match=r"v of torch\.bfloat16"):
        operator(q, k, v, v_groups=keys.scales)
    with pytest.raises(ValueError, match="form 'step'"):
        operator(q, keys.codes, keys.codes, k_groups=keys.scales, v_groups=keys.scales, form="step")
