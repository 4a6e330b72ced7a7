from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cxl_offload.plan.laws.topology_path import (
    Switch,
    endpoint_names,
    parse_tree,
    path_latencies_ns,
    tree_bandwidth,
)

shapes = st.recursive(
    st.just("leaf"), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=8
).filter(lambda shape: isinstance(shape, list))


def written(shape: object, names: list[str]) -> str:
    """The text of a shape, its leaves numbered into ``names`` in order."""
    if isinstance(shape, list):
        return "(" + ", ".join(written(child, names) for child in shape) + ")"
    names.append(f"e{len(names)}")
    return names[-1]


@given(shapes)
def test_paths_count_the_parentheses_around_each_name(shape: object) -> None:
    names: list[str] = []
    text = written(shape, names) + ";"
    root = parse_tree(text)
    latencies = path_latencies_ns(root, dict.fromkeys(names, 200.0), switch_latency_ns=70.0)
    depths = [
        text[: text.index(name)].count("(") - text[: text.index(name)].count(")") for name in names
    ]
    assert endpoint_names(root) == tuple(names)
    assert latencies == tuple(200 + 70 * (depth - 1) for depth in depths)


@given(shapes, st.integers(1, 200))
def test_tree_bandwidth_is_capped_by_each_switch_and_the_endpoints(shape: object, cap: int) -> None:
    names: list[str] = []
    root = parse_tree(written(shape, names))
    total = tree_bandwidth(root, dict.fromkeys(names, 28.0), switch_bytes_per_s=cap)
    behind = sum(isinstance(child, Switch) for child in root.children)
    direct = len(root.children) - behind
    assert total <= 28 * len(names)
    assert 28 * direct <= total <= 28 * direct + cap * behind
    wide = tree_bandwidth(root, dict.fromkeys(names, 28.0), switch_bytes_per_s=1e9)
    assert wide == 28 * len(names)


def test_nested_switches_each_cap_what_passes_them() -> None:
    rates = {"a": 10.0, "b": 20.0, "c": 30.0, "d": 30.0}
    root = parse_tree("(a,(b,(c,d)));")
    assert tree_bandwidth(root, rates, switch_bytes_per_s=40) == 10 + min(40, 20 + min(40, 60))


@pytest.mark.parametrize(
    "text",
    ["", ";", "a;", "();", "(a,,b);", "(a,);", "(a b);", "(a)(b);", "((a);", "(a));", "(a:1);",
     "(a,a);", "(a;b);", ",(a);"],
)  # fmt: skip
def test_text_that_is_no_tree_raises(text: str) -> None:
    with pytest.raises(ValueError, match="tree"):
        parse_tree(text)
