"""Hostile documents, by name and generated: answered or refused in one line that says where."""

from __future__ import annotations

import random
import time

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.files import shown
from cxl_offload.memory.policy import Bind, parse_policy
from cxl_offload.plan.flexgen.plan import InferenceRequest, plan_inference
from cxl_offload.plan.model.file import load_model, parse_model
from cxl_offload.plan.plan_file import parse_plan, plan_text
from cxl_offload.plan.training.job import TrainingJob
from cxl_offload.plan.training.plan import TrainingRequest, plan_training
from cxl_offload.profile.model import PROFILE_VERSION
from cxl_offload.profile.store import parse_profile
from cxl_offload.sim.trace import Trace
from cxl_offload.topology import load_machine, machine_from_json, machine_to_json
from cxl_offload.topology.cpulist import parse_cpulist
from cxl_offload.topology.machine_file import parse_machine
from cxl_offload.units import parse_bytes
from cxl_offload.validation.casefile import parse_cases

from .documents import check_document
from .readers import READERS

_PLAN = "version: 1\nmodel: "
_BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_sound_documents_are_read() -> None:
    for reader in READERS:
        for text in reader.sound():
            assert reader.read(text) is not None, reader.name


@pytest.mark.parametrize("seed", range(20))
def test_generated_documents_are_answered_or_refused(seed: int) -> None:
    numbers = random.Random(seed)
    longest = 0.0
    for _ in range(60):
        data = numbers.randbytes(numbers.randint(1, 48))
        begin = time.process_time()
        check_document(data)
        longest = max(longest, time.process_time() - begin)
    assert longest < 5


@pytest.mark.parametrize("read", [parse_plan, parse_machine, parse_cases, parse_profile])
@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, '{"a":' * 100_000])
def test_text_nested_without_end_is_refused(read, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"^a\.file:"):
        read(text, file="a.file")


@pytest.mark.parametrize("value", ["1e25", "true", '"cpu"', '{"version": 3}', "[7]", "[[]]"])
def test_operators_that_are_no_list_are_refused(value: str) -> None:
    text = f'{{"version": {PROFILE_VERSION}, "operators": {value}}}'
    with pytest.raises(ConfigError, match=r"^a\.file:"):
        parse_profile(text, file="a.file")


@pytest.mark.parametrize("read", [machine_from_json, Trace.from_json])
def test_json_nested_without_end_is_refused(read) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="nested too deeply"):
        read("[" * 100_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_PLAN + "&a [*a]", "plan.yaml:2: not YAML: an alias inside of what it stands for"),
        (_BOMB, "aliases repeat more than 100000 values"),
        (_PLAN + "!!bool x", "plan.yaml:2: model: 'x' is not a plain value"),
        (_PLAN + "!!int ''", "plan.yaml:2: model: '' is not a plain value"),
        (_PLAN + "!!timestamp x", "plan.yaml:2: model: 'x' is not a plain value"),
        (_PLAN + "0x" + "f" * 5000, "plan.yaml"),
        (_PLAN + "a\x00b", r"plan.yaml:2: not YAML: the character '\x00' is not allowed"),
        ('"a\\nb": 1', r"unknown key 'a\nb'"),
        (_PLAN + '{"a\\nb": 1, "a\\nb": 2}', r"model.['a\nb']: key 'a\nb' appears twice"),
        (_PLAN + '"\\ud800"', "plan.yaml"),
    ],
)
def test_hostile_plan_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_plan(text, file="plan.yaml")

    assert message in str(caught.value)
    assert str(caught.value).isprintable()


def test_value_of_thousands_of_digits_is_not_shown() -> None:
    assert shown(int("0x" + "f" * 5000, 16)) == "a number of thousands of digits"


def test_number_of_thousands_of_digits_is_refused() -> None:
    many = "9" * 5000
    with pytest.raises(ConfigError, match="n_embd: must be a whole number below"):
        parse_model(f"model_type: gpt2\nn_embd: {many}", name="m", file="config.json")
    with pytest.raises(ConfigError, match="thousands of digits"):
        parse_profile(f'{{"version": {many}}}', file="profile.json")
    with pytest.raises(ValueError, match="neither a node id nor a tier"):
        parse_policy(f"bind:{many}")
    with pytest.raises(ValueError, match="beyond"):
        parse_cpulist(many)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400 + ".5"])
def test_number_that_only_infinity_stands_for_is_refused(number: str) -> None:
    text = machine_to_json(load_machine("epyc9354-cxl-a"))
    sound = '"read_latency_ns": 139.0'
    assert sound in text
    with pytest.raises(ConfigError, match="larger than any number"):
        machine_from_json(text.replace(sound, f'"read_latency_ns": {number}', 1))


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan", "1.0e+999"])
def test_plan_with_a_number_without_end_is_refused(number: str) -> None:
    plan = plan_training(
        TrainingRequest(
            model=load_model("gpt2"), machine=load_machine("epyc9354-cxl-a"), batch=1, tokens=64
        )
    )
    lines = [
        f"  seconds: {number}" if line.startswith("  seconds:") else line
        for line in plan_text(plan).splitlines()
    ]
    assert f"  seconds: {number}" in lines
    with pytest.raises(ConfigError, match=r"^p\.yaml:\d+: phases.*finite"):
        parse_plan("\n".join(lines), file="p.yaml")


def test_error_of_a_file_is_one_line_whatever_the_file_is_called() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_plan("", file="a\nb\ud800")

    assert str(caught.value) == r"a\nb\ud800:1: the file is empty"


def test_error_leaves_out_the_middle_of_what_is_very_long() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model("model_type: " + "x" * 100_000, name="m", file="config.json")

    assert str(caught.value).startswith("config.json:1: model_type: 'xxx")
    assert "characters) ..." in str(caught.value)
    assert len(str(caught.value)) < 1700


def test_digits_that_are_no_numbers_are_no_choice_of_a_machine() -> None:
    with pytest.raises(ConfigError, match="snc=²: choices are"):
        load_machine("xeon8468:snc=²")


def test_sizes_and_nodes_beyond_every_machine_are_refused() -> None:
    with pytest.raises(ValueError, match="more than addresses of 64 bits reach"):
        parse_bytes("8388608 TiB")
    with pytest.raises(ValueError, match="is not a node id"):
        Bind((1 << 31,))


@pytest.mark.parametrize(
    "text",
    [
        '{"format": "cxl_offload.trace"}',
        '{"format": "cxl_offload.trace", "version": 1, "columns": 5}',
        Trace().to_json().replace('"events":[]', '"events":[7]'),
        Trace().to_json().replace('"events":[]', '"events":{}'),
        Trace().to_json().replace('"tokens":{}', '"tokens":{"decode":"7"}'),
        "7",
        "",
    ],
)
def test_text_that_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Trace.from_json(text)


def test_absurd_batches_of_a_plan_are_bounded_by_the_memory_or_refused() -> None:
    machine = load_machine("epyc9354-cxl-a")
    asked = InferenceRequest(
        model=load_model("opt-1.3b"),
        machine=machine,
        prompt=64,
        generated=8,
        model_name="opt-1.3b",
        gpu_batches=(64,),
        most_batches=10**30,
    )
    assert plan_inference(asked).batch.count >= 1
    with pytest.raises(ValueError, match="at most 1048576 sequences"):
        TrainingJob(model=load_model("gpt2"), batch=10**30, tokens=8)
