"""States in 8 bits against fp64 numpy, which knows what a code is worth from docs/adam.md alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cxl_offload.ops.adam import CPUAdam
from cxl_offload.ops.lion import CPULion
from cxl_offload.ops.state_codes import Code, decoded, encoded

from .oracle import Array, Settings, adam, close, f64
from .tensors import BF16, F32, bits

KINDS: dict[str, Any] = {"adam": CPUAdam, "lion": CPULion}
SIZES = (1, 5, 127, 128, 129, 4000, 70_001)


def worth(code: Code) -> Array:
    """The 256 values of the codes, as multiples of the scale."""
    number = np.arange(256)
    if code == "root":
        return 2.0 ** (number // 16 - 15) * (1 + number % 16 / 16)
    size = 2.0 ** (number % 128 // 8 - 15) * (1 + number % 8 / 8) - 2.0**-15
    return np.where(number < 128, size, -size)


def values_of(codes: torch.Tensor, scales: torch.Tensor, code: Code) -> Array:
    """What the two tensors of a state mean, a root not squared."""
    exponents = np.repeat(scales.numpy().astype(int), 128)[: codes.numel()]
    factors = np.where(exponents == 0, 0.0, 2.0 ** (exponents - 127.0))
    factors[exponents == 255] = np.nan
    return worth(code)[codes.numpy().reshape(-1)] * factors


def numbers(numel: int, seed: int, *, positive: bool = False) -> torch.Tensor:
    """Numbers of very different sizes, some of them zero."""
    source = torch.Generator().manual_seed(seed)
    made = torch.randn(numel, generator=source) * torch.exp(
        3 * torch.randn(numel, generator=source)
    )
    made[torch.rand(numel, generator=source) < 0.05] = 0
    return made.square() if positive else made


def step_of(
    kind: str,
    numel: int,
    *,
    seed: int = 3,
    steps: int = 1,
    param: torch.dtype = F32,
    **options: Any,
) -> tuple[torch.nn.Parameter, dict[str, Any]]:
    tensor = torch.nn.Parameter(numbers(numel, 1).to(param))
    optimizer = KINDS[kind]([tensor], state_dtype=torch.uint8, rounding_seed=seed, **options)
    for step in range(steps):
        tensor.grad = numbers(numel, 10 + step).to(param)
        optimizer.step()
    return tensor, optimizer.state[tensor]


@pytest.mark.parametrize("code", ["signed", "root"])
def test_codes_are_the_nearest_of_the_documented_values(code: Code) -> None:
    given = numbers(1000, 0, positive=code == "root")
    codes, scales = encoded(given, code)
    wanted = np.sqrt(f64(given)) if code == "root" else f64(given)
    factors = np.repeat(2.0 ** (scales.numpy() - 127.0), 128)[:1000]
    distances = np.abs(worth(code)[:, None] * factors - wanted).min(axis=0)
    chosen = values_of(codes, scales, code)
    np.testing.assert_allclose(
        np.abs(chosen - wanted), distances, rtol=1e-6, atol=1e-7 * factors.min()
    )
    # The scale is not coarser than it must be: the greatest of a block is in the last two octaves.
    for block in range(0, 1000, 128):
        assert 0.9 <= np.abs(wanted[block : block + 128] / factors[block]).max() < 2
    meant = decoded(codes, scales, code).double().numpy()
    np.testing.assert_allclose(meant, chosen**2 if code == "root" else chosen, rtol=1e-6)


def test_scales_are_one_byte_for_128_elements_and_states_follow_the_parameters() -> None:
    for numel in SIZES:
        tensor, state = step_of("adam", numel)
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[f"{name}_codes"].shape == tensor.shape
            assert state[f"{name}_scales"].shape == ((numel + 127) // 128,)
    moved = 12 + sum(2 * value.nbytes for value in state.values() if value.dim()) / numel
    assert moved < 16.2


def neighbours(code: Code, factors: Array, value: Array, error: Array) -> tuple[Array, Array]:
    """The values of codes next to a number that is known but for an error."""
    grid = np.sort(worth(code))[:, None] * factors
    below = np.where(grid <= value - error, grid, -np.inf).max(axis=0)
    above = np.where(grid >= value + error, grid, np.inf).min(axis=0)
    return below, above


@pytest.mark.parametrize("decay", [(0.0, True), (0.1, True), (0.1, False)], ids=str)
@pytest.mark.parametrize("numel", SIZES[:-1])
def test_adam_step_is_that_of_fp64_and_states_one_of_their_two_neighbours(
    numel: int, decay: tuple[float, bool]
) -> None:
    settings = Settings(step=3, lr=1e-2, weight_decay=decay[0], adamw=decay[1], grad_scale=0.5)
    tensor = torch.nn.Parameter(numbers(numel, 1))
    options = {"lr": 1e-2, "weight_decay": decay[0], "adamw": decay[1]}
    optimizer = CPUAdam([tensor], state_dtype=torch.uint8, rounding_seed=7, **options)
    for step in range(2):
        tensor.grad = numbers(numel, 20 + step)
        optimizer.step(grad_scale=0.5)
    state = optimizer.state[tensor]

    def meant(name: str, code: Code) -> Array:
        return values_of(state[f"{name}_codes"], state[f"{name}_scales"], code)

    before = meant("exp_avg", "signed"), meant("exp_avg_sq", "root") ** 2
    tensor.grad = numbers(numel, 22)
    expected = adam(f64(tensor), f64(tensor.grad), *before, settings)
    optimizer.step(grad_scale=0.5)
    close(tensor, expected[0])
    roots = np.sqrt(expected[2].value)
    for name, code, wanted in (
        ("exp_avg", "signed", expected[1].value),
        ("exp_avg_sq", "root", roots),
    ):
        got = meant(name, code)
        factors = np.repeat(2.0 ** (state[f"{name}_scales"].numpy() - 127.0), 128)[:numel]
        error = 2e-6 * (np.abs(wanted) + np.abs(f64(tensor.grad))) + 1e-7 * factors
        below, above = neighbours(code, factors, wanted, error)
        assert ((below <= got) & (got <= above)).all()


def check_mean(drawn: Array, wanted: Array, gap: Array) -> None:
    """Draws, one a row, of roundings to numbers at most ``gap`` apart are right in the mean."""
    off = (drawn.mean(0) - wanted) / gap
    draws = len(drawn)
    assert np.abs(off).max() < 5 * 0.5 / np.sqrt(draws) + 8 / draws
    assert abs(off.mean()) < 5 * 0.5 / np.sqrt(draws * len(off))


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_is_right_in_the_mean(kind: str) -> None:
    numel, seeds = 128, 400
    exact = torch.nn.Parameter(numbers(numel, 1))
    plain = KINDS[kind]([exact], lr=0.0)
    exact.grad = numbers(numel, 10)
    plain.step()
    drawn = []
    for seed in range(seeds):
        _, state = step_of(kind, numel, seed=seed, lr=0.0)
        drawn.append(values_of(state["exp_avg_codes"], state["exp_avg_scales"], "signed"))
    wanted, each = f64(plain.state[exact]["exp_avg"]), np.array(drawn)
    assert (each.std(0) > 0).mean() > 0.7
    check_mean(each, wanted, np.abs(wanted) / 8 + np.abs(wanted).max() * 2.0**-18)


@pytest.mark.parametrize("param", [F32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(kind: str, param: torch.dtype) -> None:
    def run(threads: int) -> list[bytes]:
        tensor, state = step_of(kind, 70_001, steps=2, param=param, threads=threads)
        return [bits(tensor), *(bits(value) for value in state.values())]

    alone = run(1)
    for threads in (2, 3, 5):
        assert run(threads) == alone


@pytest.mark.parametrize("kind", KINDS)
def test_bits_depend_on_the_seed_and_the_step(kind: str) -> None:
    one, same, other = (bits(step_of(kind, 500, seed=s)[1]["exp_avg_codes"]) for s in (1, 1, 2))
    assert one == same
    assert one != other
    if kind == "adam":
        return
    tensor = torch.nn.Parameter(torch.zeros(500))
    optimizer = CPULion([tensor], betas=(0.9, 0.0), state_dtype=torch.uint8)
    seen = set()
    for _ in range(3):  # with beta2 = 0 every step has the same numbers to round
        tensor.grad = numbers(500, 1)
        optimizer.step()
        seen.add(bits(optimizer.state[tensor]["exp_avg_codes"]))
    assert len(seen) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_zeros_stay_zero_and_what_is_not_finite_stays_in_its_block(kind: str) -> None:
    tensor = torch.nn.Parameter(torch.ones(500))
    optimizer = KINDS[kind]([tensor], lr=0.1, state_dtype=torch.uint8)
    tensor.grad = torch.zeros(500)
    tensor.grad[200], tensor.grad[300] = float("nan"), 1.0
    for _ in range(2):
        optimizer.step()
    state = optimizer.state[tensor]
    assert state["exp_avg_scales"].tolist()[0] == 0
    assert state["exp_avg_scales"].tolist()[1] == 255
    assert not state["exp_avg_codes"][:256].any()
    assert (tensor[:128] == 1).all()
    assert tensor[128:256].isnan().all()
    assert tensor[256:].isfinite().all()


def test_bfloat16_parameters_move_without_master_weights() -> None:
    """Steps of a twentieth of a neighbour's distance are lost by rounding to the nearest."""

    def trained(seed: int | None, state: torch.dtype) -> float:
        tensor = torch.nn.Parameter(torch.full((4096,), 1.0, dtype=BF16))
        optimizer = CPUAdam([tensor], lr=2.0**-7 / 20, state_dtype=state, rounding_seed=seed)
        for _ in range(40):
            tensor.grad = torch.ones_like(tensor)
            optimizer.step()
        return float(tensor.float().mean())

    assert trained(None, BF16) == 1.0
    for state in (F32, BF16, torch.uint8):
        assert trained(5, state) == pytest.approx(1 - 40 * 2.0**-7 / 20, abs=2e-3)


def test_bfloat16_states_are_rounded_at_random_when_a_seed_is_given() -> None:
    exact, seeds = torch.nn.Parameter(numbers(200, 1)), 300
    plain = CPUAdam([exact], lr=0.0)
    exact.grad = numbers(200, 10)
    plain.step()
    drawn = []
    for seed in range(seeds):
        tensor = torch.nn.Parameter(numbers(200, 1))
        optimizer = CPUAdam([tensor], lr=0.0, state_dtype=BF16, rounding_seed=seed)
        tensor.grad = numbers(200, 10)
        optimizer.step()
        drawn.append([f64(optimizer.state[tensor][name]) for name in optimizer.state_names])
    for index, name in enumerate(("exp_avg", "exp_avg_sq")):
        wanted, each = f64(plain.state[exact][name]), np.array(drawn)[:, index]
        assert (np.abs(each - wanted) <= 2.0**-7 * np.abs(wanted)).all()
        check_mean(each, wanted, 2.0**-7 * np.abs(wanted) + 1e-30)


@pytest.mark.slow(reason="trains")
@pytest.mark.parametrize("state", [BF16, torch.uint8])
def test_losses_follow_those_of_float32_states(state: torch.dtype) -> None:
    def losses(dtype: torch.dtype, seed: int) -> Array:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(24, 96), torch.nn.GELU(), torch.nn.Linear(96, 8)
        )
        teacher = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
        options: dict[str, Any] = {"rounding_seed": 1} if dtype is not F32 else {}
        optimizer = CPUAdam(model.parameters(), lr=3e-3, state_dtype=dtype, threads=1, **options)
        source, seen = torch.Generator().manual_seed(99 + seed), []
        for _ in range(300):
            data = torch.randn(32, 24, generator=source)
            loss = (model(data) - (data @ teacher / 8).tanh()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return np.array(seen)

    plain = np.array([losses(F32, seed) for seed in range(4)])
    narrow = np.array([losses(state, seed) for seed in range(4)])
    ends, others = plain[:, -50:].mean(1), narrow[:, -50:].mean(1)
    assert ends.max() < 0.5 * plain[:, :10].mean()
    assert abs(others.mean() - ends.mean()) < ends.max() - ends.min()
