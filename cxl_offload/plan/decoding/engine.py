"""Rates of engines: what they reach beside what memory, link and GPU give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cxl_offload.plan.decoding.copied_states import store_costs
from cxl_offload.plan.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCosts:
    """Seconds of a number of one row between the products of a layer, where CPUs compute.

    Attributes
    ----------
    norm
        Of a token's width: norms and residuals of a layer.
    rotary
        Of its queries and keys.
    gate
        Of the inner width, where it is gated.
    attention
        Of its keys: storing a new row and finding the cache, however long that is; of a prompt
        storing alone.
    logits
        Of the vocabulary, once a step.
    """

    norm: float = 0.0
    rotary: float = 0.0
    gate: float = 0.0
    attention: float = 0.0
    logits: float = 0.0


NOT_COUNTED = RowCosts()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """One engine.

    Attributes
    ----------
    attention_flops_per_core
        Arithmetic of attention on one CPU core.
    attention_share
        Share of the nodes' read bandwidth that attention reaches.
    workspace_bytes_per_element
        Traffic on the workspace for every element of K and V; 0: attention reads in place, and
        there is no workspace.
    kv_store_bytes_per_s
        Rate at which the KV of a prefill gets to local DRAM, where that is one closed loop of few
        cache lines in flight: on other nodes it falls with their latency. None: KV is copied by
        the GPU's copy engine, at the rate of the link and of the nodes.
    kv_drive_store_bytes_per_s
        Rate at which stored KV moves on to the drive; 0: no KV may be there.
    hidden_store_bytes_per_s
        Rate of hidden states from GPU to host; the link bounds it too.
    overlaps
        Whether weights cross the link while the layers before them are computed.
    products_flops_per_core, products_share
        Arithmetic on one CPU core, and share of the nodes' read bandwidth, of linear layers of few
        rows, which take the time of both; 0: the engine computes none on the CPU.
    prefill_flops_per_core
        Arithmetic of many rows on one CPU core, where there is no GPU.
    layer_products, layer_calls, layer_instructions
        Products, other calls of torch, and instructions of the Python interpreter of one layer and
        batch; 0: not counted.
    step_calls, step_instructions
        The same of a step, outside of its layers.
    start_calls, start_instructions
        The same of a generation, before its first step.
    product_call_s, call_s, python_instruction_s
        Seconds of one of them; of products what they take beside bytes and arithmetic.
    attention_call_s
        Seconds of attention over a cache beside its rows and bytes, of one layer.
    joined_calls, joined_bytes_per_element
        Of attention over a cache that is on the GPU in part: calls of torch more than of one on the
        host, of one layer and batch, and bytes that the GPU moves for every element of its part,
        beside reading it.
    states_calls
        Calls of torch, and copies, of one layer and batch for hidden states that lie in a tier
        beside a GPU.
    decode_rows, prompt_rows
        What rows cost between products, of a decode step and of prompts; known where it was
        measured only.
    in_turn
        Whether what stands for a GPU takes the time of bytes, of arithmetic and of calls one after
        the other, as CPUs in its place do.
    prompt_attention_flops_per_core
        Arithmetic of attention over prompts on one CPU core; 0: that of ``prefill_flops_per_core``.
    kv_type_shares
        Share of ``attention_share`` that attention reaches over keys and values of another type,
        by its name; what is not there is assumed (:data:`~cxl_offload.plan.kv_types.KV_TYPES`).
    """

    attention_flops_per_core: float
    attention_share: float
    workspace_bytes_per_element: float
    kv_store_bytes_per_s: float | None
    kv_drive_store_bytes_per_s: float
    hidden_store_bytes_per_s: float
    overlaps: bool
    products_flops_per_core: float = 0.0
    products_share: float = 1.0
    prefill_flops_per_core: float = 0.0
    layer_products: int = 0
    layer_calls: int = 0
    layer_instructions: int = 0
    step_calls: int = 0
    step_instructions: int = 0
    start_calls: int = 0
    start_instructions: int = 0
    product_call_s: float = 6e-6
    call_s: float = 6e-6
    python_instruction_s: float = 30e-9
    attention_call_s: float = 0.0
    joined_calls: int = 0
    joined_bytes_per_element: float = 0.0
    states_calls: int = 0
    decode_rows: RowCosts = NOT_COUNTED
    prompt_rows: RowCosts = NOT_COUNTED
    in_turn: bool = False
    prompt_attention_flops_per_core: float = 0.0
    kv_type_shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def layer_s(self) -> float:
        """Seconds of what a layer does between its products. A GPU works meanwhile, CPUs do not."""
        calls = self.layer_products * self.product_call_s + self.layer_calls * self.call_s
        calls += self.attention_call_s
        return calls + self.layer_instructions * self.python_instruction_s

    @property
    def step_s(self) -> float:
        """Seconds of what a step does outside of its layers."""
        python = self.step_instructions * self.python_instruction_s
        return self.step_calls * self.call_s + python

    @property
    def start_s(self) -> float:
        """Seconds of what a generation does before its first step."""
        python = self.start_instructions * self.python_instruction_s
        return self.start_calls * self.call_s + python


STOCK = EngineRates(
    attention_flops_per_core=0.0123e12 / 16,
    attention_share=1.0,
    workspace_bytes_per_element=8,
    kv_store_bytes_per_s=0.97 * 2**30,
    kv_drive_store_bytes_per_s=0.746 * 2**30,
    hidden_store_bytes_per_s=4.82 * 2**30,
    overlaps=False,
)
"""FlexGen as published, by its own calibration (experimental/cost_model.py): cpu_flops of its T4
machine, a Google n1-highmem-32 with 16 cores; gtoc_bdw_cache, GPU to relay buffer to pageable
memory; ctod_bdw_cache_p; gtoc_bdw_hidden; weights before the rest of a token. Attention copies
each K and V element into an fp32 workspace and reads it, 4 B + 4 B (pytorch_backend.py,
init_cpu_workspace). That prefill follows latency is Wang et al., Performance Characterization of
CXL Memory, LIO 2."""

OWN = EngineRates(
    attention_flops_per_core=14e9,
    attention_share=0.75,
    workspace_bytes_per_element=0,
    kv_store_bytes_per_s=None,
    kv_drive_store_bytes_per_s=0.0,
    hidden_store_bytes_per_s=float("inf"),
    overlaps=True,
)
"""FlexGen with this package: attention over the cache where it lies, copies by the copy engine.

Attention in FlexGen's layout read 0.75 of the memory's bound in half precision, 28 GB/s on two
cores (docs/attention.md, measured): its arithmetic, one operation a byte, is at least 14 GFLOP/s a
core."""


TRANSFORMERS = replace(
    OWN,
    attention_flops_per_core=40e9,
    products_flops_per_core=100e9,
    products_share=0.75,
    prefill_flops_per_core=100e9,
    layer_products=7,
    layer_calls=73,
    layer_instructions=2926,
    step_calls=47,
    step_instructions=7078,
    start_calls=25,
    start_instructions=96000,
    attention_call_s=913 * 30e-9,
    joined_calls=52,
    joined_bytes_per_element=8.0,
    states_calls=34,
)
"""Decoders of transformers with this package; linear layers are torch's, in bfloat16.

On one core with AVX512-BF16 (measured, beside other programs) they took as long as reading their
weights at 10 GB/s and then multiplying at 200 GFLOP/s, for 1 to 256 rows; half of that is taken, as
all cores of a socket at once have less. Attention of groups of 4 and 8 heads took 3 to 4 times the
arithmetic of single ones in the same run. Products, calls and instructions of a layer, of a step
and of generate() before it are those of a LLaMA of transformers 5 with Python 3.11, counted by a
test, with a cache whose layers have an allocation each, as large ones do. Of attention the
instructions are counted; what its threads take to begin is known where it was measured only. A part
of the cache on a GPU is written and read as float32 there; its calls are counted by a test too."""


def kv_store_costs(engine: EngineRates, hardware: Hardware) -> list[float]:
    """Seconds of one byte of KV that a prefill stores to every node."""
    rate = engine.kv_store_bytes_per_s
    if rate is None:
        return store_costs(hardware)
    local_ns = hardware.local_latency_ns
    return [node.latency_ns / local_ns / rate for node in hardware.nodes]
