"""The package's operators over memory that fails: one error that names tensor, bytes and node."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import cxl_offload
from cxl_offload.errors import MemoryLostError
from cxl_offload.memory import Bind, Session, SharedRegion, survive_memory_errors, written_anew
from cxl_offload.ops.linear import linear
from cxl_offload.ops.norm import rms_norm, rms_norm_or_none
from cxl_offload.ops.optimizer import OnePassOptimizer
from tests.memory.failures import lose

PAGE = 4096


@pytest.fixture(autouse=True)
def surviving() -> Iterator[None]:
    with survive_memory_errors(interrupt=False):
        yield


def placed(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = cxl_offload.empty(shape, dtype=dtype, policy="bind:0")
    return tensor.copy_(torch.randn(shape))


def stepped(optimizer: OnePassOptimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()


OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], OnePassOptimizer]] = {
    "adam": lambda params: cxl_offload.CPUAdam(params, policy="bind:0", pages="base"),
    "adagrad": lambda params: cxl_offload.CPUAdagrad(params, policy="bind:0", pages="base"),
    "lion": lambda params: cxl_offload.CPULion(params, policy="bind:0", pages="base"),
    "adam in 8 bits": lambda params: cxl_offload.CPUAdam(
        params, policy="bind:0", pages="base", state_dtype=torch.uint8
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_step_refuses_a_lost_state_and_writes_nothing(kind: str) -> None:
    params = [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(64, 1024))]
    optimizer = OPTIMIZERS[kind](params)
    stepped(optimizer)
    name = next(name for name in optimizer.kept_names if "scales" not in name)
    state = optimizer.state[params[1]][name]
    lose(state.data_ptr() + 2 * PAGE)
    before = [param.detach().clone() for param in params]
    with pytest.raises(MemoryLostError) as raised:
        stepped(optimizer)
    named = rf"bytes 8192 to 12287 of {name.partition('_codes')[0]}.* of parameter 1 \(64, 1024\)"
    assert re.search(named + " on node 0", str(raised.value))
    assert all(torch.equal(was, param) for was, param in zip(before, params, strict=True))
    assert optimizer.state[params[0]]["step"] == 1
    state.zero_()
    written_anew(state.data_ptr(), state.nbytes)
    stepped(optimizer)
    assert optimizer.state[params[1]]["step"] == 2


def test_step_names_a_lost_parameter_as_the_model_does() -> None:
    model = torch.nn.Linear(1024, 64)
    model.weight.data = placed(64, 1024)
    optimizer = cxl_offload.CPUAdam(model.named_parameters(), policy="bind:0")
    lose(model.weight.data_ptr())
    with pytest.raises(MemoryLostError, match=r"bytes 0 to 4095 of parameter 0 \(weight\)"):
        stepped(optimizer)


def test_memory_that_fails_under_the_kernels_is_told_and_the_rest_is_right(tmp_path: Path) -> None:
    values, steps, params = torch.randn(256, 1024), [], []
    region = SharedRegion("states", values.nbytes, root=tmp_path)
    for _ in range(2):
        params.append(torch.nn.Parameter(values.clone()))
        optimizer = cxl_offload.CPUAdam(params[-1:], policy="bind:0", pages="base")
        stepped(optimizer)
        steps.append(optimizer)
    state = torch.frombuffer(region.mapping, dtype=torch.float32, count=values.numel())
    state = state.view_as(values).copy_(steps[1].state[params[1]]["exp_avg"])
    steps[1].state[params[1]]["exp_avg"] = state
    os.ftruncate(region.file, 250 * PAGE)  # the pages behind are gone: a real SIGBUS in the kernels
    stepped(steps[0])
    with pytest.raises(MemoryLostError, match="of exp_avg of parameter 0") as raised:
        stepped(steps[1])
    lost = [row for row in raised.value.losses if row.name.startswith("exp_avg")]
    assert sorted(row.offset for row in lost) == [number * PAGE for number in range(250, 256)]
    right, wrong = params[0].detach().view(-1), params[1].detach().view(-1)
    assert torch.equal(wrong[: 250 * PAGE // 4], right[: 250 * PAGE // 4])
    assert wrong[250 * PAGE // 4 :].isnan().all()
    assert steps[1].state[params[1]]["step"] == 2
    del state, steps, optimizer
    gc.collect()
    region.close()


def test_attention_refuses_lost_keys_that_it_reads_and_no_others() -> None:
    q, out = torch.randn(2, 4, 64), torch.empty(0)
    k, v = placed(2, 4, 128, 64), placed(2, 4, 128, 64)
    out = cxl_offload.decode_attention(q, k, v, lengths=[128, 16])
    lose(k[1, 0, 64].data_ptr())
    again = cxl_offload.decode_attention(q, k, v, lengths=[128, 16])
    assert torch.equal(out[0], again[0])
    with pytest.raises(MemoryLostError, match="on node 0"):
        cxl_offload.decode_attention(q, k, v)


def test_attention_refuses_lost_blocks_of_its_tables_only() -> None:
    q = torch.randn(1, 4, 64)
    k, v = placed(8, 16, 4, 64), placed(8, 16, 4, 64)
    lose(v[5].data_ptr())
    table = torch.tensor([[1, 2, 5]], dtype=torch.int32)
    cxl_offload.decode_attention(q, k, v, block_table=table, lengths=[32])
    with pytest.raises(MemoryLostError):
        cxl_offload.decode_attention(q, k, v, block_table=table, lengths=[33])


@pytest.mark.parametrize("lost", ["weight", "bias", "x"])
def test_linear_refuses_lost_memory(lost: str) -> None:
    given = {"x": placed(4, 1024), "weight": placed(1024, 1024), "bias": placed(1024)}
    linear(given["x"], given["weight"], given["bias"])
    lose(given[lost].data_ptr())
    with pytest.raises(MemoryLostError):
        linear(given["x"], given["weight"], given["bias"])


@pytest.mark.parametrize("lost", ["x", "weight"])
def test_norms_refuse_lost_memory(lost: str) -> None:
    given = {"x": placed(4, 1024), "weight": placed(1024)}
    expected = rms_norm(given["x"], given["weight"], 1e-6)
    lose(placed(1024).data_ptr())
    assert torch.equal(rms_norm(given["x"], given["weight"], 1e-6), expected)
    lose(given[lost].data_ptr())
    for norm in (rms_norm, rms_norm_or_none):
        with pytest.raises(MemoryLostError):
            norm(given["x"], given["weight"], 1e-6)


def test_operators_of_torch_are_interrupted_when_they_return() -> None:
    tensor = placed(1024)

    def sum_up() -> None:
        lose(tensor.data_ptr())
        for _ in range(10):
            tensor.sum()

    with survive_memory_errors(), pytest.raises(MemoryLostError, match="an allocation of 4 KiB"):
        sum_up()
    assert tensor.isnan().all()


def test_simulated_node_is_named() -> None:
    session = Session.simulated(cxl_offload.load_machine("epyc9354-cxl-a"))
    with cxl_offload.use(session):
        param = torch.nn.Parameter(torch.randn(64, 1024))
        optimizer = cxl_offload.CPUAdam([param], policy=Bind((2,)), pages="base")
        stepped(optimizer)
        lose(optimizer.state[param]["exp_avg_sq"].data_ptr())
        with pytest.raises(MemoryLostError, match=r"exp_avg_sq of parameter 0 .* on node 2"):
            stepped(optimizer)
