"""What one FlexGen run is asked to do, checked before anything is loaded.

This module needs neither torch nor FlexGen, so a wrong command line is refused at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.fit import TierLimit
from cxl_offload.integrations.flexgen.places import KINDS, FlexGenKind, is_split
from cxl_offload.integrations.named_tiers import check_tiers
from cxl_offload.plan.hardware import GPU
from cxl_offload.plan.plan_file import Plan
from cxl_offload.tune import Signal

ALL_ON_HOST = (0.0, 100.0, 0.0, 100.0, 0.0, 100.0)
CPU_LINEAR = ("fastest", "kernel", "single", "half")
_LEAST_CUT = 4
_SPLITTABLE: tuple[FlexGenKind, ...] = ("weights", "kv")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexGenRun:
    """One generation with FlexGen: its own options and where each kind of tensor lives.

    Parameters
    ----------
    model
        A folder with a Hugging Face OPT checkpoint, a FlexGen ``-np`` folder, or a name such as
        ``opt-1.3b`` whose weights lie in ``path``. Nothing is ever downloaded.
    path
        Folder for FlexGen's weight files. A checkpoint is converted into it once; without it the
        converted files are temporary. A path with ``_DUMMY_`` in it gives weights of ones.
    tokenizer
        Folder with tokenizer files; ``None`` looks in the model's folder, and takes one of bytes
        when there are none.
    offload_dir
        Where the disk tier keeps its files, in a folder of this run that is removed at its end.
    prompts
        Texts; empty takes ``token_ids``.
    token_ids
        Rows of equal length, padded on the left with the model's pad token.
    prompt_len
        Length to which prompts are padded on the left; ``None`` is the longest prompt.
    gen_len, cut_gen_len
        Tokens to generate, and how many of them to really compute (the rest is projected).
    gpu_batch_size, num_gpu_batches
        Rows of one accelerator batch, and batches a block; their product is the number of rows.
    plan
        A plan of :mod:`cxl_offload.plan.flexgen`: it says batch, lengths and every home, and
        ``percent`` and ``place`` say nothing.
    percent
        Weights, KV cache and activations on the accelerator and on the host, six numbers as
        FlexGen takes them; what is missing to 100 goes to disk.
    overlap, sep_layer, pin_weight, cpu_cache_compute, attn_sparsity, compress_weight, \
compress_cache
        FlexGen's own switches.
    cpu_attention
        With ``cpu_cache_compute``, and where the host is the accelerator: ``"in-place"`` reads the
        cache where it lies; ``"workspace"`` is FlexGen's own way, over copies. A cache with a share
        on disk is always attended over copies.
    cpu_linear
        Where the host is the accelerator: ``"fastest"`` takes the fastest of this package's kernel,
        single and half precision, which the first calls of every shape measure; ``"kernel"`` takes
        the first for tokens and the second for prompts of more than 64 rows, so that every run has
        the same bits; ``"single"`` and ``"half"`` leave all to PyTorch, as FlexGen does in half.
        All round to half precision and are as exact, but not the same in the last bit.
    place
        Policy of every kind on the host, in the grammar of ``memory.policy.parse_policy`` or
        ``split:TIER=PERCENT,...``. A kind that is missing is placed by first touch.
    tiers
        Tiers with capacities; they replace tiers of the machine that share a name or a node.
    accelerator
        ``"cuda"``, or ``"host"``: ordinary memory and the CPU stand in for the accelerator.
    copies
        Between host and GPU: ``"stream"``, FlexGen's streams, or ``"engine"``, the copy engine,
        where a slow tier's bytes cross together with a fast one's.
    stop
        Token after which a row is padded; ``None`` never stops.
    do_sample, temperature
        Sampling instead of the likeliest token.
    warmup
        Run one token first, not counted in the measured times.
    record
        Keep a trace of the bytes every copy and computation moved.
    tune
        ``"step_time"``: the share of the host's weights on the far tier (CXL, else the other
        sockets) follows the time of the tokens, see docs/tuning.md. ``None``: they stay.
    tune_budget_bytes
        Bytes of weights that may move between two tokens, in the mean; 0 only logs advice.
    tune_state
        A JSON file from which the next run goes on.
    """

    model: str
    path: str | None = None
    tokenizer: str | None = None
    offload_dir: str | None = None
    prompts: tuple[str, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    prompt_len: int | None = None
    gen_len: int = 32
    cut_gen_len: int | None = None
    gpu_batch_size: int = 4
    num_gpu_batches: int = 1
    plan: Plan | None = None
    percent: tuple[float, float, float, float, float, float] = ALL_ON_HOST
    overlap: bool = True
    sep_layer: bool = True
    pin_weight: bool = True
    cpu_cache_compute: bool = False
    cpu_attention: Literal["in-place", "workspace"] = "in-place"
    cpu_linear: Literal["fastest", "kernel", "single", "half"] = "fastest"
    attn_sparsity: float = 1.0
    compress_weight: bool = False
    compress_cache: bool = False
    place: Mapping[str, str] = field(default_factory=dict)
    tiers: tuple[TierLimit, ...] = ()
    accelerator: Literal["cuda", "host"] = "host"
    copies: Literal["stream", "engine"] = "stream"
    stop: int | None = None
    do_sample: bool = False
    temperature: float = 1.0
    warmup: bool = False
    record: bool = True
    tune: Signal | None = None
    tune_budget_bytes: int = 0
    tune_state: str | None = None

    @property
    def rows(self) -> int:
        """Sequences generated together."""
        return self.gpu_batch_size * self.num_gpu_batches

    def check(self) -> None:
        """Refuse, in one line, what FlexGen would get wrong or die of.

        Raises
        ------
        ConfigError
            An option out of range, percentages that do not sum, or a combination that FlexGen
            0.1.8 cannot compute.
        """
        _check_numbers(self)
        _check_accelerator(self)
        if self.plan is not None:
            _check_plan(self, self.plan)
        else:
            _check_percent(self.percent)
            _check_combinations(self)
        for kind in self.place:
            if kind not in KINDS:
                raise ConfigError(f"place {kind}: unknown kind; kinds are {', '.join(KINDS)}")
        check_tiers(self.tiers)


def _check_numbers(run: FlexGenRun) -> None:
    for name in ("gen_len", "gpu_batch_size", "num_gpu_batches"):
        if getattr(run, name) < 1:
            raise ConfigError(f"{_flag(name)} {getattr(run, name)}: must be at least 1")
    if run.prompt_len is not None and run.prompt_len < 1:
        raise ConfigError(f"--prompt-len {run.prompt_len}: must be at least 1")
    if run.cut_gen_len is not None and not _LEAST_CUT <= run.cut_gen_len <= run.gen_len:
        raise ConfigError(
            f"--cut-gen-len {run.cut_gen_len}: must be {_LEAST_CUT} to --gen-len "
            f"{run.gen_len}; FlexGen projects the rest from the mean of the later tokens"
        )
    if run.cpu_attention not in ("in-place", "workspace"):
        raise ConfigError(f"--cpu-attention {run.cpu_attention}: must be in-place or workspace")
    if run.cpu_linear not in CPU_LINEAR:
        raise ConfigError(f"--cpu-linear {run.cpu_linear}: must be one of {', '.join(CPU_LINEAR)}")
    if not run.temperature > 0:
        raise ConfigError(f"--temperature {run.temperature}: must be above 0")
    given = len(run.prompts) or len(run.token_ids)
    if run.prompts and run.token_ids:
        raise ConfigError("prompts and token_ids are both given; give one of them")
    if given != run.rows:
        raise ConfigError(
            f"{given} prompts, but --gpu-batch-size {run.gpu_batch_size} x --num-gpu-batches "
            f"{run.num_gpu_batches} are {run.rows} rows; make them equal"
        )


def _check_accelerator(run: FlexGenRun) -> None:
    """Options that only one accelerator has."""
    if run.accelerator not in ("cuda", "host"):
        raise ConfigError(f"--accelerator {run.accelerator}: must be cuda or host")
    if run.copies not in ("stream", "engine"):
        raise ConfigError(f"--copies {run.copies}: must be stream or engine")
    if run.copies == "engine" and run.accelerator == "host":
        raise ConfigError(
            "--copies engine: without a GPU there is no link to copy over; leave it out"
        )
    if run.cpu_linear != "fastest" and run.accelerator == "cuda":
        raise ConfigError(
            f"--cpu-linear {run.cpu_linear}: the GPU computes linear layers; leave it out"
        )


def planned_options(plan: Plan) -> dict[str, Any]:
    """The options of a request that a plan decides.

    Raises
    ------
    ConfigError
        The plan is not one for FlexGen, or is advice only.
    """
    if plan.executor != "flexgen" or not plan.runs:
        why = plan.advice or f"it is for {plan.executor}"
        raise ConfigError(f"--plan: FlexGen cannot run this plan: {why}")
    on_host = any(where != GPU for where in plan.of("kv"))
    return {
        "prompt_len": plan.batch.prompt,
        "gen_len": plan.batch.tokens,
        "gpu_batch_size": plan.batch.size,
        "num_gpu_batches": plan.batch.count,
        "percent": ALL_ON_HOST,
        "place": {},
        "overlap": True,
        "sep_layer": True,
        "cpu_cache_compute": on_host,
        # A plan with a workspace is one for FlexGen's own attention.
        "cpu_attention": "workspace" if plan.of("workspace") else "in-place",
        "attn_sparsity": 1.0,
        "compress_weight": False,
        "compress_cache": False,
    }


def _check_plan(run: FlexGenRun, plan: Plan) -> None:
    for name, planned in planned_options(plan).items():
        given = getattr(run, name)
        if given != planned:
            raise ConfigError(f"{_flag(name)} {given}: the plan says {planned}; leave it out")


def _check_percent(percent: tuple[float, ...]) -> None:
    if len(percent) != 6:
        raise ConfigError(
            f"--percent takes six numbers (weights, KV cache and activations on the accelerator "
            f"and on the host), got {len(percent)}"
        )
    for at, kind in enumerate(("weights", "KV cache", "activations")):
        accelerator, host = percent[2 * at], percent[2 * at + 1]
        if not (0 <= accelerator <= 100 and 0 <= host <= 100 and accelerator + host <= 100):
            raise ConfigError(
                f"--percent: {kind} {accelerator:g} % on the accelerator and {host:g} % on the "
                f"host; each must be 0 to 100 and their sum at most 100 (the rest is disk)"
            )
    if (percent[4], percent[5]) not in ((100, 0), (0, 100)):
        raise ConfigError(
            f"--percent: activations {percent[4]:g} % on the accelerator and {percent[5]:g} % on "
            f"the host; FlexGen keeps them in one place, so give 100 0 or 0 100 (on disk it "
            f"deletes their file before it is read)"
        )


def _check_combinations(run: FlexGenRun) -> None:
    kv_accelerator, kv_host = run.percent[2], run.percent[3]
    kv_mixed = 100 not in (kv_accelerator, kv_host, 100 - kv_accelerator - kv_host)
    if run.attn_sparsity != 1.0:
        raise ConfigError(
            f"--attn-sparsity {run.attn_sparsity:g}: FlexGen 0.1.8 gathers sparse attention "
            f"rightly only from a cache that is all on disk; use 1.0"
        )
    if run.compress_cache and (kv_mixed or is_split(run.place.get("kv"))):
        raise ConfigError(
            "--compress-cache needs the whole KV cache in one place: FlexGen cannot compress a "
            "split cache; give 100 0, 0 100 or 0 0 and no split policy"
        )
    if run.compress_cache and run.cpu_cache_compute and kv_host != 100:
        raise ConfigError(
            "--compress-cache with --cpu-cache-compute needs the KV cache on the host (0 100)"
        )
    if run.cpu_attention == "workspace" and run.accelerator == "cuda" and not run.cpu_cache_compute:
        raise ConfigError(
            "--cpu-attention workspace: the GPU computes attention; give --cpu-cache-compute, or "
            "leave it out"
        )
    for kind, policy in run.place.items():
        if kind not in _SPLITTABLE and is_split(policy):
            raise ConfigError(
                f"place {kind}={policy}: only {' and '.join(_SPLITTABLE)} can be split by whole "
                f"tensors; use interleave or weighted"
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
