"""Documents as strangers write them: each is answered, or refused in one line that says where.

:func:`check_document` takes bytes for decisions: which reader, which sound document to begin with,
and how to spoil it. Sound documents that are spoilt at some places come further into the readers
than bytes alone would.
"""

from __future__ import annotations

import json
import linecache
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import yaml

import cxl_offload
from cxl_offload.errors import ConfigError
from cxl_offload.files import read_text, shipped_file, shipped_names
from cxl_offload.integrations.deepspeed.kinds import parse_request
from cxl_offload.integrations.flexgen.places import parse_place, parse_split
from cxl_offload.integrations.named_tiers import parse_tier
from cxl_offload.integrations.vllm.kv_options import KvOptions
from cxl_offload.integrations.vllm.weight_options import read_weight_options
from cxl_offload.memory.policy import as_policy, parse_policy
from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.model.file import load_model, parse_model
from cxl_offload.plan.plan_file import parse_plan, plan_text
from cxl_offload.profile.model import (
    BandwidthCurve,
    BandwidthPoint,
    Estimate,
    Fingerprint,
    Latency,
    NodeFacts,
    PathProfile,
    Profile,
)
from cxl_offload.profile.operators.model import (
    AdamPoint,
    CachePoint,
    CacheTypePoint,
    LayerPoint,
    LinearPoint,
    OperatorProfile,
    Piece,
    PiecePoint,
    ProductPoint,
)
from cxl_offload.profile.store import parse_profile, profile_text
from cxl_offload.sim.trace import Event, Trace
from cxl_offload.topology import Machine, load_machine, machine_from_json, machine_to_json
from cxl_offload.topology.cpulist import parse_cpulist
from cxl_offload.topology.machine_file import parse_machine
from cxl_offload.units import parse_bandwidth, parse_bytes, parse_latency_ns
from cxl_offload.validation.casefile import parse_cases

__all__ = ["READERS", "check_document"]

FILE = "file.txt"
_PACKAGE = str(Path(cxl_offload.__file__).parent)
_LONGEST_MESSAGE = 2000
_NOT_PRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


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


@cache
def _machine() -> Machine:
    return load_machine("epyc9354-cxl-a")


@cache
def _plans() -> tuple[str, ...]:
    request = InferenceRequest(
        model=load_model("opt-1.3b"),
        machine=_machine(),
        prompt=64,
        generated=8,
        model_name="opt-1.3b",
        tiers=("ldram", "cxl"),
    )
    return (plan_text(plan_inference(request)),)


@cache
def _machine_files() -> tuple[str, ...]:
    return tuple(read_text(shipped_file("machines", name)) for name in shipped_names("machines"))


@cache
def _machine_texts() -> tuple[str, ...]:
    return tuple(machine_to_json(load_machine(name)) for name in shipped_names("machines")[:4])


@cache
def _model_files() -> tuple[str, ...]:
    texts = [read_text(shipped_file("models", name)) for name in shipped_names("models")]
    configs = [json.dumps(yaml.safe_load(text)["config"], indent=1) for text in texts[:6]]
    return (*texts, *configs)


@cache
def _profiles() -> tuple[str, ...]:
    rate = Estimate(median=1e10, low=9e9, high=2e10, samples=3)
    curve = BandwidthCurve("load", "base", (BandwidthPoint(1, rate), BandwidthPoint(2, rate)))
    latency = Latency("base", 1 << 20, rate)
    path = PathProfile(0, 0, (0, 1), 1 << 20, latencies=(latency,), curves=(curve,))
    whose = Fingerprint(
        cpu_model="a processor",
        cpus=2,
        nodes=(NodeFacts(id=0, kind="dram", cpus=2, capacity_bytes=64 << 30),),
        kernel="6.12",
        page_bytes=4096,
        transparent_huge_pages="madvise",
        isa="scalar",
    )
    made = Profile(
        machine=whose, date="now", measured=True, mode="quick", seconds=1.0, paths=(path,)
    )
    return (profile_text(made), profile_text(replace(made, operators=(_operators(rate),))))


def _operators(seconds: Estimate) -> OperatorProfile:
    """Some of everything that is measured."""
    return OperatorProfile(
        device="cpu",
        threads=2,
        linears=(LinearPoint(1, 1 << 20, seconds),),
        caches=(CachePoint("load", 1 << 20, seconds),),
        layers=(LayerPoint(1, 768, seconds, seconds),),
        products=tuple(ProductPoint(rows, 1 << 20, seconds) for rows in (1, 8, 512)),
        pieces=tuple(
            PiecePoint(piece, rows, 4096 if piece == "long attention" else 768, seconds)
            for piece in get_args(Piece)
            for rows in (1, 8)
        ),
        cache_types=tuple(
            CacheTypePoint(kept, 1, 1 << 20, 1 << 21, seconds) for kept in ("", "int4")
        ),
        adam=AdamPoint(1 << 20, 1 << 24, seconds),
    )


@cache
def _traces() -> tuple[str, ...]:
    event = Event("decode", 1, "cpu", "cpu", "weights", {0: 5, 2: 7}, {1: 3}, 9, 2.5)
    return (Trace([event, event], tokens={"decode": 4}).to_json(),)


@cache
def _cases() -> tuple[str, ...]:
    folder = Path(_PACKAGE) / "validation" / "cases"
    published = json.loads((folder / "published.json").read_text(encoding="utf-8"))
    return (json.dumps(published[:3], indent=1), json.dumps(published[-3:], indent=1))


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
        return as_policy(value, _machine())
    except TypeError as error:  # documented
        raise ConfigError(str(error)) from error


READERS = (
    Reader("plan", lambda text: parse_plan(text, file=FILE), _plans, True, plan_text),
    Reader("machine file", lambda text: parse_machine(text, file=FILE), _machine_files, True),
    Reader("machine", machine_from_json, _machine_texts, False, machine_to_json),
    Reader("model", lambda text: parse_model(text, name="model", file=FILE), _model_files, True),
    Reader("profile", lambda text: parse_profile(text, file=FILE), _profiles, True, profile_text),
    Reader("trace", Trace.from_json, _traces, False, Trace.to_json),
    Reader("cases", lambda text: parse_cases(text, file=FILE), _cases, True),
    Reader(
        "policy",
        lambda text: parse_policy(text, _machine()),
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
        lambda text: KvOptions.read(_mapping(text), _machine()),
        _texts(
            '{"cpu_bytes_to_use": 1073741824, "policy": "cxl", "eviction_policy": "lru"}',
            '{"cpu_bytes_to_use": "1 GiB", "cold": {"bytes": "2 GiB", "policy": {"0": 1}}}',
        ),
    ),
    Reader(
        "vLLM weights",
        lambda text: read_weight_options(_mapping(text), _machine()),
        _texts(
            '{"cxl_offload": {"weight_policy": "weighted:0=4,2=1@64KiB"}}',
            '{"cxl_offload": {"weight_policy": {"0": 4, "2": 1}, '
            '"weight_kinds": {"mlp": "bind:0"}}}',
        ),
    ),
)

_NASTY = (
    *("", "0", "-1", "-0.0", "1e999", "nan", ".nan", ".inf", "null", "~", "true", "[]", "{}"),
    *("9" * 30, "9" * 5000, "1" + "0" * 400, "0x", "0b2", "1:99", "1_0", "١٢", "²", "0.5", "01"),
    *(
        "2001-13-45",
        "!!bool x",
        "!!int ''",
        "!!int x",
        "!!float ''",
        "!!timestamp x",
        "!!python/x y",
    ),
    *("!!binary é", "!!null x", "!!set {a}", "&a [*a]", "*a", "&a x", "{<<: *a}", "? x", "!<> x"),
    *(
        "\x00",
        "\x85",
        "\u2028",
        "\ud7ff",
        "\ufeff",
        "a\nb",
        "'\n'",
        "\t",
        "%",
        "---",
        "...",
        "|",
        ">",
    ),
    *('"\\ud800"', '"\\u0000"', '"\\n"', "[" * 3000, "{a: " * 1500, '{"a":' * 1500, "- " * 2000),
    *(
        "0-99999999999",
        "0-3",
        "-",
        ",",
        "=",
        ":",
        ";",
        "@",
        "/",
        "..",
        "x" * 3000,
        "NaN",
        "Infinity",
    ),
    "{a: &a [x,x,x,x,x,x,x,x,x], b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a], c: &c [*b,*b,*b,*b,*b,*b,*b],"
    " d: &d [*c,*c,*c,*c,*c,*c,*c,*c], e: &e [*d,*d,*d,*d,*d,*d,*d,*d], f: [*e,*e,*e,*e,*e,*e,*e]}",
)
_TOKEN = re.compile(r"[^\s,:{}\[\]\"']+|[,:{}\[\]\"']")


class Decisions:
    """Bytes as decisions; zeros when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def below(self, count: int) -> int:
        return (self.byte() << 8 | self.byte()) % max(count, 1)

    def rest(self) -> bytes:
        return self._data[self._at :]


def _spoil(text: str, decisions: Decisions) -> str:
    """The text with one edit."""
    edit = decisions.byte() % 8
    if edit < 4:  # a token becomes a nasty one, or one from elsewhere
        tokens = list(_TOKEN.finditer(text))
        if not tokens:
            return _NASTY[decisions.below(len(_NASTY))]
        chosen = tokens[decisions.below(len(tokens))]
        other = (
            _NASTY[decisions.below(len(_NASTY))]
            if edit < 3
            else tokens[decisions.below(len(tokens))].group()
        )
        return text[: chosen.start()] + other + text[chosen.end() :]
    lines = text.split("\n")
    at = decisions.below(len(lines))
    if edit == 4:
        del lines[at]
    elif edit == 5:
        lines.insert(decisions.below(len(lines)), lines[at])
    elif edit == 6:
        key, colon, _ = lines[at].partition(":")
        lines[at] = key + colon + " " + _NASTY[decisions.below(len(_NASTY))]
    else:
        cut = decisions.below(len(text) + 1)
        return text[:cut] + _NASTY[decisions.below(len(_NASTY))] + text[cut:]
    return "\n".join(lines)


def document_of(data: bytes) -> tuple[Reader, str]:
    """The reader and the text that the decisions mean."""
    decisions = Decisions(data)
    reader = READERS[decisions.byte() % len(READERS)]
    how = decisions.byte()
    if how % 8 == 0:
        return reader, decisions.rest().decode("utf-8", "replace")
    sound = reader.sound()
    text = sound[decisions.below(len(sound))]
    for _ in range(how % 8):
        text = _spoil(text, decisions)
    return reader, text


def _is_own(error: BaseException) -> bool:
    """Whether a ``raise`` of the package made the error, rather than something it stumbled over."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        return False
    line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return line.lstrip().startswith("raise")


def _check_refusal(reader: Reader, text: str, error: ValueError) -> None:
    message = str(error)
    assert isinstance(error, ConfigError) or _is_own(error), f"stumbled: {message[:200]!r}"
    assert not reader.names_file or message.startswith(FILE), f"no place: {message[:200]!r}"
    found = _NOT_PRINTABLE.search(message)
    assert found is None, f"{found.group()!r} in the message {message[:300]!r}"  # type: ignore[union-attr]
    longest = _LONGEST_MESSAGE if reader.names_file else _LONGEST_MESSAGE + 4 * len(text)
    assert 0 < len(message) < longest, f"{len(message)} characters: {message[:80]}"
    message.encode("utf-8")


def check_document(data: bytes) -> str:
    """Reads one document.

    Returns
    -------
    str
        ``"read"`` or ``"refused"``.

    Raises
    ------
    Exception
        Whatever the reader raised that is no refusal of its own; AssertionError for a refusal that
        does not say where, or is not one line.
    """
    reader, text = document_of(data)
    try:
        value = reader.read(text)
    except ValueError as error:
        _check_refusal(reader, text, error)
        return "refused"
    if reader.again is not None:
        assert reader.read(reader.again(value)) == value, "written and read again it is another"
    return "read"
