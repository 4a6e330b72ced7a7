"""The C++ core, as the type checker sees it. Documentation is in the headers under csrc/."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

class PageKind:
    base: PageKind
    transparent_huge: PageKind
    huge_2mib: PageKind
    huge_1gib: PageKind

class RuleKind:
    first_touch: RuleKind
    bind: RuleKind
    preferred: RuleKind
    stripe: RuleKind
    replicate: RuleKind
    device: RuleKind

class FaultEffect:
    refuse: FaultEffect
    partial: FaultEffect
    stray: FaultEffect
    hidden: FaultEffect
    shared: FaultEffect
    signal: FaultEffect

@final
class Headroom:
    total_bytes: int
    free_bytes: int
    limit: str

@final
class ForkGuard:
    def __init__(self) -> None: ...
    @property
    def in_child(self) -> bool: ...
    def refuse_in_child(self, what: str) -> None: ...

class Kernel:
    @property
    def name(self) -> str: ...
    @property
    def allowed_nodes(self) -> list[int]: ...
    @property
    def local_node(self) -> int: ...
    def movable_bytes(self, node: int) -> int: ...
    def page_bytes(self, pages: PageKind) -> int: ...
    def node_headroom(self, node: int, pages: PageKind) -> Headroom: ...
    def process_headroom(self) -> Headroom: ...
    def fallback_order(self, node: int) -> list[int]: ...

class LossKind:
    used: LossKind
    early: LossKind
    gone: LossKind
    asked: LossKind

def survive_memory_failures(interrupts: bool, prepare: Callable[[], object] | None) -> None: ...
def stop_surviving(prepare: Callable[[], object] | None) -> None: ...
def survives_memory_failures() -> bool: ...
def any_loss() -> bool: ...
def loss_count() -> int: ...
def unwatched_ranges() -> int: ...
def losses() -> list[tuple[int, int, int, LossKind]]: ...
def losses_in(address: int, nbytes: int) -> list[tuple[int, int, int, LossKind]]: ...
def refuse_lost(ranges: Sequence[tuple[int, int]]) -> None: ...
def settle(address: int, nbytes: int) -> None: ...
def watch(address: int, nbytes: int, page_bytes: int) -> None: ...
def unwatch(address: int, nbytes: int) -> None: ...
def write_back_lines(address: int, nbytes: int) -> None: ...
def find_lost_pages(address: int, nbytes: int, page_bytes: int) -> list[tuple[int, int]]: ...
def linux_kernel(dax_root: str = "") -> Kernel: ...

class SimulatedKernel(Kernel):
    def __init__(
        self,
        nodes: Sequence[tuple[int, int, int, Sequence[tuple[int, int]]]],
        distances: Sequence[Sequence[int]],
        *,
        initiator: int,
        allowed_nodes: Sequence[int],
        process_limit_bytes: int | None,
        movable_nodes: Sequence[int] = ...,
        dax: Sequence[tuple[str, int, int, str, int]] = ...,
    ) -> None: ...
    def used_bytes(self, node: int) -> int: ...
    @property
    def mapping_count(self) -> int: ...
    def dax_mapped_bytes(self, device: str) -> int: ...
    def set_used_by_others(self, node: int, nbytes: int) -> None: ...
    def set_pool(self, node: int, page_bytes: int, pages: int) -> None: ...
    def fail(
        self,
        operation: str,
        *,
        call: int = 1,
        code: int = ...,
        effect: FaultEffect = ...,
        times: int = 1,
    ) -> None: ...
    def fail_at_random(
        self, operations: Sequence[str], *, probability: float, seed: int, code: int = ...
    ) -> None: ...
    def clear_faults(self) -> None: ...
    @property
    def calls(self) -> dict[str, int]: ...
    @property
    def faults_fired(self) -> int: ...

class GpuDriver:
    @property
    def name(self) -> str: ...
    def synchronize(self) -> None: ...
    def create_stream(self) -> int: ...
    def destroy_stream(self, stream: int) -> None: ...
    def wait_stream(self, stream: int) -> None: ...
    def copy(self, *, target: int, source: int, nbytes: int, stream: int) -> None: ...
    def copy_blocks(
        self,
        *,
        targets: int,
        sources: int,
        count: int,
        block_bytes: int,
        stream: int,
        each: bool = False,
    ) -> None: ...
    @property
    def batched(self) -> bool: ...

class FakeDriver(GpuDriver):
    def __init__(self, limit_bytes: int = ..., kernel: SimulatedKernel | None = None) -> None: ...
    def pin_with(self, pin: Callable[[int, int], None], unpin: Callable[[int], None]) -> None: ...
    def launch(self, stream: int) -> None: ...
    def finish(self, stream: int) -> None: ...
    def step(self, stream: int, count: int = 1) -> int: ...
    def pending(self, stream: int) -> int: ...
    def hold_waiters(self, hold: bool) -> None: ...
    def fail_copy(self, nth: int) -> None: ...
    def fail_registration(self, nth: int) -> None: ...
    def break_context(self) -> None: ...
    @property
    def registered_bytes(self) -> int: ...
    @property
    def registrations(self) -> int: ...
    @property
    def wrong_unregisters(self) -> int: ...
    @property
    def copies(self) -> int: ...
    @property
    def copied_bytes(self) -> int: ...
    @property
    def streams(self) -> int: ...
    @property
    def events(self) -> int: ...
    @property
    def waiters(self) -> int: ...
    @property
    def event_waits(self) -> int: ...
    @property
    def synchronizations(self) -> int: ...

def open_cuda_driver(library: str = ...) -> GpuDriver: ...

class CudaKernels:
    def __init__(self, path: str) -> None: ...
    @property
    def runtime_version(self) -> int: ...
    def copy_blocks(
        self,
        *,
        targets: int,
        sources: int,
        count: int,
        block_bytes: int,
        aligned: bool,
        stream: int,
    ) -> None: ...
    def pack_blocks(
        self,
        packing: Packing,
        *,
        targets: int,
        sources: int,
        blocks: int,
        count: int,
        unpack: bool,
        stream: int,
    ) -> None: ...

class Code:
    int4: Code
    fp8: Code

class Element:
    float16: Element
    bfloat16: Element
    float32: Element

class Packing:
    def __init__(self, code: Code, element: Element, group_elements: int) -> None: ...
    def code_bytes(self, count: int) -> int: ...
    def packed_bytes(self, count: int) -> int: ...
    def pack(self, *, target: int, source: int, count: int) -> None: ...
    def unpack(self, *, target: int, source: int, count: int) -> None: ...

class HostCopier:
    def __init__(
        self,
        helper_cpus: Sequence[int],
        rules: Sequence[tuple[int, bool, int]],
        isa: str = "",
    ) -> None: ...
    @staticmethod
    def default_rules(threads: int) -> list[tuple[int, bool, int]]: ...
    @property
    def threads(self) -> int: ...
    @property
    def rules(self) -> list[tuple[int, bool, int]]: ...
    def copy(self, *, target: int, source: int, nbytes: int) -> None: ...
    def copy_blocks(self, *, targets: int, sources: int, sizes: int, count: int) -> None: ...
    def copy_strided(
        self,
        *,
        target: int,
        source: int,
        shape: Sequence[int],
        target_strides: Sequence[int],
        source_strides: Sequence[int],
        element_bytes: int,
    ) -> None: ...
    def time_copies(
        self,
        *,
        target: int,
        source: int,
        room: int,
        nbytes: int,
        contenders: Sequence[tuple[bool, int] | None],
        rounds: int,
        sample_s: float,
    ) -> list[list[float]]: ...
    def time_blocks(
        self, *, targets: int, sources: int, sizes: int, count: int, job: int, rounds: int
    ) -> tuple[list[float], list[float]]: ...

class Direction:
    to_device: Direction
    to_host: Direction

class CopyHandle:
    @property
    def nbytes(self) -> int: ...
    def query(self) -> bool: ...
    def wait(self) -> None: ...
    def stream_wait(self, stream: int) -> None: ...

class CopyEngine:
    def __init__(
        self,
        driver: GpuDriver,
        copier: HostCopier,
        staging: Allocation | None,
        *,
        chunk_bytes: int,
        limit_bytes: int,
        rates: Mapping[int, float],
    ) -> None: ...
    def submit(
        self,
        direction: Direction,
        pieces: Sequence[tuple[int, int, int, int, bool]],
        after: Sequence[int],
        may_wait: bool,
    ) -> CopyHandle | None: ...
    def drain(self) -> None: ...
    def use(self, direction: Direction) -> dict[int, tuple[int, int, int]]: ...
    @property
    def in_child(self) -> bool: ...
    def unfinished_bytes(self, direction: Direction) -> int: ...
    @property
    def streams(self) -> list[int]: ...

def plan_chunks(
    pieces: Sequence[tuple[int, int, int, int, bool]],
    chunk_bytes: int,
    rates: Mapping[int, float],
) -> list[tuple[int, int, int, int, bool]]: ...

class Rule:
    def __init__(
        self,
        kind: RuleKind,
        shares: Sequence[tuple[int, int]],
        *,
        granule_bytes: int = ...,
        strict: bool = True,
        pages: PageKind = ...,
        device: str = ...,
    ) -> None: ...

LINE_BYTES: int
MOST_BYTES: int
STATE_BLOCK: int
BASE_PAGE_BYTES: int
HUGE_PAGE_BYTES: int
GIGANTIC_PAGE_BYTES: int
POOL_SLACK_SHARE: float

def reserve_bytes(total_bytes: int) -> int: ...
def stripe_bytes(
    shares: Sequence[tuple[int, int]], granule_bytes: int, nbytes: int
) -> dict[int, int]: ...
def stripe_runs(
    shares: Sequence[tuple[int, int]], granule_bytes: int, nbytes: int
) -> list[tuple[int, int, int]]: ...

class Allocation:
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def unit_bytes(self) -> int: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def device(self) -> str: ...
    @property
    def requested(self) -> str: ...
    @property
    def notes(self) -> list[str]: ...
    def bytes_per_node(self) -> dict[int, int]: ...
    def copies(self) -> list[Allocation]: ...
    def runs(self, offset: int, nbytes: int) -> list[tuple[int, int, int]]: ...
    def record_stream(self, stream: int) -> None: ...
    def move(self, rule: Rule) -> None: ...
    def move_part(self, offset: int, nbytes: int, rule: Rule) -> None: ...
    def ask_pages(
        self, bring_back: bool
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int, int, int, bool]]]: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: Any = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class Session:
    def __init__(
        self,
        kernel: Kernel,
        capacities: Mapping[int, int],
        max_threads: int,
        device_capacities: Mapping[str, int] = ...,
    ) -> None: ...
    def allocate(self, nbytes: int, rule: Rule, driver: GpuDriver | None = None) -> Allocation: ...
    def place(
        self,
        address: int,
        nbytes: int,
        rule: Rule,
        *,
        part_bytes: int,
        stride_bytes: int,
        count: int,
    ) -> list[str]: ...
    def find(self, address: int) -> Allocation | None: ...
    def blocks(self) -> list[Allocation]: ...
    def bytes_per_node(self, address: int, nbytes: int) -> dict[int, int]: ...
    def node_use(self) -> dict[int, tuple[int, int, int, int | None]]: ...
    def device_use(self) -> dict[str, tuple[int, int, int, int | None]]: ...
    def statistics(self) -> dict[str, tuple[int, int, int]]: ...
    def trim(self) -> tuple[int, str]: ...

def find_allocation(address: int) -> Allocation | None: ...
def any_copies() -> bool: ...

class Traffic:
    def __init__(
        self,
        *,
        reads: int,
        writes: int,
        non_temporal: bool = False,
        isa: str = "",
        delay_ns: int = 0,
        passes: int = 0,
        value: int = 0,
    ) -> None: ...

@final
class ThreadTraffic:
    cpu: int
    address: int
    stride_bytes: int
    lines: int
    bytes_read: int
    bytes_written: int
    sum: int
    seconds: float
    cpu_seconds: float

@final
class GpuCopies:
    def __init__(self, library: str, ordinal: int, address: int, nbytes: int) -> None: ...
    def copy(self, to_device: bool, nbytes: int) -> None: ...

def list_gpus(library: str) -> tuple[list[tuple[str, str]], str]: ...
def supported_isas() -> list[str]: ...
def has_integer_codes() -> bool: ...
def has_non_temporal_stores() -> bool: ...
def allowed_cpus() -> list[int]: ...
def fill_random(address: int, nbytes: int, cpus: Sequence[int], *, seed: int = 1) -> None: ...
def link_cycle(address: int, nbytes: int, *, seed: int = 1) -> None: ...
def run_traffic(
    address: int,
    nbytes: int,
    traffic: Traffic,
    cpus: Sequence[int],
    *,
    warmup_s: float = 0.0,
    seconds: float = 0.0,
) -> list[ThreadTraffic]: ...
def idle_latency(
    address: int, nbytes: int, cpu: int, *, warmup_s: float = 0.0, seconds: float = 0.0
) -> list[float]: ...
def loaded_latency(
    linked: int,
    linked_nbytes: int,
    chaser_cpu: int,
    address: int,
    nbytes: int,
    traffic: Traffic,
    cpus: Sequence[int],
    *,
    warmup_s: float = 0.0,
    seconds: float = 0.0,
) -> tuple[list[float], list[ThreadTraffic]]: ...

@final
class PreparedLinear:
    def __init__(self, weight: TensorView, bias: TensorView | None = None) -> None: ...
    def run(
        self,
        x: int,
        rows: int,
        dtype: str,
        y: int,
        team: WorkerTeam,
        kernel: Kernel | None = None,
    ) -> None: ...

@final
class TensorView:
    def __init__(
        self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int]
    ) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> list[int]: ...
    @property
    def strides(self) -> list[int]: ...
    @property
    def numel(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_contiguous(self) -> bool: ...

@final
class PlainTensors:
    def __init__(
        self,
        classes: tuple[type, ...],
        dtypes: Mapping[Any, str],
        *,
        strided: object,
        table: object = None,
    ) -> None: ...
    def view(self, tensor: object) -> TensorView | None: ...

def number(settings: dict[str, Any], name: str) -> float: ...
def flag(settings: dict[str, Any], name: str) -> bool: ...

@final
class AdamRule:
    def __init__(self, group: dict[str, Any], step: int, grad_scale: float = 1.0) -> None: ...

@final
class AdagradRule:
    def __init__(self, group: dict[str, Any], step: int, grad_scale: float = 1.0) -> None: ...

@final
class LionRule:
    def __init__(self, group: dict[str, Any], step: int, grad_scale: float = 1.0) -> None: ...

@final
class WorkerTeam:
    def __init__(self, groups: Sequence[tuple[int, int, Sequence[int]]]) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def groups(self) -> list[tuple[int, int, list[int]]]: ...

@final
class SharedCpus:
    def __init__(self) -> None: ...
    @property
    def sleeping_seconds(self) -> float: ...
    @property
    def why_off(self) -> str: ...

@final
class SleepingWaits:
    def __init__(self) -> None: ...

def why_openmp_cannot_sleep() -> str: ...

@final
class Update:
    def __init__(
        self,
        rule: AdamRule | AdagradRule | LionRule,
        param: TensorView,
        grad: TensorView,
        states: Sequence[TensorView],
        copy: TensorView | None = None,
        *,
        scales: Sequence[TensorView] = (),
        rounding: tuple[int, int] | None = None,
    ) -> None: ...

@final
class Updates:
    def __init__(self, updates: Sequence[Update]) -> None: ...
    def count_at(self, address: int, nbytes: int) -> None: ...
    def __len__(self) -> int: ...

@final
class PlainStep:
    @property
    def updates(self) -> Updates: ...
    def finish(self, increment: Callable[[list[Any]], object]) -> None: ...

def plain_step(
    plain: PlainTensors,
    states: Mapping[Any, dict[str, Any]],
    given: Sequence[tuple[Any, dict[str, Any], Any]],
    *,
    rule: type[AdamRule | AdagradRule | LionRule],
    grad_scale: float,
    names: Sequence[str],
    scale_names: Sequence[str],
    seed: int | None,
    is_exact: bool,
) -> PlainStep | None: ...
def plain_updates(plain: PlainTensors, rows: Sequence[tuple[Any, ...]]) -> Updates | None: ...
def run_updates(
    updates: Updates | list[Update],
    team: WorkerTeam,
    *,
    isa: str = "",
    kernel: Kernel | None = None,
    then: Sequence[Callable[[], object]] = (),
) -> None: ...
def run_attention(
    q: TensorView,
    k: TensorView,
    v: TensorView,
    out: TensorView,
    team: WorkerTeam,
    *,
    scale: float,
    lengths: Sequence[int],
    table: tuple[int, int, int] = (0, 0, 0),
    mask: tuple[int, int] = (0, 0),
    window: int = 0,
    log_sum_exp: int = 0,
    groups: tuple[TensorView, TensorView, bool] | None = None,
    k_scales: Sequence[float] = ...,
    v_scales: Sequence[float] = ...,
    queries: int = 1,
    causal: bool = True,
    soft_cap: float = 0,
    bias: TensorView | None = None,
    sinks: Sequence[float] = ...,
    isa: str = "",
    kernel: Kernel | None = None,
) -> None: ...

class GroupScales:
    low_step: GroupScales
    inverse_low: GroupScales
    zero_step: GroupScales

def bf16_products() -> list[str]: ...
def has_fast_bf16_products() -> bool: ...
def linear_products_per_s(
    x: TensorView,
    weight: TensorView,
    team: WorkerTeam,
    *,
    groups: tuple[TensorView, GroupScales] | None = None,
    isa: str = "",
) -> float: ...
def run_linear(
    x: TensorView,
    weight: TensorView,
    y: TensorView,
    team: WorkerTeam,
    *,
    bias: TensorView | None = None,
    scale: TensorView | None = None,
    groups: tuple[TensorView, GroupScales] | None = None,
    isa: str = "",
    kernel: Kernel | None = None,
) -> None: ...
def run_norm(
    x: TensorView,
    weight: TensorView,
    y: TensorView,
    eps: float,
    team: WorkerTeam,
    isa: str = "",
) -> None: ...
def run_plain_norm(
    x: int,
    weight: int,
    y: int,
    shape: tuple[int, int],
    dtype: str,
    eps: float,
    team: WorkerTeam,
) -> None: ...
def update_traffic(
    streams: Sequence[tuple[int, int, bool]],
    blocks: int,
    cpus: Sequence[int],
    *,
    ahead_bytes: int = 0,
    isa: str = "",
) -> float: ...
def run_steps(
    *,
    setup_s: NDArray[np.float64],
    alone_s: NDArray[np.float64],
    demand_begins: NDArray[np.int64],
    resources: NDArray[np.int32],
    shares: NDArray[np.float64],
    queue_begins: NDArray[np.int64],
    step_begins: NDArray[np.int64],
    losses: Sequence[float],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]: ...
def share_resources(
    jobs: Sequence[Sequence[tuple[int, float]]], losses: Sequence[float]
) -> list[float]: ...
