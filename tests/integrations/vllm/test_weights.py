"""Weights of real vLLM on the CPU, and its offloader's classes with a stand-in for the GPU."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import vllm
import vllm.model_executor.offloader.uva as uva
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader import utils

from cxl_offload import _C, Session, load_machine, use
from cxl_offload.errors import ConfigError
from cxl_offload.integrations.vllm import weight_patch
from cxl_offload.integrations.vllm.weight_offloader import (
    PlacedUVAOffloader,
    _forward_with_copies,
)
from cxl_offload.tensor import placement_of
from cxl_offload.tune.curves import SHARES

from .weights_start import plugin_environment, result, run_once


class GpuParameter(torch.nn.Parameter):
    """Says that it is on a GPU; its bytes are host memory, as there is none here."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = torch.nn.Linear(64, 64, bias=False)
        self.mlp = torch.nn.Linear(64, 256, bias=False)
        for part in (self.self_attn, self.mlp):
            part.weight = GpuParameter(part.weight.data)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.self_attn(given))


@pytest.fixture
def driver() -> _C.FakeDriver:
    return _C.FakeDriver()


@pytest.fixture
def session(driver: _C.FakeDriver) -> Iterator[Session]:
    session = Session.simulated(load_machine("epyc9354-cxl-a"), driver=driver)
    with use(session):
        yield session


@pytest.fixture
def offloader(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., PlacedUVAOffloader]:
    """Makes the real class as on a machine with a GPU that has UVA."""
    monkeypatch.setattr(uva, "should_pin_memory", lambda: True)
    monkeypatch.setattr(uva, "is_uva_available", lambda: True)
    monkeypatch.setattr(uva, "get_accelerator_view_from_cpu_tensor", lambda host: host.detach())
    monkeypatch.setattr(PlacedUVAOffloader, "_on_cpu", lambda self: False)

    def make(asked: int, params: set[str] | None = None, **section: Any) -> PlacedUVAOffloader:
        config = VllmConfig(additional_config={"cxl_offload": section} if section else {})
        with set_current_vllm_config(config):
            return PlacedUVAOffloader(asked, params)

    return make


def test_gpu_weights_are_pinned_on_the_node_of_their_kind(
    offloader: Callable[..., PlacedUVAOffloader], session: Session, driver: _C.FakeDriver
) -> None:
    layer = Layer()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    made = offloader(1 << 20, weight_policy="bind:0", weight_kinds={"mlp": "cxl"})
    (wrapped,) = made.wrap_modules(iter([layer]))
    assert wrapped is layer
    assert placement_of(layer.mlp.weight.data, session=session).granted == {2: 64 * 256 * 4}
    attention = placement_of(layer.self_attn.weight.data, session=session)
    assert attention.granted == {0: 64 * 64 * 4}
    assert attention.pinned
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
    report = made.finish(layer)
    assert report is not None
    assert report.kinds == {"attention": 64 * 64 * 4, "mlp": 64 * 256 * 4}
    assert report.held_bytes == driver.registered_bytes == 5 * 64 * 64 * 4
    assert made.cpu_offload_bytes == report.held_bytes


def test_gpu_weights_beyond_what_was_asked_stay_on_the_gpu(
    offloader: Callable[..., PlacedUVAOffloader], session: Session
) -> None:
    layers = [Layer() for _ in range(3)]
    made = offloader(200_000, weight_policy="bind:2")
    made.wrap_modules(iter(layers))
    report = made.finish(torch.nn.ModuleList(layers))
    assert report is not None
    # two layers of 80 KiB, and of the third what fits into the rest: attention's 16 KiB
    assert report.held_bytes == 2 * 81_920 + 16_384
    assert report.left_bytes == 65_536
    assert session.find(layers[2].mlp.weight.data_ptr()) is None
    assert "more than --cpu-offload-gb would have been held" in report.lines()[-1]


def test_params_flag_still_chooses_names(
    offloader: Callable[..., PlacedUVAOffloader], session: Session
) -> None:
    layer = Layer()
    made = offloader(1 << 20, {"mlp"}, weight_policy="bind:2")
    made.wrap_modules(iter([layer]))
    assert session.find(layer.mlp.weight.data_ptr()) is not None
    assert session.find(layer.self_attn.weight.data_ptr()) is None


def test_weight_that_loading_replaced_is_brought_back(
    offloader: Callable[..., PlacedUVAOffloader],
    session: Session,
    driver: _C.FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(utils, "get_accelerator_view_from_cpu_tensor", lambda host: host)
    layer = Layer()
    made = offloader(1 << 20, weight_policy="bind:2")
    made.wrap_modules(iter([layer]))
    with utils.device_loading_context(layer.mlp, torch.device("cuda")):  # vLLM's own
        layer.mlp.weight = GpuParameter(torch.full((128, 128), 2.0))
    assert session.find(layer.mlp.weight.data_ptr()) is None, "vLLM no longer takes its own memory"
    report = made.finish(layer)
    assert report is not None
    found = placement_of(layer.mlp.weight.data, session=session)
    assert found.granted == {2: 128 * 128 * 4}
    assert found.pinned
    assert bool((layer.mlp.weight == 2.0).all())
    assert report.held_bytes == driver.registered_bytes == 64 * 64 * 4 + 128 * 128 * 4


def test_embedding_leaves_the_gpu_when_it_is_named(
    offloader: Callable[..., PlacedUVAOffloader], session: Session
) -> None:
    model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(512, 64)})
    model["embed_tokens"].weight = GpuParameter(model["embed_tokens"].weight.data)
    made = offloader(1 << 20, weight_policy="bind:0", weight_kinds={"embedding": "bind:2"})
    made.wrap_modules(iter([]))
    report = made.finish(model)
    assert report is not None
    assert report.nodes == {"bind:2": {2: 512 * 64 * 4}}


def test_embedding_without_uva_is_refused(
    offloader: Callable[..., PlacedUVAOffloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uva, "is_uva_available", lambda: False)
    with pytest.raises(ConfigError, match="can only leave the GPU with UVA"):
        offloader(1 << 20, weight_kinds={"embedding": "bind:2"})


def test_forward_copies_state_for_every_call_without_uva() -> None:
    layer = Layer()
    given = torch.randn(3, 64)
    expected = layer(given)
    _forward_with_copies(layer, torch.device("cpu"), True)
    wrapped = layer.forward
    assert torch.equal(layer(given), expected)
    layer.mlp.weight.data.mul_(2)
    assert torch.equal(layer(given), 2 * expected)
    assert layer.forward is wrapped


def test_offloader_without_options_is_vllm_s_own(
    offloader: Callable[..., PlacedUVAOffloader], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer()
    made = offloader(1 << 20)
    made.pin_memory = False  # torch's pinning needs a GPU
    made.wrap_modules(iter([layer]))
    assert made.cpu_offload_bytes == 5 * 64 * 64 * 4
    assert session.stats().mapped_bytes.current == 0
    assert made.finish(layer) is None


def test_names_of_vllm_look_as_the_patch_expects() -> None:
    assert vllm.__version__.partition("+")[0] in weight_patch.TESTED_VERSIONS
    assert weight_patch.broken_expectations() == []


class Arguments:
    """What the check reads of vLLM's EngineArgs."""

    def __init__(self) -> None:
        self.additional_config = {"cxl_offload": {"weight_policy": "bind:0"}}
        self.cpu_offload_gb = 1.0
        self.offload_backend = "auto"
        self.offload_group_size = 0


def test_other_version_of_vllm_refuses_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.1+cpu")
    assert "vLLM 0.33.1 is not tested, 0.32.0 is" in weight_patch._unfit()
    with pytest.raises(ConfigError, match=r"cannot be placed: vLLM 0\.33\.1 is not tested"):
        weight_patch.check_arguments(Arguments(), weight_patch._unfit())


def test_changed_name_of_vllm_refuses_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(uva.UVAOffloader, "_maybe_offload_to_cpu")
    assert "UVAOffloader._maybe_offload_to_cpu is gone" in weight_patch._unfit()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cpu_offload_gb", 0.0, "do nothing without --cpu-offload-gb"),
        ("offload_backend", "prefetch", "only the uva backend"),
        ("offload_group_size", 4, "only the uva backend"),
    ],
)
def test_options_that_would_do_nothing_are_refused(name: str, value: Any, message: str) -> None:
    arguments = Arguments()
    weight_patch.check_arguments(arguments)
    setattr(arguments, name, value)
    with pytest.raises(ConfigError, match=message):
        weight_patch.check_arguments(arguments)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return plugin_environment(tmp_path_factory.mktemp("plugin"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def test_tokens_are_the_same_with_weights_in_placed_memory(
    environment: dict[str, str], model: Path
) -> None:
    plain = result(run_once(environment, model, {}))
    options = {
        "cpu_offload_gb": 0.01,
        "additional_config": {
            "cxl_offload": {
                "weight_policy": "bind:0",
                "weight_kinds": {"embedding": "interleave:0"},
            }
        },
    }
    placed = result(run_once(environment, model, options))
    assert placed["tokens"] == plain["tokens"]
    assert placed["damaged"] != plain["tokens"], "the tokens do not come from the placed weights"
    report = placed["report"]
    assert report["asked_bytes"] == int(0.01 * 2**30)
    packed, kinds = of_layers(placed["emptied"])
    embedding = 512 * 128 * 2
    assert report["kinds"] == {**kinds, "embedding": embedding}
    layers = -(-sum(kinds.values()) // 4096) * 4096
    assert report["nodes"] == {"bind:0": {"0": layers}, "interleave:0": {"0": embedding}}
    assert report["held_bytes"] == embedding + layers
    assert report["repacked_bytes"] == packed


def of_layers(emptied: list[str]) -> tuple[int, dict[str, int]]:
    """Bytes of the model's layers that vLLM packed, and bytes by kind of what it left in place."""
    matrices = {
        "self_attn.qkv_proj": ("attention", 128 * 256 * 2),
        "self_attn.o_proj": ("attention", 128 * 128 * 2),
        "mlp.gate_up_proj": ("mlp", 128 * 512 * 2),
        "mlp.down_proj": ("mlp", 256 * 128 * 2),
    }
    packed, kinds = 0, {"norm": 4 * 128 * 2}
    for layer in range(2):
        for name, (kind, size) in matrices.items():
            if f"model.layers.{layer}.{name}.weight" in emptied:
                packed += size
            else:
                kinds[kind] = kinds.get(kind, 0) + size
    return packed, kinds


def test_wrong_node_is_refused_before_the_model_is_loaded(
    environment: dict[str, str], model: Path
) -> None:
    options = {
        "cpu_offload_gb": 0.01,
        "additional_config": {"cxl_offload": {"weight_policy": "bind:63"}},
    }
    done = run_once(environment, model, options)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "weight_policy: bind:63: node 63 has no memory that this process may use" in last
    assert "Loading" not in done.stdout + done.stderr


def test_steps_of_the_engine_decide_where_the_next_starts_weights_go(
    environment: dict[str, str], model: Path, tmp_path: Path
) -> None:
    state = tmp_path / "run.json"
    far = {"tuner": "model", "at": len(SHARES) - 1, "measured": {}}
    state.write_text(json.dumps({"model": far, "load": None}))
    section = {
        "weight_tune": "step_time",
        "weight_tune_state": str(state),
        "weight_kinds": {"embedding": "bind:2"},
    }
    options = {
        "machine": "epyc9354-cxl-a",
        "tokens": 100,
        "cpu_offload_gb": 0.01,
        "additional_config": {"cxl_offload": section},
    }
    done = run_once(environment, model, options)
    assert list(result(done)["report"]["nodes"]) == ["bind:2"]
    assert "tune, from the next start on:" in done.stdout + done.stderr
    saved = json.loads(state.read_text())
    assert list(saved["model"]["measured"]) == [str(len(SHARES) - 1)]
    assert saved["model"]["at"] < len(SHARES) - 1


class Planned:
    """What vLLM plans for a step: one token of each sequence."""

    def __init__(self, sequences: int) -> None:
        self.num_scheduled_tokens = {str(at): 1 for at in range(sequences)}
        self.total_num_scheduled_tokens = sequences


def test_tuned_weights_go_elsewhere_from_the_next_start_on(
    offloader: Callable[..., PlacedUVAOffloader], session: Session, tmp_path: Path
) -> None:
    state = tmp_path / "run.json"
    options = {"weight_tune": "step_time", "weight_tune_state": str(state)}
    model = {"tuner": "model", "at": len(SHARES) - 1, "measured": {}}
    state.write_text(json.dumps({"model": model, "load": None}))
    layer = Layer()
    made = offloader(1 << 20, **options)
    made.wrap_modules(iter([layer]))
    made.finish(layer)
    granted = placement_of(layer.mlp.weight.data, session=session).granted
    assert granted == {2: 64 * 256 * 4}, "the state says: all far"
    for _ in range(80):
        step = Planned(2)
        made.step_begins(step)
        made.step_begins(step)  # once more by the base class of the runner
    assert placement_of(layer.mlp.weight.data, session=session).granted == granted
    saved = json.loads(state.read_text())
    assert list(saved["model"]["measured"]) == [str(len(SHARES) - 1)]
    assert saved["model"]["at"] < len(SHARES) - 1, "a tenth of the bandwidth: any other share"
    another = Layer()
    second = offloader(1 << 20, **options)
    second.wrap_modules(iter([another]))
    assert placement_of(another.mlp.weight.data, session=session).granted != granted


def test_patched_runners_tell_the_offloader_of_every_step() -> None:
    assert ("step_begins" in vars(PlacedUVAOffloader)) is True
    seen: list[object] = []

    class Runner:
        def execute_model(self, planned: object, extra: int = 0) -> int:
            seen.append(("executed", planned))
            return extra + 1

    module = types.ModuleType("runner")
    module.Runner = Runner  # type: ignore[attr-defined]
    weight_patch._wrap(module, "Runner", "execute_model", weight_patch._timed)
    assert Runner().execute_model("step", extra=4) == 5
    assert seen == [("executed", "step")]
