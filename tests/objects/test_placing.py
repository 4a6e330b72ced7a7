"""``placing`` and ``place``: where tensors of ordinary torch code are, asked from their pages."""

from __future__ import annotations

import copy
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import cxl_offload
from cxl_offload import Session, load_machine, use
from cxl_offload.memory import FirstTouch

CXL, DRAM = 2, 0


@pytest.fixture
def session() -> Iterator[Session]:
    """Two sockets and a CXL node, simulated; what is left over at the end is a leak."""
    made = Session.simulated(load_machine("epyc9354-cxl-a"))
    with use(made):
        yield made
    made.trim()
    assert made.stats().mapped_bytes.current == 0


def node_of(session: Session, tensor: torch.Tensor) -> int | None:
    """The one node of all bytes of a tensor, by its pages; None: ordinary memory."""
    if session.find(tensor.data_ptr()) is None:
        return None
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))

    nodes = session.bytes_per_node(tensor.data_ptr(), span * tensor.element_size())
    (node,) = nodes
    assert nodes[node] == span * tensor.element_size()
    return node


SOURCE = torch.arange(35.0).reshape(5, 7)
MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(3, 5).fill_(2),
    "zeros": lambda: torch.zeros(33, dtype=torch.bfloat16),
    "ones of another type": lambda: torch.ones(3, dtype=torch.int16),
    "full of integers": lambda: torch.full((3, 3), 7),
    "full of floats": lambda: torch.full((2,), 2.5, dtype=torch.float64),
    "arange": lambda: torch.arange(2, 20, 3),
    "linspace": lambda: torch.linspace(0, 1, 11),
    "eye": lambda: torch.eye(4, 6),
    "randn": lambda: torch.randn(9, generator=torch.Generator().manual_seed(1)),
    "randint": lambda: torch.randint(9, (9,), generator=torch.Generator().manual_seed(1)),
    "randperm": lambda: torch.randperm(9, generator=torch.Generator().manual_seed(1)),
    "a list": lambda: torch.tensor([[1, 2], [3, 4]]),
    "complex": lambda: torch.full((2,), 1 + 2j),
    "clone of strides": lambda: SOURCE.t().clone(),
    "contiguous": lambda: SOURCE.t().contiguous(),
    "half": lambda: SOURCE[:, ::2].half(),
    "channels last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "like": lambda: torch.zeros_like(SOURCE.t()),
    "new": lambda: SOURCE.new_full((3,), 4),
    "deepcopy": lambda: copy.deepcopy(nn.Parameter(SOURCE)).detach(),
    "stack": lambda: torch.stack([SOURCE, SOURCE]),
    "cat": lambda: torch.cat([SOURCE, SOURCE], 1),
    "float8": lambda: SOURCE.to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("name", MAKERS)
def test_factory_and_copy_are_placed_and_otherwise_what_torch_makes(
    name: str, session: Session
) -> None:
    plain = MAKERS[name]()
    with cxl_offload.placing("cxl", min_bytes=1) as scope:
        placed = MAKERS[name]()
    assert node_of(session, placed) == CXL
    assert (placed.shape, placed.stride()) == (plain.shape, plain.stride())
    assert placed.dtype is plain.dtype
    assert torch.equal(
        placed.view(torch.uint8) if placed.dtype.itemsize == 1 else placed,
        plain.view(torch.uint8) if plain.dtype.itemsize == 1 else plain,
    )
    assert scope.left() == ()
    assert node_of(session, torch.zeros(99)) is None


def test_what_is_empty_on_meta_sparse_small_or_of_arithmetic_is_no_tensor_of_the_tier(
    session: Session,
) -> None:
    with cxl_offload.placing("cxl", min_bytes=64) as scope:
        assert torch.zeros(0, 3).shape == (0, 3)
        assert torch.empty(1 << 40, device="meta").is_meta
        assert node_of(session, torch.zeros(15)) is None
        assert node_of(session, torch.zeros(16)) == CXL
        assert node_of(session, torch.zeros(16) + 1) is None
        scope.tensors = 0
        sparse = torch.zeros(8, 8, layout=torch.sparse_coo)
        assert scope.tensors == 0
        (left,) = scope.left()
    assert "torch.sparse_coo" in left.why
    assert sparse.layout is torch.sparse_coo


def test_memory_that_numpy_holds_stays_shared_with_it_and_is_named(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    array = np.ones(2048)
    with caplog.at_level(logging.WARNING), cxl_offload.placing("cxl"):
        tensor = torch.from_numpy(array)
    array[3] = 7
    assert tensor[3] == 7
    assert node_of(session, tensor) is None
    assert "numpy or another library holds its memory" in caplog.text
    assert "(16 KiB)" in caplog.text


def test_module_made_moved_from_meta_halved_and_loaded_is_placed(
    session: Session, tmp_path: Path
) -> None:
    torch.save(nn.Linear(64, 33).state_dict(), tmp_path / "file.pt")
    with cxl_offload.placing("cxl", min_bytes=1) as scope:
        made = nn.Linear(64, 33)
        from_meta = nn.Linear(64, 33, device="meta").to_empty(device="cpu")
        halved = nn.Linear(64, 33).half()
        assigned = nn.Linear(64, 33, device="meta")
        state = torch.load(tmp_path / "file.pt")
        assigned.load_state_dict(state, assign=True)
        buffers = nn.BatchNorm1d(33)
    modules = (made, from_meta, halved, assigned, buffers)
    tensors = [each for m in modules for each in (*m.parameters(), *m.buffers())]
    assert {node_of(session, each) for each in tensors} == {CXL}
    assert all(type(each) is nn.Parameter for m in modules for each in m.parameters())
    assert torch.equal(assigned.weight, torch.load(tmp_path / "file.pt")["weight"])
    made(torch.rand(2, 64)).sum().backward()
    assert made.weight.grad is not None
    assert scope.nbytes >= sum(each.nbytes for each in tensors)


def test_pretrained_model_is_placed(session: Session, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.OPTConfig(
        vocab_size=128,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        word_embed_proj_dim=32,
    )
    plain = transformers.OPTForCausalLM(config)
    plain.save_pretrained(tmp_path)
    with cxl_offload.placing("cxl", min_bytes=1):
        model = transformers.OPTForCausalLM.from_pretrained(tmp_path)
    assert {node_of(session, each) for each in model.parameters()} == {CXL}
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens).logits, plain.eval()(tokens).logits)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight


def test_parameters_that_are_parts_of_a_flat_buffer_stay_parts_of_it(session: Session) -> None:
    flat = torch.zeros(8192)
    with cxl_offload.placing("cxl") as placed:
        module = torch.nn.Module()
        module.first = torch.nn.Parameter(flat[:4096])
        module.rest = torch.nn.Parameter(flat[4096:])
    flat.fill_(3.0)
    assert module.first.eq(3).all()
    assert module.rest.eq(3).all()
    assert [each.why for each in placed.left()] == ["it is a part of a larger tensor"] * 2


def test_inner_block_goes_first_and_an_error_ends_both(session: Session) -> None:
    outer, inner = (cxl_offload.placing(tier, min_bytes=1) for tier in ("cxl", "ldram"))

    def run() -> None:
        with outer:
            with inner:
                assert node_of(session, torch.ones(9)) == DRAM
            assert node_of(session, torch.ones(9)) == CXL
            with inner:
                raise KeyError

    with pytest.raises(KeyError):
        run()
    assert (outer.tensors, inner.tensors) == (1, 1)
    assert node_of(session, torch.ones(9)) is None
    assert node_of(session, nn.Linear(9, 9).weight) is None


def test_other_threads_are_left_alone(session: Session) -> None:
    found = []
    with cxl_offload.placing("cxl", min_bytes=1):
        thread = threading.Thread(
            target=lambda: found.extend([torch.ones(9), nn.Linear(9, 9).weight])
        )
        thread.start()
        thread.join()
    assert [node_of(session, each) for each in found] == [None, None]


def test_forked_child_makes_ordinary_tensors() -> None:
    with cxl_offload.placing(FirstTouch(), min_bytes=1):
        assert torch.ones(9).sum() == 9
        child = os.fork()
        if child == 0:
            session = cxl_offload.current_session()
            tensors = [torch.ones(9), nn.Linear(9, 9).weight]
            os._exit(0 if all(session.find(t.data_ptr()) is None for t in tensors) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_compiled_function_runs_inside_as_it_was_compiled(session: Session) -> None:
    compiled = torch.compile(lambda x: torch.zeros(9) + x, backend="eager")
    with cxl_offload.placing("cxl", min_bytes=1):
        assert torch.equal(compiled(torch.ones(9)), torch.ones(9))
        assert node_of(session, torch.ones(9)) == CXL


def test_full_node_is_named_and_the_block_can_go_on(session: Session) -> None:
    with cxl_offload.placing("cxl") as scope:
        with pytest.raises(MemoryError, match=r"node 2|nodes \{2\}"):
            torch.empty(1 << 38, dtype=torch.uint8)
        assert node_of(session, torch.zeros(4096)) == CXL
    assert scope.tensors == 1


def test_unknown_policy_is_refused_before_the_block(session: Session) -> None:
    with pytest.raises(ValueError, match="nvram"):
        cxl_offload.placing("nvram")


class Experts(nn.Module):
    """Names as models of experts have them, a tie, a buffer, strides and nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 129)
        self.lm_head = nn.Linear(129, 37, bias=False)
        self.lm_head.weight = self.embed.weight
        self.experts = nn.ModuleList(nn.Linear(129, 129) for _ in range(3))
        self.turned = nn.Parameter(torch.rand(129, 77).t())
        self.nothing = nn.Parameter(torch.empty(0, 5))
        self.register_buffer("mask", torch.ones(2000, dtype=torch.bool))


def test_module_moves_by_name_and_kind_and_optimizer_ties_and_values_hold(session: Session) -> None:
    model = Experts()
    before = {name: each.detach().clone() for name, each in model.state_dict().items()}
    identity = {name: id(each) for name, each in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    placements = cxl_offload.place(
        model, {"*.1.*": "ldram", "experts": "cxl", "embedding": "rdram", "mask": "cxl"}
    )
    assert node_of(session, model.experts[0].weight) == CXL
    assert node_of(session, model.experts[1].weight) == DRAM
    assert node_of(session, model.embed.weight) == 1
    assert node_of(session, model.mask) == CXL
    assert node_of(session, model.turned) is None
    assert placements["experts.2.bias"].granted == {CXL: 129 * 4}
    assert "turned" not in placements
    assert {name: id(each) for name, each in model.named_parameters()} == identity
    assert model.lm_head.weight is model.embed.weight
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    model.experts[0].weight.grad = torch.ones(129, 129)
    optimizer.step()
    assert torch.equal(model.experts[0].weight, before["experts.0.weight"] - 0.5)
    assert node_of(session, model.experts[0].weight) == CXL
    model.load_state_dict(before)
    assert node_of(session, model.experts[0].weight) == CXL


def test_placed_tensor_moves_where_it_is_and_its_views_follow(session: Session) -> None:
    model = nn.Module()
    flat = cxl_offload.zeros(8192, policy="ldram")
    model.first, model.second = nn.Parameter(flat[:4096]), nn.Parameter(flat[4096:])
    addresses = [model.first.data_ptr(), model.second.data_ptr()]
    with pytest.raises(ValueError, match="first and second are in one allocation"):
        cxl_offload.place(model, {"first": "cxl", "second": "ldram"})
    assert node_of(session, flat) == DRAM
    cxl_offload.place(model, {"first": "cxl"})
    assert node_of(session, flat) == node_of(session, model.second) == CXL
    assert [model.first.data_ptr(), model.second.data_ptr()] == addresses


def test_strides_and_emptiness_stay(session: Session) -> None:
    model = Experts()
    cxl_offload.place(model, {"turned": "cxl", "nothing": "cxl"})
    assert node_of(session, model.turned) == CXL
    assert (model.turned.shape, model.turned.stride()) == ((77, 129), (1, 77))
    assert model.nothing.shape == (0, 5)


def view_of_a_flat_buffer() -> nn.Module:
    model = nn.Linear(8, 8)
    model.weight.data = torch.zeros(100)[:64].view(8, 8)
    return model


def shared_with_another_parameter() -> nn.Module:
    model = nn.Linear(8, 8)
    model.alias = nn.Parameter(model.weight.data)
    return model


def shared_with_processes() -> nn.Module:
    return nn.Linear(8, 8).share_memory()


def sparse() -> nn.Module:
    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(torch.eye(8).to_sparse())
    return model


@pytest.mark.parametrize(
    ("make", "rules", "says"),
    [
        (lambda: nn.Linear(8, 8, device="meta"), {"weight": "cxl"}, "weight is on meta"),
        (view_of_a_flat_buffer, {"weight": "cxl"}, "shows 256 of the 400 bytes of a buffer"),
        (shared_with_another_parameter, {"weight": "cxl"}, "alias shares its memory with weight"),
        (shared_with_another_parameter, {"alias": "cxl"}, "alias shares its memory with weight"),
        (shared_with_processes, {"*": "cxl"}, "shared with other processes"),
        (sparse, {"weight": "cxl"}, "not plain bytes"),
        (Experts, {"experts.9.*": "cxl"}, "'experts.9.*' means no parameter"),
        (Experts, {"embed.*": "cxl", "lm_head.*": "ldram"}, "are one tensor"),
        (Experts, {"*": "nvram"}, "nvram"),
    ],
)
def test_what_cannot_move_is_refused_before_anything_moves(
    make: Callable[[], nn.Module], rules: dict[str, str], says: str, session: Session
) -> None:
    model = make()
    with pytest.raises(ValueError, match=re.escape(says)) as refused:
        cxl_offload.place(model, rules)
    assert "\n" not in str(refused.value)
    assert session.stats().asked_bytes.current == 0


def test_generator_that_another_thread_closes_ends_its_block(session: Session) -> None:
    opened, closed = threading.Event(), threading.Event()
    found = []

    def opens() -> Iterator[None]:
        with cxl_offload.placing("cxl", session=session):
            yield

    block = opens()

    def work() -> None:
        def is_placed() -> bool:
            return node_of(session, torch.zeros(10_000)) is not None

        next(block)
        found.append(is_placed())
        opened.set()
        closed.wait(30)
        found.append(is_placed())
        with cxl_offload.placing("cxl", session=session):
            found.append(is_placed())
        found.append(is_placed())

    # A thread that ends: what torch knows of its blocks only it can take back.
    working = threading.Thread(target=work)
    working.start()
    assert opened.wait(30)
    block.close()  # type: ignore[attr-defined]
    closed.set()
    working.join()
    assert found == [True, False, True, False]


def test_block_that_was_not_entered_cannot_be_left(session: Session) -> None:
    scope = cxl_offload.placing("cxl")
    with pytest.raises(RuntimeError, match="was not entered"):
        scope.__exit__(None, None, None)
    with scope, pytest.raises(RuntimeError, match="entered already"):
        scope.__enter__()


@pytest.mark.parametrize("wrong", [None, ["a"], "cxl"])
def test_policies_that_are_no_mapping_are_refused(session: Session, wrong: Any) -> None:
    with pytest.raises(TypeError, match="pattern or kind to policy"):
        cxl_offload.place(nn.Linear(2, 2), wrong, session=session)


def test_what_is_no_module_is_refused(session: Session) -> None:
    tensor: Any = torch.ones(4)
    with pytest.raises(TypeError, match="tensors of a module, not a Tensor"):
        cxl_offload.place(tensor, {"*": "cxl"}, session=session)
