"""Hidden states in a tier beside an accelerator that is not there, copied some rows at a time."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cxl_offload import _C
from cxl_offload.integrations.transformers import Offloaded, offload
from cxl_offload.integrations.transformers.current_rows import RowPart
from cxl_offload.integrations.transformers.streamed_states import StateStream
from cxl_offload.integrations.transformers.tier_states import TierStates
from cxl_offload.integrations.transformers.weights import store_for
from cxl_offload.memory import Bind, Session
from cxl_offload.transfer import CopyHandle

from .conftest import machine
from .fake_accelerator import (
    COMPUTE,
    ORDER,
    FakeCopies,
    LateCopies,
    UnfencedCopies,
    fake_accelerator,
    pinning_session,
)
from .models import FAMILIES, ONLY_EAGER, generate, make, prompts

FAR = {"weights": "bind:2", "kv": "bind:0", "activations": "bind:1"}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "fixed cache": {"cache_implementation": "static"},
}
WIDTH, PROMPT, NEW = 64, 20, 10
HIDDEN = 4 * WIDTH * 4
"""Bytes of the hidden states of one token of four rows."""


@pytest.fixture
def session(driver: _C.FakeDriver) -> Iterator[Session]:
    with pinning_session(machine(), driver) as session:
        yield session


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_stock(
    family: str, way: str, session: Session, accelerator: str
) -> None:
    """Four rows, or twelve beams, three at a time."""
    model, options = make(family), WAYS[way]
    stock = generate(model, "eager" if family in ONLY_EAGER else "sdpa", **options)
    with offload(model, FAR, rows_at_once=3, accelerator=accelerator, session=session) as done:
        tokens = generate(model, **options)
        assert done.streamed_states is not None
        assert done.streamed_states.copied_out_bytes > 0
    assert torch.equal(tokens, stock)
    use = done.store.use()[("activations", "host")]
    assert use.granted.keys() == {1}
    assert use.live_bytes == 0


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("there", [(), ("embedding",), ("norm", "head"), ("embedding", "head")])
def test_every_layer_copies_the_rows_of_a_pass_in_once_and_out_once(
    there: Sequence[str], rows: int, session: Session, accelerator: str
) -> None:
    """Also the final norm; the head reads one token of each row, and looks at no other."""
    model = make("llama")
    stock = generate(model, "sdpa")
    policies = {**FAR, **dict.fromkeys(there, "gpu")}
    with offload(model, policies, rows_at_once=rows, accelerator="cuda", session=session) as done:
        tokens = generate(model)
        states = done.streamed_states
    assert torch.equal(tokens, stock)
    assert states is not None
    computed = PROMPT + NEW - 1
    modules = model.config.num_hidden_layers + 1
    found = "embedding" in there  # by the accelerator
    assert states.copied_in_bytes == HIDDEN * (modules * computed + NEW)
    assert states.copied_out_bytes == HIDDEN * (modules + found) * computed
    peak = done.store.use()[("activations", "host")].peak_bytes
    assert 2 * HIDDEN * PROMPT <= peak <= 3 * HIDDEN * PROMPT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types_compute_as_on_the_cpu(
    dtype: torch.dtype, session: Session, accelerator: str
) -> None:
    model = make("gemma3", dtype)
    with offload(model, FAR, rows_at_once=3, session=session):
        expected = generate(model)
    with offload(model, FAR, rows_at_once=3, accelerator=accelerator, session=session):
        assert torch.equal(generate(model), expected)


@pytest.mark.parametrize("options", [{"accelerator_kv": 0.4}, {"kv_dtype": torch.float8_e4m3fn}])
def test_caches_of_other_kinds_compute_as_without(
    options: dict[str, Any], session: Session, accelerator: str
) -> None:
    model = make("llama")
    asked = {"rows_at_once": 3, "accelerator": accelerator, "session": session, **options}
    without = {kind: policy for kind, policy in FAR.items() if kind != "activations"}
    with offload(model, without, **asked):
        expected = generate(model)
    with offload(model, FAR, **asked):
        assert torch.equal(generate(model), expected)


def test_batch_of_one_part_stays_on_the_accelerator(session: Session, accelerator: str) -> None:
    model = make("llama")
    with offload(model, FAR, rows_at_once=4, accelerator=accelerator, session=session) as done:
        tokens = generate(model)
        assert done.streamed_states is not None
        assert done.streamed_states.copied_in_bytes == 0
    assert torch.equal(tokens, generate(model, "sdpa"))


def test_policy_of_the_accelerator_copies_nothing(session: Session, accelerator: str) -> None:
    model, policies = make("llama"), {**FAR, "activations": "gpu"}
    with offload(model, policies, rows_at_once=3, accelerator="cuda", session=session) as done:
        tokens = generate(model)
        assert done.streamed_states is None
    assert torch.equal(tokens, generate(model, "sdpa"))


def test_hidden_states_and_attentions_that_are_asked_for_are_those_of_stock(
    session: Session, accelerator: str
) -> None:
    model = make("llama")
    model.set_attn_implementation("eager")
    options = {"output_hidden_states": True, "output_attentions": True, "max_new_tokens": 3}
    stock = generate(model, **options, return_dict_in_generate=True)
    with offload(model, FAR, rows_at_once=3, accelerator=accelerator, session=session):
        ours = generate(model, **options, return_dict_in_generate=True)
    assert torch.equal(ours.sequences, stock.sequences)
    for name in ("hidden_states", "attentions"):
        for steps in zip(ours[name], stock[name], strict=True):
            for one, two in zip(*steps, strict=True):
                torch.testing.assert_close(torch.cat([one]), two)  # read by an operator


# What the accelerator has ------------------------------------------------------------------------


class StatesThere(TorchDispatchMode):
    """Counts the memory of ``(rows, tokens, width)`` outside of the tiers: on the accelerator."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._users: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if not isinstance(each, torch.Tensor) or isinstance(each, TierStates):
                continue
            if each.dim() == 3 and each.shape[-1] == WIDTH:
                self._count(each)
        return made

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if self._session.find(at) is not None:
            return
        self._users[at] += 1
        self._sizes[at] = storage.nbytes()
        weakref.finalize(tensor, self._forget, at)
        self.peak_bytes = max(self.peak_bytes, sum(self._sizes.values()))

    def _forget(self, at: int) -> None:
        self._users[at] -= 1
        if not self._users[at]:
            del self._sizes[at]


def most_there(rows: int, policies: dict[str, str], session: Session) -> tuple[int, Offloaded]:
    model, count = make("llama"), StatesThere(session)
    with (
        offload(model, policies, rows_at_once=2, accelerator="cuda", session=session) as done,
        count,
    ):
        generate(model, **prompts(rows))
    return count.peak_bytes, done


@pytest.mark.slow(reason="generates with many rows")
@pytest.mark.parametrize("there", [(), ("embedding", "head", "norm")])
def test_memory_on_the_accelerator_does_not_grow_with_the_rows(
    there: Sequence[str], session: Session, accelerator: str
) -> None:
    """The control has no policy of activations, and all of them there."""
    policies = {**FAR, **dict.fromkeys(there, "gpu")}
    few, _ = most_there(4, policies, session)
    many, done = most_there(16, policies, session)
    assert 0 < many == few
    at_once = 2 * PROMPT * WIDTH * 4
    assert many <= 12 * at_once
    assert done.store.use()[("activations", "host")].peak_bytes >= 16 * at_once
    del policies["activations"]
    few, _ = most_there(4, policies, session)
    many, _ = most_there(16, policies, session)
    assert many > few + 8 * at_once


# Order -------------------------------------------------------------------------------------------


class Damaging(FakeCopies):
    def copy_back(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> CopyHandle:
        handle = super().copy_back(target, source, after)
        handle.wait()
        target.mul_(-1)
        return handle


class Unordered(FakeCopies):
    """Rows are copied to the next layer before they are there."""

    def behind(self, handle: CopyHandle) -> int:
        return ORDER


class Overwriting(FakeCopies):
    """Layers write to a buffer that is still being copied back."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._back: list[CopyHandle] = []

    def copy_back(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> CopyHandle:
        self._back.append(super().copy_back(target, source, after))
        return self._back[-1]

    def wait_for(self, handle: CopyHandle) -> None:
        if not any(handle is each for each in self._back):
            super().wait_for(handle)

    def close(self) -> None:
        self._back.clear()
        super().close()


@pytest.mark.parametrize("kind", [FakeCopies, Damaging, Unordered, Overwriting])
def test_damaged_or_disordered_hidden_states_change_the_tokens(
    kind: type[FakeCopies],
    monkeypatch: pytest.MonkeyPatch,
    session: Session,
    driver: _C.FakeDriver,
) -> None:
    fake_accelerator(monkeypatch, lambda session: kind(session, driver))
    model = make("llama")
    stock = generate(model, "sdpa")
    with offload(model, FAR, rows_at_once=1, accelerator="cuda", session=session):
        tokens = generate(model)
    assert torch.equal(tokens, stock) is (kind is FakeCopies)


@pytest.mark.parametrize("kind", [LateCopies, UnfencedCopies])
def test_rows_are_never_overwritten_while_work_that_reads_them_waits(
    kind: type[LateCopies], session: Session, driver: _C.FakeDriver
) -> None:
    """The control copies without waiting for readers, and is found out."""
    copies = kind(session, driver)
    stream = StateStream(copies, store_for({"activations": Bind((1,))}, session, pin=True), 2)
    states = TierStates(stream.host_memory((7, 3, 5), torch.float32), stream)
    states.host.copy_(torch.arange(7.0).reshape(7, 1, 1).expand(7, 3, 5))
    parts = [RowPart(begin, min(begin + 2, 7), 7) for begin in range(0, 7, 2)]
    found = []
    for part in parts * 2:
        view = stream.rows(states, part)
        seen = torch.zeros(view.shape)
        driver.copy(
            target=seen.data_ptr(), source=view.data_ptr(), nbytes=view.nbytes, stream=COMPUTE
        )
        found.append((part, seen))
    assert copies.engine._core is not None
    for each in copies.engine._core.streams:  # copies run as early as they may
        driver.finish(each)
    driver.finish(COMPUTE)
    right = [torch.equal(seen, states.host[part.rows]) for part, seen in found]
    assert all(right) is (kind is LateCopies), right
    stream.close()
    copies.close()


def test_end_of_a_pass_waits_for_its_own_copies_only(
    session: Session, driver: _C.FakeDriver
) -> None:
    """The first weights of the next token are on their way, and stay there."""
    copies = LateCopies(session, driver)
    store = store_for({"activations": Bind((1,)), "mlp": Bind((2,))}, session, pin=True)
    weight = store.empty("mlp", 0, (1 << 10,), torch.float32, pin=True)
    stream = StateStream(copies, store, 2)
    states = TierStates(stream.host_memory((4, 3, 5), torch.float32), stream)
    states.host.fill_(1.0)
    view = stream.rows(states, RowPart(0, 2, 4))
    made = stream.whole(view, 4)
    stream.keep(made, RowPart(0, 2, 4), view, here=False)
    stream.keep(made, RowPart(2, 4, 4), view, here=False)
    back = list(made.coming.values())
    ahead = copies.copy(torch.zeros_like(weight), weight, (COMPUTE,))
    stream.end()
    assert all(each.query() for each in back)
    assert not ahead.query()
    copies.engine.drain()  # the control, which waits for all
    assert ahead.query()
    stream.close()
    copies.close()
    del back, ahead
