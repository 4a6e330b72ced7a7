"""What differs with a GPU, on stand-ins: pinning, streams, fences and the bounded relay."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flexgen.pytorch_backend import DeviceType, TorchTensor
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.integrations.flexgen import FlexGenRun
from cxl_offload.integrations.flexgen.copies import RELAY_BYTES, CudaCopies, relay_copy
from cxl_offload.integrations.flexgen.devices import HostDevice
from cxl_offload.integrations.flexgen.layout import lay_out
from cxl_offload.integrations.flexgen.model import resolve_model
from cxl_offload.integrations.flexgen.places import KINDS
from cxl_offload.memory import Bind, FirstTouch, Policy, Session
from cxl_offload.objects.kind_store import MemorySource, Part, TierStore

from .conftest import machine


class _Asked:
    """A source of tensors that notes what was asked to be pinned."""

    def __init__(self) -> None:
        self.pins: list[tuple[tuple[int, ...], bool]] = []

    def empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, policy: Policy, *, pin: bool
    ) -> torch.Tensor:
        self.pins.append((shape, pin))
        return torch.empty(shape, dtype=dtype)

    def bytes_per_node(self, address: int, nbytes: int) -> dict[int, int]:
        return {0: nbytes}


def _host(*, cuda: bool) -> tuple[HostDevice, _Asked]:
    source = _Asked()
    parts = {kind: (Part("host", Bind((0,))),) for kind in KINDS}
    return HostDevice(TierStore(source, parts, pin=cuda)), source


@pytest.mark.parametrize("cuda", [True, False])
def test_what_the_gpu_copies_from_and_to_is_pinned_with_cuda_only(cuda: bool) -> None:
    """FlexGen hangs when the home of activations is not pinned."""
    import numpy as np

    host, source = _host(cuda=cuda)
    config = SimpleNamespace(n_head=2, input_dim=8)
    task = SimpleNamespace(prompt_len=3, gen_len=2)
    policy = SimpleNamespace(
        gpu_batch_size=5,
        compress_cache=False,
        sep_layer=True,
        overlap=True,
        num_gpu_batches=2,
    )

    host.allocate((1, 7), np.float16)  # an activation
    with host.as_kind("weights"):
        host.allocate((2, 7), np.float16, pin_memory=True)
        host.allocate((3, 7), np.float16, pin_memory=False)  # --pin-weight 0
    host.init_cache_one_gpu_batch(config, task, policy)
    host.init_attention_compute_workspace(config, task, policy)

    cache, workspace = (4, 10, 4), (4, 10, 4)
    assert source.pins == [
        ((1, 7), cuda),
        ((2, 7), cuda),
        ((3, 7), False),
        (cache, cuda),
        (cache, cuda),
        *[(workspace, False)] * 4,
    ]


@pytest.mark.parametrize(("accelerator", "policy"), [("cuda", "preferred:0"), ("host", "first")])
def test_what_no_rule_places_can_be_pinned(
    request_tiny: FlexGenRun, accelerator: Any, policy: str
) -> None:
    """First touch cannot: pinning is the touch."""
    request = replace(request_tiny, accelerator=accelerator, place={"kv": "bind:cxl"})
    config = resolve_model(request.model, None).config
    layout = lay_out(request, config, 12, machine())
    assert str(layout.parts["weights"][0].policy).startswith(policy)
    assert str(layout.parts["kv"][0].policy) == "bind:2"


class _Tensor:
    """Enough of a tensor on either side of the link."""

    def __init__(self, name: str, *, cuda: bool, pinned: bool = False) -> None:
        self.name, self.is_cuda, self._pinned = name, cuda, pinned
        self.copies: list[tuple[str, bool]] = []

    def is_pinned(self) -> bool:
        return self._pinned

    def copy_(self, source: Any, non_blocking: bool = False) -> None:
        self.copies.append((source.name, non_blocking))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Tensors and streams told to the pool; the current stream is number 77."""
    monkeypatch.setattr("torch.cuda.current_stream", lambda: SimpleNamespace(cuda_stream=77))
    return []


@pytest.mark.parametrize("to_gpu", [True, False])
def test_copy_of_pinned_memory_is_asynchronous_and_fences_its_reuse(
    to_gpu: bool, streams: list[tuple[str, int]]
) -> None:
    copies = CudaCopies(lambda tensor, stream: streams.append((tensor.name, stream)))  # type: ignore[attr-defined]
    gpu, host = _Tensor("gpu", cuda=True), _Tensor("host", cuda=False, pinned=True)
    dst, src = (gpu, host) if to_gpu else (host, gpu)

    copies.move(dst, src, "h2d" if to_gpu else "d2h")  # type: ignore[arg-type]

    assert dst.copies == [(src.name, True)]
    assert streams == [("host", 77)]


def test_copy_of_pageable_memory_waits(streams: list[tuple[str, int]]) -> None:
    copies = CudaCopies(lambda tensor, stream: streams.append((tensor.name, stream)))  # type: ignore[attr-defined]
    gpu, host = _Tensor("gpu", cuda=True), _Tensor("host", cuda=False)

    copies.move(gpu, host, "h2d")  # type: ignore[arg-type]

    assert gpu.copies == [("host", False)]
    assert streams == []


def test_pinned_memory_is_reused_only_after_the_streams_work() -> None:
    from cxl_offload._C import FakeDriver, linux_kernel

    driver = FakeDriver()
    session = Session(linux_kernel(), Session.linux().machine, driver=driver)
    source = MemorySource(session)
    policy = Bind((session.kernel.local_node,))
    first = source.empty((1 << 16,), torch.uint8, policy, pin=True)
    address = first.data_ptr()
    driver.launch(77)
    source.record_stream(first[100:200], 77)
    del first

    busy = source.empty((1 << 16,), torch.uint8, policy, pin=True)
    driver.finish(77)
    done = source.empty((1 << 16,), torch.uint8, policy, pin=True)

    assert busy.data_ptr() != address
    assert done.data_ptr() == address


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    relay_bytes=st.integers(1, 200),
    transposed=st.booleans(),
)
def test_relay_copies_everything_whatever_its_size(
    shape: list[int], relay_bytes: int, transposed: bool
) -> None:
    source = torch.randn(shape)
    if transposed and len(shape) > 1:
        source = source.transpose(0, 1)
    target = torch.full(source.shape, float("nan"))

    relay_copy(target, source, torch.zeros(relay_bytes // 4 * 4, dtype=torch.uint8))

    assert torch.equal(target, source)


def test_relay_is_a_small_part_of_flexgens() -> None:
    assert 4 * RELAY_BYTES <= 256 << 20


def test_first_touch_tensors_are_touched_by_the_thread_that_allocates() -> None:
    source = _Asked()
    store = TierStore(source, {"act": (Part("host", FirstTouch()),)}, pin=False)

    tensor = store.empty("act", 0, (3, 5), torch.bool, pin=False)

    assert not tensor.any()


def test_counted_bytes_follow_the_life_of_their_owner() -> None:
    host, _ = _host(cuda=False)
    import numpy as np

    first = host.allocate((1000,), np.float16)
    second = host.allocate((500,), np.float16)
    del first
    third: TorchTensor = host.allocate((200,), np.float16)

    use = host.store.use()["act", "host"]
    assert (use.live_bytes, use.peak_bytes, use.granted) == (1400, 3000, {0: 3000})
    assert second.device.device_type == third.device.device_type == DeviceType.CPU


def test_request_asks_for_cuda_by_name(tmp_path: Any) -> None:
    request = FlexGenRun(model=str(tmp_path), token_ids=((5,),) * 4, accelerator="cuda")

    request.check()

    assert request.rows == 4
