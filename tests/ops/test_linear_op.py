"""The operator that torch compiles."""

from __future__ import annotations

import pytest
import torch

from cxl_offload.ops import linear_op
from cxl_offload.ops.int4_weight import int4_quantized
from cxl_offload.ops.linear import linear

OP = linear_op.linear


def test_operator_compiles_without_a_break() -> None:
    x, weight, bias = torch.randn(3, 64), torch.randn(10, 64).half(), torch.randn(10)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.cxl_offload.linear(x * 2, weight, bias).relu()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), linear(x * 2, weight, bias).relu())


WEIGHTS: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {
    "bf16": (torch.randn(10, 64).bfloat16(), None),
    "fp32": (torch.randn(10, 64), None),
    "fp8": (torch.randn(10, 64).to(torch.float8_e4m3fn), torch.rand(10) + 0.5),
    "int8": (torch.randint(-127, 128, (10, 64), dtype=torch.int8), torch.rand(10) + 0.5),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_operator_compiles_with_every_type_of_weights(name: str) -> None:
    x, bias = torch.randn(3, 64), torch.randn(10)
    weight, scale = WEIGHTS[name]

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.cxl_offload.linear(x * 2, weight, bias, scale).relu()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), linear(x * 2, weight, bias, scale=scale).relu())


def test_operator_compiles_with_codes_of_4_bits() -> None:
    x, codes = torch.randn(3, 64), int4_quantized(torch.randn(10, 64))

    def layer(x: torch.Tensor) -> torch.Tensor:
        made = torch.ops.cxl_offload.linear(
            x * 2, codes.codes, None, None, codes.groups, codes.form, torch.float32
        )
        return made.relu()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), linear(x * 2, codes, out_dtype=torch.float32).relu())


def test_operator_keeps_the_contract_of_torch_operators() -> None:
    codes = int4_quantized(torch.randn(10, 64))
    x = torch.randn(2, 3, 64)
    torch.library.opcheck(OP, (x, torch.randn(10, 64), torch.randn(10)))
    given = (x, codes.codes, None, None, codes.groups, codes.form, torch.bfloat16)
    torch.library.opcheck(OP, given)
    assert torch.equal(OP(*given), linear(x, codes, out_dtype=torch.bfloat16))


def test_operator_refuses_codes_without_groups() -> None:
    codes = int4_quantized(torch.randn(10, 64))
    with pytest.raises(ValueError, match="groups"):
        OP(torch.randn(2, 64), codes.codes)
    with pytest.raises(ValueError, match="form"):
        OP(torch.randn(2, 64), codes.codes, None, None, codes.groups, "step")
