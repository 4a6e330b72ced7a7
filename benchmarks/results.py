"""What every benchmark's JSON says, in one form: this package beside a peer or a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Document = Mapping[str, Any]

UNCOMPRESSED = "its own uncompressed cache"

ENDS_OF_BOUNDS = ("bound", "roofline", "prediction", "of the grid", UNCOMPRESSED)
"""How the names of what is no peer end."""


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison, measured in turns.

    Attributes
    ----------
    benchmark
        Name of the module without ``bench_``.
    case
        What was run; one that ends with ``peak memory`` is of bytes, and no speed.
    beside
        The peer, or the bound.
    ratio, low, high
        Speed of this package over that of ``beside``: above 1 it is faster. The median, and the
        95 % interval; ``low`` and ``high`` are ``None`` where a benchmark has no interval.
    most
        What the ratio can be at most, because the memory is read and numbers are multiplied no
        faster; ``None`` where nothing was measured that says so.
    """

    benchmark: str
    case: str
    beside: str
    ratio: float
    low: float | None = None
    high: float | None = None
    most: float | None = None

    @property
    def of_bound(self) -> bool:
        """Whether it stands beside a bound, a prediction or the best of itself, and no peer."""
        return self.beside.endswith(ENDS_OF_BOUNDS)

    @property
    def slower(self) -> bool:
        """Slower than a peer by more than chance: the whole interval lies below 1."""
        return not self.of_bound and (self.ratio if self.high is None else self.high) < 1


def _row(benchmark: str, case: str, beside: str, found: Document | Sequence[float]) -> Row:
    if isinstance(found, Mapping):
        found = [found["median"], found["low"], found["high"]]
    return Row(benchmark, case, beside, *found)


def _beside(benchmark: str, peer: str, document: Document) -> Iterator[Row]:
    """What ``--neighbour`` adds: how fast both are beside it, and how much each loses by it."""
    if "neighbour" in document:
        for name, found in document["neighbour"]["cases"].items():
            case = f"{name}, beside a neighbour"
            yield _row(benchmark, case, peer, found["beside"])
            yield _row(benchmark, case, f"{peer}'s own fall", found["falls"])


def _flexgen(document: Document) -> Iterator[Row]:
    for result in document["results"]:
        for phase in ("prefill", "decode"):
            if phase in result:
                case = f"{result['case']}: {phase}"
                yield _row("flexgen", case, "stock FlexGen", result[phase]["ratio"])
    yield from _beside("flexgen", "stock FlexGen", document)


def _transformers(document: Document) -> Iterator[Row]:
    for row in document["rows"]:
        for phase in sorted({"prefill", "decode"} & row.keys()):
            case = f"{row['batch']} x {row['prompt']}, {row['kv_heads']} KV heads: {phase}"
            found = row[phase]
            ratio = [found["times_stock"], found["low"], found["high"]]
            yield _row("transformers", case, "stock transformers", ratio)
            if "of_bound" in found:
                yield _row("transformers", case, "read bound", found["of_bound"])
    for row in document["disk"]:
        files = "in the page cache" if row["page_cache"] else "read of the disk"
        case = f"32 x 32, {row['near_share']:.0%} of the weights near, others {files}: decode"
        yield _row("transformers", case, "accelerate's disk offload", row["ratio"])
    for row in document["llama"]:
        case = f"1 x {row['prompt']}: decode"
        yield _row("transformers", case, f"llama.cpp, {row['weights']}", row["ratio"])


def _vllm(document: Document) -> Iterator[Row]:
    for load, servers in document["results"].items():
        for server, found in servers.items():
            if not server.startswith("no offload"):  # the second server without is no peer
                yield _row("vllm_kv", f"{load}: {server}", "no offload", found["throughput_ratio"])
            if "over_two_tiers" in found:
                yield _row("vllm_kv", f"{load}: {server}", "two tiers", found["over_two_tiers"])
    if "restarts" in document:
        found = document["restarts"]["throughput_ratio"]
        yield _row("vllm_kv", "after a restart: two tiers, kept", "two tiers", found)
    yield from _beside("vllm_kv", "no offload", document)


def _zero(document: Document) -> Iterator[Row]:
    for size, table in document.get("grid", {"": document}).items():
        for name, parts in table["speedup"].items():
            if not name.startswith("stock"):
                for part, found in parts.items():
                    case = f"{size}, {name}: {part}" if size else f"{name}: {part}"
                    yield _row("zero_offload", case, "stock DeepSpeed", found)
    yield from _beside("zero_offload", "stock DeepSpeed", document)


def _adam(document: Document) -> Iterator[Row]:
    for case, results in document["cases"].items():
        for found in results:
            if found["speedup"] is not None:
                ratio = [found[name] for name in ("speedup", "speedup_low", "speedup_high")]
                yield _row("adam", case, found["name"], ratio)
            elif found["name"] == "cxl_offload":
                ratio = [found[name] for name in ("of_bound", "of_bound_low", "of_bound_high")]
                yield _row("adam", case, "memory's bound", ratio)
    for name, found in document.get("models", {}).items():
        case = f"fp32, a model's {found['tensors']} tensors ({name})"
        for peer, ratio in found["times_as_fast"].items():
            yield _row("adam", case, peer, ratio)


def _states(document: Document) -> Iterator[Row]:
    yield _row("states", "8 bit", "memory's bound", document["of_bound"])
    for name, ratio in document["times_as_fast"].items():
        if not name.startswith(("bound", "cxl_offload, 8 bit")):
            yield _row("states", "8 bit", name, ratio)


def _attention(document: Document) -> Iterator[Row]:
    """A run of some peers only (``--peers``) says nothing of the bound: the whole run has.

    A cache in fewer bits also stands beside the same one in all of them, in the same layout.
    """
    for dtype, rows in document["cases"].items():
        for name, found in rows.items():
            if name.startswith("this"):
                if not document.get("peers"):
                    yield _row("attention", f"{dtype}: {name}", "read bound", found["of_bound"])
                    if "of_roofline" in found:
                        row = found["of_roofline"]
                        yield _row("attention", f"{dtype}: {name}", "roofline", row)
                if "over_ours" in found:
                    yield _row("attention", f"{dtype}: {name}", UNCOMPRESSED, found["over_ours"])
            elif name != "read bound" and "ours_over_it" in found:
                yield _row("attention", dtype, name, found["ours_over_it"])


def _linear(document: Document) -> Iterator[Row]:
    for found in document["cases"]:
        case = f"{found['weights']}, {found['rows']} rows"
        row = _row("linear", case, "read bound", found["of_bound"])
        yield replace(row, most=found.get("most_of_bound"))
        yield _row("linear", case, "roofline", found["of_roofline"])
        if "over_torch" in found:
            row = _row("linear", case, "torch", found["over_torch"])
            yield replace(row, most=found.get("most_over_torch"))


def _copy(document: Document) -> Iterator[Row]:
    for found in document["sizes"]:
        case = f"one copy of {found['nbytes']:,} B"
        yield _row("copy", case, "the best of memcpy and stores past the caches", [found["ratio"]])
    for found in document["blocks"]:
        yield _row("copy", f"blocks of {found['block_bytes']:,} B", "memcpy", [found["ratio"]])


def _prediction(document: Document) -> Iterator[Row]:
    for found in document["results"]:
        rounds = [1 / (1 + error) for error in found["errors_of_rounds"]]
        ratio = [1 / (1 + found["error"]), min(rounds), max(rounds)]
        yield _row("prediction", found["configuration"], "its prediction", ratio)


def _plan(document: Document) -> Iterator[Row]:
    for found in document["measured"]:
        yield _row("plan", found["case"], "the best of the grid", [1 / (1 + found["regret"])])


def _load(document: Document) -> Iterator[Row]:
    for found in document["rows"]:
        yield _row("load", found["case"], found["beside"], found["ratio"])


def _large_checkpoint(document: Document) -> Iterator[Row]:
    """What was placed is the least memory that the process can have at its peak."""
    options, found = document["options"], document["ours"]
    near = document["near_limit_bytes"] / (1 << 30)
    case = f"{float(options['gib']):g} GiB, {near:g} GiB of them near: peak memory"
    yield _row("large_checkpoint", case, "the placement's bound", [1 / found["peak_over_placed"]])


def _shared_cpus(document: Document) -> Iterator[Row]:
    """Sleeping at once is no way that a user has: how it compares stays in the benchmark's own."""
    for found in document["results"]:
        yield _row("shared_cpus", found["case"], "spinning", found["over_spinning"]["share_cpus()"])


READERS: dict[str, Callable[[Document], Iterator[Row]]] = {
    "flexgen": _flexgen,
    "transformers": _transformers,
    "vllm_kv": _vllm,
    "zero_offload": _zero,
    "adam": _adam,
    "states": _states,
    "attention": _attention,
    "linear": _linear,
    "copy": _copy,
    "load": _load,
    "large_checkpoint": _large_checkpoint,
    "prediction": _prediction,
    "plan": _plan,
    "shared_cpus": _shared_cpus,
}
"""Benchmark to the reader of its JSON."""


def rows_of(benchmark: str, document: Document) -> list[Row]:
    """The comparisons in a benchmark's JSON.

    Raises
    ------
    KeyError
        A benchmark without a reader, or a document that is not its.
    """
    return list(READERS[benchmark](document))
