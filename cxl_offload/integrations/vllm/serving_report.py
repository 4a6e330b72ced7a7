"""What a running ``vllm serve`` says of its KV cache: hit rate, bytes per tier, tokens/s.

Read from its Prometheus endpoint; needs neither vLLM nor torch.
"""

from __future__ import annotations

import math
import re
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPException

from cxl_offload.errors import ConfigError
from cxl_offload.units import MIB

_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_TIER_EVENT = re.compile(r"vllm:cxl_offload_kv_(\w+)_chunks_total")

_MOST_BYTES = 64 * MIB  # of an answer: thousands of times what a server has to say
_SOURCES = "vllm:prompt_tokens_by_source_total"
_FIRST = "hot"


@dataclass(frozen=True, slots=True)
class Samples:
    """One reading of the endpoint: name and labels to value, and when it was read."""

    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]
    read_at_s: float

    def total(self, name: str, **labels: str) -> float:
        """The sum of all series of a name that have these labels; 0 where there is none."""
        wanted = set(labels.items())
        return sum(
            value
            for (series, given), value in self.values.items()
            if series == name and wanted <= given
        )

    def label_values(self, name: str, label: str) -> list[str]:
        """What a label is in the series of a name."""
        found = {
            value
            for series, given in self.values
            if series == name
            for key, value in given
            if key == label
        }
        return sorted(found)

    def names(self) -> set[str]:
        return {name for name, _ in self.values}


def parse_metrics(text: str, *, read_at_s: float | None = None) -> Samples:
    """The samples in the text of a Prometheus endpoint; without what is no sample or no number."""
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _LINE.fullmatch(line.strip())
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if not math.isfinite(value):  # Prometheus has NaN where nothing was observed
            continue
        labels = frozenset((found[1], found[2]) for found in _LABEL.finditer(match[2] or ""))
        values[match[1], labels] = value
    return Samples(values, time.time() if read_at_s is None else read_at_s)


def read_metrics(url: str, *, timeout_s: float = 10) -> Samples:
    """Reads the endpoint of a server, given by its address or that of ``/metrics``.

    Raises
    ------
    ConfigError
        It does not answer, or is not vLLM's.
    """
    whole = url if "://" in url else f"http://{url}"
    if not whole.rstrip("/").endswith("/metrics"):
        whole = f"{whole.rstrip('/')}/metrics"
    if not whole.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: must be the address of a server, such as http://127.0.0.1:8000")
    try:
        with urllib.request.urlopen(whole, timeout=timeout_s) as answer:
            text = answer.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError, HTTPException) as error:
        raise ConfigError(f"{whole}: {getattr(error, 'reason', None) or error}") from None
    samples = parse_metrics(text)
    if not any(name.startswith("vllm:") for name in samples.names()):
        raise ConfigError(f"{whole}: has no metric of vLLM's")
    return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport:
    """What happened between two readings, or since the server started.

    Attributes
    ----------
    seconds
        Between them, times without a request included.
    prompt_tokens, device_tokens, host_tokens
        All of the prompts, those that were still in the KV cache, those that came from a tier.
    first_token_s
        Mean time to the first token; nan without a request.
    stored_bytes, loaded_bytes
        From the KV cache to the first tier and back.
    tiers
        Tier to event (stored, loaded, evicted, refused) to chunks.
    chunk_bytes
        Bytes of a chunk; 0 before the first was stored.
    """

    seconds: float
    requests: float
    prompt_tokens: float
    device_tokens: float
    host_tokens: float
    generated_tokens: float
    first_token_s: float
    stored_bytes: float
    loaded_bytes: float
    chunk_bytes: float = 0.0
    tiers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were not computed again."""
        hits = self.device_tokens + self.host_tokens
        return hits / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def host_hit_rate(self) -> float:
        """The part of it that the tiers served."""
        return self.host_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def generated_per_s(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tier_bytes(self) -> dict[str, dict[str, float]]:
        """Tier to event to bytes."""
        return {
            tier: {event: chunks * self.chunk_bytes for event, chunks in events.items()}
            for tier, events in self.tiers.items()
        }


def serving_report(end: Samples, begin: Samples | None = None) -> ServingReport:
    """What happened between two readings of one server.

    Parameters
    ----------
    begin
        None: since the server started.
    """

    def since(name: str, **labels: str) -> float:
        return end.total(name, **labels) - (0 if begin is None else begin.total(name, **labels))

    tiers: dict[str, dict[str, float]] = {}
    for name in sorted(end.names()):
        match = _TIER_EVENT.fullmatch(name)
        for tier in end.label_values(name, "tier") if match else ():
            tiers.setdefault(tier, {})[match[1]] = since(name, tier=tier)  # type: ignore[index]
    requests = since("vllm:time_to_first_token_seconds_count")
    waited = since("vllm:time_to_first_token_seconds_sum")
    return ServingReport(
        seconds=_seconds(end, begin),
        requests=requests,
        prompt_tokens=since("vllm:prompt_tokens_total"),
        device_tokens=since(_SOURCES, source="local_cache_hit"),
        host_tokens=since(_SOURCES, source="external_kv_transfer"),
        generated_tokens=since("vllm:generation_tokens_total"),
        first_token_s=waited / requests if requests else math.nan,
        stored_bytes=since("vllm:kv_offload_store_bytes_total"),
        loaded_bytes=since("vllm:kv_offload_load_bytes_total"),
        chunk_bytes=_chunk_bytes(end),
        tiers=tiers,
    )


def _seconds(end: Samples, begin: Samples | None) -> float:
    if begin is not None:
        return end.read_at_s - begin.read_at_s
    made = end.total("vllm:generation_tokens_created")
    engines = len(end.label_values("vllm:generation_tokens_created", "engine"))
    return end.read_at_s - made / engines if made and engines else math.nan


def _chunk_bytes(samples: Samples) -> float:
    """As the tiers say; of all that was ever stored where they do not.

    The first tier also stores what it takes back from the ones behind it, which no transfer from
    the KV cache pays for.
    """
    gauge = "vllm:cxl_offload_kv_chunk_bytes"
    engines = len(samples.label_values(gauge, "engine"))
    if engines:
        return samples.total(gauge, tier=_FIRST) / engines
    stored, loaded = (f"vllm:cxl_offload_kv_{event}_chunks_total" for event in ("stored", "loaded"))
    behind = samples.total(loaded) - samples.total(loaded, tier=_FIRST)
    chunks = samples.total(stored, tier=_FIRST) - behind
    return samples.total("vllm:kv_offload_store_bytes_total") / chunks if chunks > 0 else 0.0
