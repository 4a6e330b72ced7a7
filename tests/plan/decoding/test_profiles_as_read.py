"""What the reader of profiles takes, plans can count with, however odd its numbers are."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from cxl_offload.errors import ConfigError
from cxl_offload.plan.decoding.engine import TRANSFORMERS
from cxl_offload.plan.decoding.measured import measured_engine
from cxl_offload.profile.store import parse_profile
from tests.fuzz.readers import READERS

MATRICES = ((1 << 20, 3), (5 << 20, 2))
COUNTS = (0, -1, 1, 2, 7, 8, 768, 10**6, 2**53, 2**62)
NUMBERS = (5e-324, 1e-300, 1e-16, 1e-15, 1e-9, 1.0, 1e18, 1e19, 1e300)


@pytest.mark.slow(reason="reads hundreds of profiles")
def test_profile_is_refused_or_every_rate_is_a_number() -> None:
    numbers = random.Random(7)
    sound = _sound()
    read = 0
    for _ in range(600):
        document = json.loads(sound)
        for _ in range(numbers.choice((1, 1, 2, 4))):
            _spoil(document["operators"][0], numbers)
        try:
            profile = parse_profile(json.dumps(document), file="p.json")
        except ConfigError:
            continue
        read += 1
        engine = measured_engine(
            TRANSFORMERS,
            profile.operators[0],
            read_bytes_per_s=3e10,
            cores=2,
            width=768,
            matrices=MATRICES,
        )
        for rate, own in zip(_rates(engine), _rates(TRANSFORMERS), strict=True):
            assert math.isfinite(rate) or rate == own  # inf: not bounded
        assert all(map(math.isfinite, engine.kv_type_shares.values()))
    assert 60 < read < 540


@pytest.mark.parametrize(
    ("name", "at", "change", "said"),
    [
        ("cache_types", 0, {"group": 4}, "cache_types lack bfloat16 in groups of 1"),
        ("cache_types", 1, {"kv_dtype": ""}, "cache_types need every type and group once"),
        ("pieces", 0, {"piece": "rotary"}, "pieces need every rows of a piece once, ascending"),
        ("pieces", 0, {"rows": 16}, "pieces need every rows of a piece once, ascending"),
        ("pieces", 1, {"rows": 9}, "pieces need norm of two numbers of rows up to 8"),
        ("products", 1, {"rows": 1}, "products need every rows for every weight_bytes"),
        ("linears", 0, {"rows": 0}, "rows, sizes and operations are 1 or more"),
        ("layers", 0, {"hidden": -1}, "rows, sizes and operations are 1 or more"),
    ],
)
def test_points_that_cannot_be_read_between_are_refused(
    name: str, at: int, change: dict[str, Any], said: str
) -> None:
    document = json.loads(_sound())
    document["operators"][0][name][at] |= change
    with pytest.raises(ConfigError, match=rf"^p\.json:\d+: operators\[0\]: .*{said}"):
        parse_profile(json.dumps(document), file="p.json")


def _sound() -> str:
    reader = next(each for each in READERS if each.name == "profile")
    return next(text for text in reader.sound() if json.loads(text)["operators"])


def _spoil(value: Any, numbers: random.Random) -> None:
    """One number becomes another; of an estimate all three."""
    holder, key = numbers.choice(list(_places(value)))
    if "median" in holder:
        holder |= dict.fromkeys(("low", "median", "high"), numbers.choice(NUMBERS))
    else:
        holder[key] = numbers.choice(COUNTS)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, dict | list):
            yield from _places(each)
        elif isinstance(each, int | float) and key not in ("version", "samples", "threads"):
            yield value, key


def _rates(engine: Any) -> Iterator[float]:
    """All numbers of an engine, those of its parts too."""
    for field in fields(engine):
        value = getattr(engine, field.name)
        if isinstance(value, float):
            yield value
        elif is_dataclass(value):
            yield from _rates(value)
