"""Steps of the optimizer classes under what a training loop does to them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cxl_offload.ops.adagrad import CPUAdagrad
from cxl_offload.ops.adam import CPUAdam, adam_step
from cxl_offload.ops.lion import CPULion

from .tensors import bits
from .test_optimizers import assert_close, assert_same, parameters, set_gradients, train

KINDS = (CPUAdam, CPUAdagrad, CPULion)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_steps_keep_their_states(kind: type[torch.optim.Optimizer]) -> None:
    mine, theirs = parameters(), parameters()
    optimizer, plain = kind(mine, lr=0.1), kind(theirs, lr=0.1)  # type: ignore[call-arg]
    step = torch.compile(optimizer.step)
    for index in range(4):
        set_gradients(mine, index)
        step()
    train(plain, theirs, range(4))
    assert_same(mine, theirs)
    assert {int(optimizer.state[param]["step"]) for param in mine} == {4}


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_training_loop_equals_the_plain_one() -> None:
    def run(wrap: Callable[[Any], Any]) -> list[torch.nn.Parameter]:
        torch.manual_seed(0)
        model = torch.nn.Linear(7, 3)
        optimizer = CPUAdam(model.parameters(), lr=0.1)
        data = torch.randn(5, 7)

        def iterate() -> None:
            optimizer.zero_grad()
            model(data).square().sum().backward()
            optimizer.step()

        iterate = wrap(iterate)
        for _ in range(4):
            iterate()
        return list(model.parameters())

    plain = run(lambda function: function)
    assert_close(run(lambda function: torch.compile(function, backend="eager")), plain)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("error:Dynamo does not know")
def test_compiled_function_around_a_single_step_equals_the_plain_one() -> None:
    @torch.compile(backend="eager")
    def twice(tensors: list[torch.Tensor]) -> torch.Tensor:
        adam_step(*tensors, step=1, lr=0.1)
        adam_step(*tensors, step=2, lr=0.1)
        return tensors[0] + 1

    def draw() -> list[torch.Tensor]:
        source = torch.Generator().manual_seed(0)
        return [torch.rand(40, generator=source) for _ in range(4)]

    compiled, plain = draw(), draw()
    after = twice(compiled)
    for step in (1, 2):
        adam_step(*plain, step=step, lr=0.1)
    assert [bits(tensor) for tensor in compiled] == [bits(tensor) for tensor in plain]
    assert torch.equal(after, plain[0] + 1)


@pytest.mark.parametrize("late", [False, True], ids=["given", "set-later"])
@pytest.mark.parametrize(
    ("kind", "reference"),
    [(CPUAdam, torch.optim.AdamW), (CPUAdagrad, torch.optim.Adagrad)],
)
def test_maximize_goes_up_as_in_torch(kind: type[Any], reference: type[Any], late: bool) -> None:
    mine, theirs = parameters(), parameters()
    options = {"lr": 0.1, "weight_decay": 0.1, "maximize": not late}
    optimizers = (kind(mine, **options), reference(theirs, **options))
    for optimizer in optimizers:
        optimizer.param_groups[0]["maximize"] = True
    train(optimizers[0], mine, range(5))
    train(optimizers[1], theirs, range(5))
    assert_close(mine, theirs)


def test_maximize_of_lion_is_the_step_of_the_negative_gradient() -> None:
    mine, theirs = parameters(), parameters()
    train(CPULion(mine, maximize=True), mine, range(3))
    train(CPULion(theirs), theirs, range(3), grad_scale=-1.0)
    assert_same(mine, theirs)


@pytest.mark.parametrize("name", ["amsgrad", "differentiable"])
@pytest.mark.parametrize("kind", KINDS)
def test_variant_that_is_asked_for_later_is_refused(kind: type[Any], name: str) -> None:
    params = parameters()
    optimizer = kind(params)
    train(optimizer, params, range(1))
    before = [bits(param) for param in params]
    optimizer.param_groups[0][name] = True
    with pytest.raises(ValueError, match=f"has no {name}"):
        train(optimizer, params, range(1))
    assert [bits(param) for param in params] == before


def test_flags_of_how_torch_computes_change_nothing() -> None:
    mine, theirs = parameters(), parameters()
    optimizer = CPUAdam(mine, lr=0.1)
    for name in ("foreach", "fused", "capturable"):
        optimizer.param_groups[0][name] = True
    train(optimizer, mine, range(2))
    train(CPUAdam(theirs, lr=0.1), theirs, range(2))
    assert_same(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_steps_are_counted_whatever_the_default_type_and_device(dtype: torch.dtype) -> None:
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.float32))]
    optimizer = CPUAdam(params, lr=1e-3)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            for _ in range(300):
                params[0].grad = torch.ones(3, dtype=torch.float32, device="cpu")
                optimizer.step()
    finally:
        torch.set_default_dtype(before)
    assert int(optimizer.state[params[0]]["step"]) == 300
    assert optimizer.state[params[0]]["exp_avg"].dtype is torch.float32


def test_parameter_that_rests_counts_only_its_own_steps() -> None:
    mine, theirs = parameters(), parameters()
    optimizers = CPUAdam(mine, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.0)
    for params, optimizer in ((mine, optimizers[0]), (theirs, optimizers[1])):
        for step in range(6):
            set_gradients(params, step)
            if step % 2:
                params[4].grad = None
            optimizer.step()
    assert int(optimizers[0].state[mine[4]]["step"]) == 3
    assert_close(mine, theirs)


def test_group_added_later_is_checked_and_trained() -> None:
    mine, theirs = parameters(), parameters()
    optimizer = CPUAdam(mine[:2], lr=0.1)
    reference = torch.optim.AdamW(theirs[:2], lr=0.1, weight_decay=0.0)
    train(optimizer, mine[:2], range(2))
    train(reference, theirs[:2], range(2))
    with pytest.raises(ValueError, match="beta2 is 1"):
        optimizer.add_param_group({"params": mine[2:], "betas": (0.9, 1.0)})
    assert len(optimizer.param_groups) == 1
    for one, params in ((optimizer, mine), (reference, theirs)):
        one.add_param_group({"params": params[2:], "lr": 0.01})
        train(one, params, range(2, 4))
    assert_close(mine, theirs)


def test_sparse_gradient_is_refused_before_anything_is_written() -> None:
    params = parameters()
    optimizer = CPUAdam(params, lr=0.1)
    set_gradients(params, 0)
    params[4].grad = torch.zeros(64, 33).to_sparse()
    before = [bits(param) for param in params]
    with pytest.raises(ValueError, match="layout"):
        optimizer.step()
    assert [bits(param) for param in params] == before


def test_parameters_of_one_storage_are_trained_apart_and_refused_where_they_overlap() -> None:
    flat = torch.ones(100)
    apart = [torch.nn.Parameter(flat[:33]), torch.nn.Parameter(flat[33:])]
    optimizer = CPUAdam(apart, lr=0.5)
    set_gradients(apart, 0)
    optimizer.step()
    assert torch.equal(flat[:33], apart[0])
    overlapping = [torch.nn.Parameter(flat[:33]), torch.nn.Parameter(flat[32:])]
    set_gradients(overlapping, 0)
    with pytest.raises(ValueError, match="overlaps"):
        CPUAdam(overlapping, lr=0.5).step()


def test_copies_of_strangers_are_refused() -> None:
    params = parameters()
    optimizer = CPUAdam(params, lr=0.1)
    set_gradients(params, 0)
    stranger = torch.ones(3)
    with pytest.raises(ValueError, match="1 of 1 are of tensors that are no parameters"):
        optimizer.step(low_precision_copies={stranger: stranger.bfloat16()})


def test_states_in_part_are_refused() -> None:
    params = parameters()
    optimizer = CPUAdam(params, lr=0.1)
    train(optimizer, params, range(1))
    del optimizer.state[params[4]]["exp_avg_sq"]
    with pytest.raises(ValueError, match=r"\(64, 33\) have no exp_avg_sq"):
        train(optimizer, params, range(1))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit_when_subnormal_numbers_are_flushed(kind: type[Any]) -> None:
    """Threads once kept the mode in which they were made."""
    numel = 400_000
    source = torch.Generator().manual_seed(0)
    start = torch.rand(numel, generator=source) * 2e-38
    grad = torch.rand(numel, generator=source) * 1e-38

    def stepped(threads: int) -> list[bytes]:
        torch.set_num_threads(min(threads, 2))  # two: those of OpenMP are borrowed; more: our own
        param = torch.nn.Parameter(start.clone())
        optimizer = kind([param], lr=1e-39, threads=threads)
        param.grad = grad
        optimizer.step()
        states = optimizer.state[param]
        return [bits(param), *(bits(states[name]) for name in optimizer.state_names)]

    plain = stepped(1)
    for threads in (2, 3, 5):
        assert stepped(threads) == plain  # their threads are made here, flushing nothing
    assert torch.set_flush_denormal(True)
    try:
        flushed = stepped(1)
        for threads in (2, 3, 5):
            assert stepped(threads) == flushed
    finally:
        torch.set_flush_denormal(False)
    assert flushed != plain
    assert stepped(3) == plain


class AlarmError(Exception):
    """Raised by the handler of a signal."""


def test_signal_in_a_step_finds_it_made_and_counted_or_neither() -> None:
    def handler(*_: object) -> None:
        raise AlarmError

    param = torch.nn.Parameter(torch.zeros(4_000_000))
    param.grad = torch.ones_like(param)
    optimizer = CPUAdam([param], lr=1e-3)
    optimizer.step()
    step, before = optimizer.state[param]["step"], signal.signal(signal.SIGALRM, handler)
    interrupted_after = 0
    try:
        for _ in range(25):
            value, count = float(param[0].detach()), int(step)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001)
                optimizer.step()
            except AlarmError:
                interrupted_after += float(param[0].detach()) != value
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert (float(param[0].detach()) != value) == (int(step) != count)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted_after  # or the signals came at no time that matters


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_inference_mode_does_not_tear_the_next_one(kind: type[Any]) -> None:
    mine, theirs = parameters(), parameters()
    optimizer, plain = kind(mine, lr=0.1), kind(theirs, lr=0.1)
    for index in range(3):
        set_gradients(mine, index)
        with torch.inference_mode(index == 0):
            optimizer.step()
    train(plain, theirs, range(3))
    assert_same(mine, theirs)
    assert {int(optimizer.state[param]["step"]) for param in mine} == {3}


@pytest.mark.parametrize(
    "count",
    [
        torch.tensor(127, dtype=torch.int8),
        torch.tensor(127, dtype=torch.float16),
        torch.tensor(127.0).expand(2)[0],
        torch.tensor(127, dtype=torch.float64),
        torch.tensor(127, dtype=torch.int64),
        127,
    ],
    ids=lambda count: str(getattr(count, "dtype", "int")),
)
def test_steps_are_counted_beyond_what_a_narrow_type_holds(count: object) -> None:
    (param,) = parameters()[:1]
    optimizer = CPUAdam([param], lr=0.1)
    set_gradients([param], 0)
    optimizer.step()
    optimizer.state[param]["step"] = count
    for _ in range(3):
        optimizer.step()
    assert int(optimizer.state[param]["step"]) == 130


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_steps_beyond_float32_are_counted_where_the_type_holds_them(dtype: torch.dtype) -> None:
    (param,) = parameters()[:1]
    optimizer = CPUAdam([param], lr=0.1)
    set_gradients([param], 0)
    optimizer.step()
    optimizer.state[param]["step"] = torch.tensor(2**24, dtype=dtype)
    optimizer.step()
    assert int(optimizer.state[param]["step"]) == 2**24 + 1


@pytest.mark.parametrize("count", [torch.tensor(float("nan")), torch.ones(3), None, 1e20, -4])
def test_a_step_that_is_no_count_is_refused_before_anything_is_written(count: object) -> None:
    params = parameters()
    optimizer = CPUAdam(params, lr=0.1)
    set_gradients(params, 0)
    optimizer.step()
    before = [bits(param) for param in params]
    optimizer.state[params[-1]]["step"] = count
    with pytest.raises(ValueError, match="must be a whole number of steps"):
        optimizer.step()
    assert [bits(param) for param in params] == before
    assert int(optimizer.state[params[0]]["step"]) == 1


@pytest.mark.parametrize("maximize", ["False", None, [True], 1j])
def test_a_direction_that_is_no_flag_is_refused_in_a_step(maximize: object) -> None:
    params = parameters()
    optimizer = CPUAdam(params, lr=0.1)
    set_gradients(params, 0)
    optimizer.param_groups[0]["maximize"] = maximize
    with pytest.raises(TypeError, match=r"maximize is .*; it must be true or false"):
        optimizer.step()
