"""Whatever happens, nothing is left: memory, threads, files, FlexGen's globals."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import flexgen.compression
import flexgen.flex_opt
import flexgen.pytorch_backend
import numpy as np
import pytest
import torch
from flexgen.pytorch_backend import TorchDevice

from cxl_offload.integrations.flexgen import FlexGenRun, LoadedModel, run
from cxl_offload.integrations.flexgen.devices import TierDisk
from cxl_offload.integrations.flexgen.lm import TieredOptLM
from cxl_offload.memory import Session
from cxl_offload.ops import shared_cpus

from ..always_shared import always_shared

FOUR = {
    "percent": (25, 50, 25, 50, 0, 100),
    "cpu_cache_compute": True,
    "place": {"weights": "split:ldram=50,cxl=50", "kv": "split:rdram=50,cxl=50"},
}


def _globals() -> dict[str, Any]:
    modules = (flexgen.flex_opt, flexgen.pytorch_backend, flexgen.compression)
    names = ("torch", "general_copy", "init_weight_list", "SelfAttention")
    names += ("global_cpu_device", "global_disk_device")
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in modules
        for name in names
        if hasattr(module, name)
    }


def _assert_nothing_left(session: Session, before: dict[str, Any], offload: Path) -> None:
    assert session.stats().asked_bytes.current == 0
    assert _globals() == before
    assert not offload.exists()
    assert not [t for t in threading.enumerate() if t.name.startswith("cxl_offload-flexgen")]


def test_run_leaves_nothing(request_tiny: FlexGenRun, session: Session, offload_dir: Path) -> None:
    before = _globals()

    run(replace(request_tiny, **FOUR), session=session)

    _assert_nothing_left(session, before, offload_dir)
    assert session.stats().asked_bytes.total > 0


def test_report_says_that_other_programs_wanted_the_cpus(
    request_tiny: FlexGenRun, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_cpus, "_watch", always_shared)
    (note,) = run(request_tiny, session=session).notes
    assert note.startswith("other programs wanted this one's CPUs for")


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["compute_layer", "load_cache", "store_cache", "load_weight"])
def test_generation_that_raises_midway_leaves_nothing(
    method: str,
    kind: type[BaseException],
    request_tiny: FlexGenRun,
    session: Session,
    offload_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = _globals()
    inner: Callable[..., None] = getattr(TieredOptLM, method)

    def fails_later(self: TieredOptLM, i: int, j: int, k: int, *rest: Any) -> None:
        inner(self, i, j, k, *rest)
        if (i, j) == (2, 4):
            raise kind("midway")

    monkeypatch.setattr(TieredOptLM, method, fails_later)
    gc.disable()  # nothing may need the collector to be given back
    try:
        with pytest.raises(kind) as raised:
            run(replace(request_tiny, **FOUR), session=session)
        assert raised.value.__traceback__ is not None
        _assert_nothing_left(session, before, offload_dir)
    finally:
        gc.enable()


def test_attention_that_raises_inside_flexgen_leaves_nothing(
    request_tiny: FlexGenRun, session: Session, offload_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views of the cache are then locals of FlexGen's own frames."""
    before = _globals()

    def fails(*_: Any) -> None:
        raise RuntimeError("in attention")

    monkeypatch.setattr(TorchDevice, "_attention_weights", fails)
    with pytest.raises(RuntimeError, match="in attention"):
        run(replace(request_tiny, **FOUR), session=session)

    _assert_nothing_left(session, before, offload_dir)


def test_loading_that_raises_midway_leaves_nothing(
    request_tiny: FlexGenRun, session: Session, offload_dir: Path
) -> None:
    before = _globals()

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "load" and done == total // 2:
            assert session.stats().asked_bytes.current > 0
            raise RuntimeError("loading")

    with pytest.raises(RuntimeError, match="loading"):
        run(replace(request_tiny, **FOUR), session=session, progress=stop)

    _assert_nothing_left(session, before, offload_dir)


def test_error_in_a_copy_thread_is_raised_and_nothing_hangs(
    request_tiny: FlexGenRun, session: Session, offload_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _globals()
    calls = iter(range(10**6))

    def fails(_: Any, *__: Any) -> None:
        if next(calls) == 20:
            raise OSError(5, "the disk is gone")

    monkeypatch.setattr(
        "cxl_offload.integrations.flexgen.copies.HostCopies.move_from_disk_thread", fails
    )
    with pytest.raises(OSError, match="the disk is gone"):
        run(replace(request_tiny, **FOUR), session=session)

    _assert_nothing_left(session, before, offload_dir)


def test_full_disk_is_refused(
    request_tiny: FlexGenRun, session: Session, offload_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _globals()

    def none_left(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", none_left)
    with pytest.raises(OSError, match="No space left"):
        run(replace(request_tiny, **FOUR), session=session)

    _assert_nothing_left(session, before, offload_dir)


def test_threads_exist_only_with_a_disk_share(request_tiny: FlexGenRun, session: Session) -> None:
    def threads(request: FlexGenRun) -> int:
        most = 0

        def look(_: int) -> None:
            nonlocal most
            names = [thread.name for thread in threading.enumerate()]
            most = max(most, sum(name.startswith("cxl_offload-flexgen") for name in names))

        with LoadedModel(request, session=session) as loaded:
            loaded.generate(token_begins=look)
        return most

    assert threads(request_tiny) == 0
    assert threads(replace(request_tiny, **FOUR)) == TierDisk.COPY_THREADS


def test_no_relay_buffer_is_ever_allocated(
    request_tiny: FlexGenRun, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexGen's own copy threads take 2 GiB each before the first copy."""
    largest = 0
    allocate = torch.empty

    def watch(*size: Any, **options: Any) -> torch.Tensor:
        nonlocal largest
        tensor = allocate(*size, **options)
        largest = max(largest, tensor.nbytes)
        assert not options.get("pin_memory")
        return tensor

    monkeypatch.setattr(torch, "empty", watch)
    run(replace(request_tiny, **FOUR), session=session)

    assert 0 < largest < 1 << 20


def test_second_run_at_the_same_time_is_refused(request_tiny: FlexGenRun, session: Session) -> None:
    with LoadedModel(request_tiny, session=session) as loaded:
        with pytest.raises(RuntimeError, match="another FlexGen run"):
            run(request_tiny, session=session)
        tokens = loaded.generate().tokens

    np.testing.assert_array_equal(run(request_tiny, session=session).tokens, tokens)


def test_torch_itself_is_never_changed(request_tiny: FlexGenRun, session: Session) -> None:
    watched = (torch.empty, torch.cuda.Stream, torch.cuda.synchronize, torch.Tensor.cuda)

    with LoadedModel(request_tiny, session=session) as loaded:
        loaded.generate(
            token_begins=lambda _: _same(
                watched,
                (torch.empty, torch.cuda.Stream, torch.cuda.synchronize, torch.Tensor.cuda),
            )
        )


def _same(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    assert all(a is b for a, b in zip(first, second, strict=True))


def test_session_outside_its_block_has_no_model(request_tiny: FlexGenRun, session: Session) -> None:
    loaded = LoadedModel(request_tiny, session=session)
    with pytest.raises(RuntimeError, match="not open"):
        loaded.generate()
    with loaded:
        loaded.generate()
    with pytest.raises(RuntimeError, match="not open"):
        loaded.generate()


def test_offload_folder_that_was_there_is_kept_empty(
    request_tiny: FlexGenRun, session: Session, tmp_path: Path
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "note").write_text("keep")

    run(replace(request_tiny, offload_dir=str(folder), **FOUR), session=session)

    assert [file.name for file in folder.iterdir()] == ["note"]
