"""Tensors with a copy on each of several nodes: where they lie, who writes them, who refuses."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import cxl_offload
from cxl_offload import _C
from cxl_offload.errors import MemoryLostError
from cxl_offload.memory import Bind, Replicate, Session, parse_policy, survive_memory_errors, use
from cxl_offload.ops.optimizer import OnePassOptimizer
from cxl_offload.tensor import copies_of, from_tensor, full, placement_of, write_copies, zeros
from cxl_offload.transfer import HostCopier

from .failures import lose
from .machines import GIB, KIB, simulated_machine, simulated_memory

PAGE = os.sysconf("SC_PAGE_SIZE")
COPIES = "replicate:1,0"


@pytest.fixture
def nodes() -> Iterator[Session]:
    session = simulated_memory()
    with use(session):
        yield session
    gc.collect()  # errors that were raised hold what they were about
    session.trim()
    assert session.stats().mapped_bytes.current == 0
    assert not _C.any_copies()


def test_policy_reads_as_it_prints() -> None:
    machine = simulated_machine()
    assert parse_policy("replicate:rdram,0", machine) == Replicate((1, 0))
    assert str(Replicate((1, 0))) == COPIES


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("replicate:0", "two nodes or more; bind:0"),
        ("replicate:0,0", "name a node twice"),
        ("replicate:", "neither a node id nor a tier"),
        ("replicate:0,1@64KiB", "only interleave and weighted have a granule"),
    ],
)
def test_policy_of_fewer_than_two_nodes_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_policy(text, simulated_machine())


@pytest.mark.parametrize("nbytes", [200, 100 * KIB])
def test_every_node_has_a_whole_copy_and_is_charged_for_it(nodes: Session, nbytes: int) -> None:
    tensor = cxl_offload.empty(nbytes, dtype=torch.uint8, policy=COPIES)
    first, second = copies_of(tensor)
    assert first is tensor
    assert nodes.bytes_per_node(first.data_ptr(), nbytes) == {1: nbytes}
    assert nodes.bytes_per_node(second.data_ptr(), nbytes) == {0: nbytes}
    assert placement_of(tensor).granted == {0: nbytes, 1: nbytes}
    assert placement_of(tensor[: nbytes // 2]).nbytes == nbytes // 2 * 2
    assert all(use.current_bytes >= nbytes for use in nodes.stats().nodes.values())


def test_ordinary_tensors_are_their_only_copy(nodes: Session) -> None:
    for tensor in (torch.ones(3), zeros(3, policy="bind:0"), torch.ones(0)):
        assert copies_of(tensor) == (tensor,)
        assert write_copies(tensor, torch.zeros(tensor.shape)) is tensor
        assert not tensor.any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: from_tensor(torch.arange(5000.0).view(50, 100), policy=COPIES),
        lambda: full((50, 100), 7.0, policy=COPIES),
        lambda: zeros(50, 100, policy=COPIES),
        lambda: write_copies(cxl_offload.empty(50, 100, policy=COPIES), torch.randn(50, 1)),
    ],
)
def test_what_the_package_writes_is_in_every_copy(
    nodes: Session, make: Callable[[], torch.Tensor]
) -> None:
    _, second = copies_of(tensor := make())
    assert torch.equal(tensor, second)


def test_a_view_is_written_in_every_copy_and_nothing_beside_it(nodes: Session) -> None:
    tensor = zeros(6, 8, policy=COPIES)
    write_copies(tensor[1:4, ::2], torch.ones(3, 4))
    expected = torch.zeros(6, 8)
    expected[1:4, ::2] = 1
    assert all(torch.equal(copy, expected) for copy in copies_of(tensor))


def test_what_torch_wrote_in_place_reaches_the_others_when_asked(nodes: Session) -> None:
    tensor = zeros(4000, policy=COPIES)
    tensor.add_(1)
    _, second = copies_of(tensor)
    assert not second.any()
    write_copies(tensor)
    assert torch.equal(tensor, second)


def test_a_parameter_has_the_copies_of_its_data(nodes: Session) -> None:
    layer = torch.nn.Linear(64, 64)
    layer.weight.data = from_tensor(layer.weight, policy=COPIES)
    write_copies(layer.weight, torch.ones(64, 64))
    assert all(copy.eq(1).all() for copy in copies_of(layer.weight.detach()))


def test_node_without_room_is_named_and_nothing_is_left(nodes: Session) -> None:
    with pytest.raises(MemoryError, match=r"copy on each of nodes \{0,2\}.*node 2 has 4 GiB free"):
        nodes.allocate(5 * GIB, "replicate:0,2")
    assert nodes.stats().nodes[0].current_bytes == 0


def test_capacity_of_a_node_holds_for_its_copy() -> None:
    session = Session.simulated(simulated_machine(), limits={1: 4 * PAGE})
    session.allocate(4 * PAGE, COPIES)
    with pytest.raises(MemoryError, match="node 1"):
        session.allocate(8 * PAGE, COPIES)


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (lambda s, t: cxl_offload.move(t, "bind:0"), "which do not move"),
        (lambda s, t: s.move_part(s.find(t.data_ptr()), Bind((0,)), offset=0, nbytes=PAGE), "move"),
        (lambda s, t: cxl_offload.move(from_tensor(t, policy="bind:2"), COPIES), "stay one"),
        (lambda s, t: cxl_offload.empty(9, policy=COPIES, pin=True), "pin"),
        (lambda s, t: t.untyped_storage().resize_(1 << 22), "resiz"),
    ],
)
def test_what_copies_cannot_do_is_refused(
    nodes: Session, refused: Callable[[Session, torch.Tensor], object], why: str
) -> None:
    nodes._driver = _C.FakeDriver()
    tensor = zeros(40000, policy=COPIES)
    with pytest.raises((ValueError, RuntimeError), match=why):
        refused(nodes, tensor)
    assert placement_of(tensor).granted == {0: tensor.nbytes, 1: tensor.nbytes}


def _optimizer(**options: object) -> torch.optim.Optimizer:
    return cxl_offload.CPUAdam([torch.nn.Parameter(torch.ones(9))], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        (lambda: _optimizer(policy=COPIES), "optimizer states"),
        (lambda: cxl_offload.offload_optimizer(_optimizer(), COPIES), "optimizer states"),
        (lambda: cxl_offload.offload_optimizer(_optimizer(), {"exp_avg": COPIES}), "exp_avg"),
        (lambda: cxl_offload.offload_activations(COPIES), "activations"),
        (lambda: cxl_offload.placing(COPIES), "what torch writes"),
        (lambda: cxl_offload.place(torch.nn.Linear(3, 3), {"mlp": COPIES}), "mlp"),
    ],
)
def test_who_writes_in_place_refuses_copies(
    nodes: Session, refused: Callable[[], object], kind: str
) -> None:
    with pytest.raises(ValueError, match=rf"replicate:1,0: .*{kind}.* cannot have copies"):
        refused()


@pytest.mark.parametrize("make", [cxl_offload.CPUAdam, cxl_offload.CPUAdagrad, cxl_offload.CPULion])
@pytest.mark.parametrize("which", [0, 1])
def test_optimizers_refuse_weights_with_copies_before_anything_is_written(
    nodes: Session, make: type[OnePassOptimizer], which: int
) -> None:
    copies = copies_of(full((64,), 2.0, policy=COPIES))
    plain, copied = torch.nn.Parameter(torch.ones(9)), torch.nn.Parameter(copies[which])
    optimizer = make([plain, copied])
    with pytest.raises(ValueError, match=r"shape \(64,\) has copies on several nodes") as refused:
        train(optimizer, plain, copied)
    assert "\n" not in str(refused.value)
    assert all(copy.eq(2).all() for copy in copies)
    assert plain.eq(1).all()


def train(optimizer: torch.optim.Optimizer, *params: torch.Tensor) -> None:
    torch.stack([param.sum() for param in params]).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def test_a_host_copier_refuses_a_target_with_copies(nodes: Session) -> None:
    tensor = zeros(4, 4, policy=COPIES)
    for copy in copies_of(tensor):
        with pytest.raises(ValueError, match="copy to a tensor with copies"):
            HostCopier().copy_strided(target=copy, source=torch.ones(4, 4))
    assert not tensor.any()


def test_shared_regions_refuse_copies(tmp_path: Path) -> None:
    with (
        use(Session.linux()),
        pytest.raises(ValueError, match="a shared region cannot have copies"),
    ):
        cxl_offload.SharedRegion("copies", PAGE, Replicate((0, 1)), root=str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_copy_lives_as_long_as_who_holds_it(nodes: Session) -> None:
    tensor = full((3000,), 5.0, policy=COPIES)
    _, second = copies_of(tensor)
    del tensor
    assert second.eq(5).all()
    assert copies_of(second) == (second,)


def test_a_forked_child_reads_every_copy(nodes: Session) -> None:
    tensor = full((3000,), 5.0, policy=COPIES)
    _, second = copies_of(tensor)
    child = os.fork()
    if child == 0:
        whole = bool(second.eq(5).all()) and bool(tensor.eq(5).all())
        os._exit(0 if whole and copies_of(tensor) == (tensor,) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("differ", [False, True])
def test_a_lost_page_is_copied_from_the_first_node_where_the_rest_is_equal(
    nodes: Session, differ: bool
) -> None:
    tensor = from_tensor(torch.arange(20000.0), policy=COPIES)
    if differ:
        tensor[-1] = 3.0  # in place: the copies differ
    expected = tensor.clone()
    damaged = copies_of(tensor)[1]
    with survive_memory_errors(interrupt=False):
        lose(damaged.data_ptr() + 3 * PAGE)
        with pytest.raises(MemoryLostError) as raised:
            from_tensor(damaged, policy="bind:0")
        assert raised.value.is_whole is not differ
        if not differ:
            assert all(torch.equal(copy, expected) for copy in copies_of(tensor))


@pytest.mark.parametrize("elements", [PAGE // 4, 20000])
def test_a_lost_page_of_the_first_copy_is_lost_because_torch_may_have_written_it(
    nodes: Session, elements: int
) -> None:
    tensor = zeros(elements, policy=COPIES)
    tensor[5] = 7.0  # in place, in the page that is lost
    with survive_memory_errors(interrupt=False):
        lose(tensor.data_ptr())
        for _ in range(2):
            with pytest.raises(MemoryLostError, match="on node 1 are lost; write") as raised:
                from_tensor(tensor, policy="bind:0")
            assert not raised.value.is_whole
        write_copies(tensor, copies_of(tensor)[1])  # by who knows that nobody wrote
        assert not from_tensor(tensor, policy="bind:0").any()


class Ours(torch.Tensor):
    """A subclass whose memory is its values."""


class OurParameter(torch.nn.Parameter):
    """As those of other libraries."""


@pytest.mark.parametrize(
    "changed",
    [
        lambda tensor: tensor.as_subclass(Ours),
        OurParameter,
        lambda tensor: torch.Tensor._make_subclass(OurParameter, tensor, False),
        lambda tensor: torch.nn.Parameter(tensor),
        lambda tensor: tensor.t(),
    ],
)
def test_a_subclass_is_written_in_every_copy(
    nodes: Session, changed: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = zeros(8, 8, policy=COPIES)
    new = torch.randn(8, 8)
    written = changed(tensor)
    write_copies(written, new)
    assert torch.equal(written.detach(), new)
    assert torch.equal(*copies_of(tensor))
    tensor.fill_(3)
    write_copies(written)
    assert all(copy.eq(3).all() for copy in copies_of(tensor))


def test_a_subclass_around_tensors_with_copies_is_refused(nodes: Session) -> None:
    inner = full((4, 4), 2.0, policy=COPIES)
    around = TwoTensor(inner, torch.zeros(4, 4))
    for call in (copies_of, write_copies, lambda tensor: write_copies(tensor, torch.ones(4, 4))):
        with pytest.raises(TypeError, match="a TwoTensor is around tensors that have copies"):
            call(around)
    assert all(copy.eq(2).all() for copy in copies_of(inner))
    plain = TwoTensor(torch.zeros(4, 4), torch.zeros(4, 4))
    assert write_copies(plain, torch.ones(4, 4)) is plain
    assert plain.a.eq(1).all()


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    flat = memoryview(tensor.view(torch.uint8).view(-1).numpy())
    return torch.frombuffer(flat, dtype=torch.float32, offset=1, count=8)


@pytest.mark.parametrize(
    "view",
    [torch.conj, lambda c: c.conj().imag, lambda c: torch._neg_view(c.real), unaligned],
)
@pytest.mark.parametrize("given", [False, True])
def test_views_whose_bytes_are_not_their_values_are_refused_before_anything_is_written(
    nodes: Session, view: Callable[[torch.Tensor], torch.Tensor], given: bool
) -> None:
    tensor = full((4, 4), 2.0, dtype=torch.complex64, policy=COPIES)
    seen = view(tensor)
    with pytest.raises(ValueError, match="conjugates or negates"):
        write_copies(seen, torch.ones(seen.shape) if given else None)
    with pytest.raises(ValueError, match="conjugates or negates"):
        copies_of(seen)
    assert all(copy.eq(2).all() for copy in copies_of(tensor))
    for whole in (tensor.real, tensor.imag):
        write_copies(whole, torch.ones(4, 4))
    write_copies(tensor, tensor.conj())  # what is read may be such a view
    assert all(copy.eq(1 - 1j).all() for copy in copies_of(tensor))


def test_a_later_copy_is_written_with_the_first_one_only(nodes: Session) -> None:
    tensor = zeros(4, 4, policy=COPIES)
    second = copies_of(tensor)[1]
    for call in (write_copies, lambda copy: write_copies(copy[1:], torch.ones(4))):
        with pytest.raises(ValueError, match="copy of another one"):
            call(second)
    assert not any(copy.any() for copy in copies_of(tensor))
    del tensor
    gc.collect()
    assert write_copies(second, torch.ones(4, 4)).all()


def test_what_is_no_tensor_is_named() -> None:
    for given in ((None,), (torch.ones(2), 3.0), (3, torch.ones(2))):
        with pytest.raises(TypeError, match="is no tensor"):
            write_copies(*given)  # type: ignore[arg-type]


class Interrupted(BaseException):
    """What a handler of signals raises."""


@pytest.mark.parametrize("given", [False, True])
def test_a_signal_while_copies_are_written_leaves_them_equal(nodes: Session, given: bool) -> None:
    tensor = zeros(3000, 3000, policy="replicate:1,0,2")
    _, second, last = copies_of(tensor)
    seen = second if not given else tensor
    if not given:
        tensor.fill_(1)

    def write() -> None:
        write_copies(tensor, torch.ones(3000, 3000).t() if given else None)
        waiting.join()

    def interrupt_when_some_is_written() -> None:
        while not seen.view(-1)[0]:
            pass
        os.kill(os.getpid(), signal.SIGUSR1)

    def handler(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        waiting = threading.Thread(target=interrupt_when_some_is_written)
        waiting.start()
        with pytest.raises(Interrupted):
            write()
    finally:
        waiting.join()
        signal.signal(signal.SIGUSR1, before)
    assert all(copy.eq(1).all() for copy in (tensor, second, last))
