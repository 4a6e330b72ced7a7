"""One step of Adam against fp64, against torch, and against itself on other threads and ISAs."""

from __future__ import annotations

import itertools
import os
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cxl_offload import _C
from cxl_offload.ops.adam import adam_step

from . import oracle
from .oracle import Settings, close, f64
from .tensors import BF16, F16, F32, FLOATS, STATES, Inputs, bits, draw, same_bits

ISAS = _C.supported_isas()
COMBINATIONS = [
    (param, grad, state, copy)
    for param, grad, state in itertools.product(FLOATS, FLOATS, STATES)
    for copy in ((None, BF16, F16) if param is F32 else (None,))
]


def run(inputs: Inputs, s: Settings, *, isa: str | None = None, threads: int = 1) -> None:
    adam_step(
        inputs.param,
        inputs.grad,
        inputs.exp_avg,
        inputs.exp_avg_sq,
        low_precision_copy=inputs.copy,
        isa=isa,
        threads=threads,
        **asdict(s),
    )


def check(inputs: Inputs, s: Settings, *, isa: str | None = None, threads: int = 1) -> None:
    """Runs a step and compares everything that it may and may not have written."""
    before = [f64(tensor) for tensor in inputs.all()[:4]]
    grad = bits(inputs.grad)
    run(inputs, s, isa=isa, threads=threads)
    param, mean, square = oracle.adam(*before, s)
    close(inputs.param, param)
    close(inputs.exp_avg, mean)
    close(inputs.exp_avg_sq, square)
    assert bits(inputs.grad) == grad
    if inputs.copy is not None:
        assert bits(inputs.copy) == bits(inputs.param.to(inputs.copy.dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "s",
    [
        Settings(),
        Settings(step=1, lr=1e-3, weight_decay=0.1),
        Settings(step=1000, weight_decay=0.1, adamw=False, grad_scale=1 / 1024),
        Settings(betas=(0.0, 0.0), eps=1e-3, bias_correction=False),
    ],
    ids=["plain", "first-adamw", "late-l2-scaled", "no-memory"],
)
def test_step_matches_fp64_for_every_type(isa: str, s: Settings) -> None:
    for param, grad, state, copy in COMBINATIONS:
        check(draw(77, param=param, grad=grad, state=state, copy=copy), s, isa=isa)


@settings(max_examples=150, deadline=None)
@given(
    numel=st.one_of(st.integers(0, 130), st.sampled_from([1023, 4097])),
    types=st.sampled_from(COMBINATIONS),
    offsets=st.tuples(*[st.integers(0, 33)] * 4),
    isa=st.sampled_from(ISAS),
    s=st.builds(
        Settings,
        step=st.integers(1, 10_000),
        lr=st.floats(0, 1),
        betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.9999)),
        eps=st.sampled_from([1e-12, 1e-8, 1e-3]),
        weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
        adamw=st.booleans(),
        grad_scale=st.sampled_from([1.0, 0.3, 2.0**-16, -1.0, 0.0]),
        bias_correction=st.booleans(),
    ),
    seed=st.integers(0, 2**31),
)
def test_step_matches_fp64_at_any_size_and_alignment(
    numel: int,
    types: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None],
    offsets: tuple[int, int, int, int],
    isa: str,
    s: Settings,
    seed: int,
) -> None:
    param, grad, state, copy = types
    inputs = draw(numel, param=param, grad=grad, state=state, copy=copy, offsets=offsets, seed=seed)
    check(inputs, s, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
def test_step_writes_nothing_beside_its_elements(isa: str) -> None:
    for numel, offset in itertools.product((0, 1, 31, 32, 33, 65), (0, 1, 7)):
        bases = [torch.full((numel + 64,), 3.0) for _ in range(4)]
        views = [base[offset : offset + numel] for base in bases]
        adam_step(*views, step=1, lr=0.1, isa=isa)
        for base in bases:
            assert (base[:offset] == 3).all()
            assert (base[offset + numel :] == 3).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("which", range(4), ids=["param", "grad", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("adamw", [True, False])
def test_step_spreads_what_is_not_finite_as_fp64_does(isa: str, which: int, adamw: bool) -> None:
    inputs = draw(80)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    inputs.all()[which][5:70:13] = odd
    if which == 3:
        inputs.exp_avg_sq[3] = -1.0  # no square is: its root is not a number
    check(inputs, Settings(weight_decay=0.1, adamw=adamw), isa=isa)


def test_step_ignores_infinite_parameter_in_gradient_without_weight_decay() -> None:
    """0 * inf would make a NaN of the moments."""
    inputs = draw(8)
    inputs.param[2] = float("inf")
    run(inputs, Settings(weight_decay=0.0, adamw=False))
    assert inputs.exp_avg.isfinite().all()
    assert inputs.exp_avg_sq.isfinite().all()


@pytest.mark.parametrize("types", COMBINATIONS, ids=str)
def test_every_instruction_set_gives_the_same_bits(
    types: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype | None],
) -> None:
    param, grad, state, copy = types
    start = draw(1000, param=param, grad=grad, state=state, copy=copy)
    # Every order of magnitude, subnormal numbers included, and what is not finite.
    wide = torch.logspace(-45, 38, 990).to(F32) * torch.where(torch.arange(990) % 2 == 0, 1, -1)
    start.param[:990] = wide.to(param)
    start.grad[5:995] = wide.flip(0).to(grad)
    start.exp_avg[3:993] = wide.to(state)
    start.exp_avg_sq[8:998] = wide.abs().to(state)
    start.grad[7] = float("nan")
    for s in (Settings(weight_decay=0.1), Settings(weight_decay=0.1, adamw=False, eps=0.0)):
        results = []
        for isa in ISAS:
            inputs = start.clone()
            run(inputs, s, isa=isa)
            results.append(inputs)
        assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("offset", [0, 1, 13])
def test_threads_do_not_change_a_bit(offset: int) -> None:
    start = draw(150_001, param=F32, copy=BF16, offsets=(offset, 0, 3, offset))
    results = []
    for threads in (1, 2, 3, 7, 1, 2):
        inputs = draw(150_001, param=F32, copy=BF16, offsets=(offset, 0, 3, offset))
        run(inputs, Settings(weight_decay=0.1), threads=threads)
        results.append(inputs)
    assert not same_bits(start, results[0])
    assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("types", [(F32, F32, F32), (BF16, BF16, F32), (BF16, BF16, BF16)], ids=str)
def test_every_element_of_a_large_tensor_is_updated_once(
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> None:
    param, grad, state = types
    numel = 1_500_017
    tensors = [torch.ones(numel, dtype=dtype) for dtype in (param, grad, state, state)]
    adam_step(*tensors, step=1, lr=0.25, threads=2)
    for tensor in (tensors[0], *tensors[2:]):
        assert tensor.unique().numel() == 1
    one = [torch.ones(1, dtype=dtype) for dtype in (param, grad, state, state)]
    adam_step(*one, step=1, lr=0.25)
    assert [bits(tensor[:1]) for tensor in tensors] == [bits(tensor) for tensor in one]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("adamw", [True, False])
def test_ten_steps_follow_torch(isa: str, adamw: bool) -> None:
    torch.manual_seed(3)
    start = torch.randn(501, dtype=torch.float64)
    reference = torch.nn.Parameter(start.clone())
    kind = torch.optim.AdamW if adamw else torch.optim.Adam
    optimizer = kind([reference], lr=1e-2, weight_decay=0.1)
    param = start.float()
    mean, square = torch.zeros(501), torch.zeros(501)
    for step in range(1, 11):
        grad = torch.randn(501)
        reference.grad = grad.double()
        optimizer.step()
        adam_step(
            param, grad, mean, square, step=step, lr=1e-2, weight_decay=0.1, adamw=adamw, isa=isa
        )
    torch.testing.assert_close(param.double(), reference.detach(), rtol=1e-5, atol=2e-6)


def test_large_copy_past_the_caches_is_the_parameters_rounded() -> None:
    numel = 3_000_001
    inputs = draw(numel)
    copy = torch.empty(numel + 64, dtype=BF16)
    shift = (-copy.data_ptr() // 2) % 32
    for begin in (shift, shift + 1):  # with an aligned line, and without
        target = copy[begin : begin + numel].fill_(7)
        adam_step(
            inputs.param,
            inputs.grad,
            inputs.exp_avg,
            inputs.exp_avg_sq,
            step=1,
            lr=0.1,
            low_precision_copy=target,
            threads=2,
        )
        assert torch.equal(target, inputs.param.to(BF16))


def test_two_threads_of_the_caller_may_step_at_once() -> None:
    import threading

    expected = draw(200_000, seed=4)
    run(expected, Settings())
    inputs = [draw(200_000, seed=4) for _ in range(4)]
    callers = [
        threading.Thread(target=run, args=(one, Settings()), kwargs={"threads": 2})
        for one in inputs
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(same_bits(expected, one) for one in inputs)


def test_forked_child_steps_with_threads_of_its_own() -> None:
    inputs, expected = draw(200_000), draw(200_000)
    run(draw(200_000), Settings(), threads=2)  # starts the parent's threads
    child = os.fork()
    if child == 0:
        run(inputs, Settings(), threads=2)
        run(expected, Settings(), threads=1)
        same = np.array_equal(inputs.param.numpy(), expected.param.numpy())
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    run(inputs, Settings(), threads=2)  # and the parent goes on
    run(expected, Settings(), threads=1)
    assert same_bits(inputs, expected)


def test_written_tensors_count_a_version_as_in_place_operators_do() -> None:
    inputs = draw(10)
    versions = [tensor._version for tensor in inputs.all()]
    run(inputs, Settings())
    changed = [tensor._version - was for tensor, was in zip(inputs.all(), versions, strict=True)]
    assert changed == [1, 0, 1, 1]
