"""Every reader of documents that strangers write, and what it reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.deepspeed.kinds import parse_request
from cxl_offload.integrations.flexgen.places import parse_place, parse_split
from cxl_offload.integrations.named_tiers import parse_tier
from cxl_offload.integrations.vllm.kv_options import KvOptions
from cxl_offload.integrations.vllm.weight_options import read_weight_options
from cxl_offload.memory.policy import as_policy, parse_policy
from cxl_offload.plan.model.file import parse_model
from cxl_offload.plan.plan_file import parse_plan, plan_text
from cxl_offload.profile.store import parse_profile, profile_text
from cxl_offload.sim.trace import Trace
from cxl_offload.topology import load_machine, machine_from_json, machine_to_json
from cxl_offload.topology.cpulist import parse_cpulist
from cxl_offload.topology.machine_file import parse_machine
from cxl_offload.units import parse_bandwidth, parse_bytes, parse_latency_ns
from cxl_offload.validation.casefile import parse_cases

from . import sound

FILE = "file.txt"


@dataclass(frozen=True, slots=True)
class Reader:
    """How a kind of document is read.

    ``sound`` makes documents that are answered; ``names_file``: refusals begin with the file's
    name; ``again`` writes what was read, so that it can be read once more.
    """

    name: str
    read: Callable[[str], Any]
    sound: Callable[[], tuple[str, ...]]
    names_file: bool = False
    again: Callable[[Any], str] | None = None


def _texts(*texts: str) -> Callable[[], tuple[str, ...]]:
    return lambda: texts


def _value(text: str) -> Any:
    """What a command line's JSON would be; text that is none stands for itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _mapping(text: str) -> Mapping[str, Any]:
    value = _value(text)
    return value if isinstance(value, dict) else {"policy": value}


def _policy(text: str) -> Any:
    value = _value(text)
    if isinstance(value, dict):  # JSON has no keys but texts
        value = {int(key) if key.isdecimal() else key: weight for key, weight in value.items()}
    try:
        return as_policy(value, sound.machine())
    except TypeError as error:  # documented
        raise ConfigError(str(error)) from error


READERS = (
    Reader("plan", lambda text: parse_plan(text, file=FILE), sound.plans, True, plan_text),
    Reader("machine file", lambda text: parse_machine(text, file=FILE), sound.machine_files, True),
    Reader("machine", machine_from_json, sound.machine_texts, False, machine_to_json),
    Reader(
        "model", lambda text: parse_model(text, name="model", file=FILE), sound.model_files, True
    ),
    Reader(
        "profile", lambda text: parse_profile(text, file=FILE), sound.profiles, True, profile_text
    ),
    Reader("trace", Trace.from_json, sound.traces, False, Trace.to_json),
    Reader("cases", lambda text: parse_cases(text, file=FILE), sound.cases, True),
    Reader(
        "policy",
        lambda text: parse_policy(text, sound.machine()),
        _texts("weighted:0=4,cxl=1@64KiB", "interleave:0,2@2MiB", "bind:ldram", "dax:dax0.0"),
        False,
        str,
    ),
    Reader("policy as a value", _policy, _texts('{"0": 4, "2": 1}', '"first-touch"')),
    Reader("bytes", parse_bytes, _texts("64 GiB", "1.5e3 kB")),
    Reader("bandwidth", parse_bandwidth, _texts("38.4 GB/s")),
    Reader("latency", parse_latency_ns, _texts("139 ns")),
    Reader("CPU list", parse_cpulist, _texts("0-3,8,10-11")),
    Reader("machine name", load_machine, _texts("gh200", "xeon8468:snc=4,prefetch=off", "spr-1")),
    Reader("DeepSpeed request", parse_request, _texts("exp_avg=cxl;params=bind:0", "bind:0")),
    Reader("FlexGen tier", parse_tier, _texts("cxl=2,3-5:128GiB", "ldram=0")),
    Reader("FlexGen place", parse_place, _texts("kv=interleave:ldram,cxl")),
    Reader("FlexGen split", parse_split, _texts("split:ldram=50,cxl=50")),
    Reader(
        "vLLM cache",
        lambda text: KvOptions.read(_mapping(text), sound.machine()),
        _texts(
            '{"cpu_bytes_to_use": 1073741824, "policy": "cxl", "eviction_policy": "lru"}',
            '{"cpu_bytes_to_use": "1 GiB", "cold": {"bytes": "2 GiB", "policy": {"0": 1}}}',
        ),
    ),
    Reader(
        "vLLM weights",
        lambda text: read_weight_options(_mapping(text), sound.machine()),
        _texts(
            '{"cxl_offload": {"weight_policy": "weighted:0=4,2=1@64KiB"}}',
            '{"cxl_offload": {"weight_policy": {"0": 4, "2": 1}, '
            '"weight_kinds": {"mlp": "bind:0"}}}',
        ),
    ),
)
