"""Random machines that keep the invariants of the model."""

from __future__ import annotations

from hypothesis import strategies as st

from cxl_offload.topology import (
    Access,
    BlockGroup,
    CxlEvidence,
    DaxDevice,
    DmaPath,
    Fact,
    Gpu,
    HugePagePool,
    Limits,
    Link,
    Machine,
    Node,
    NodeKind,
    Tier,
    Zone,
)

_SIZES = st.integers(0, 1 << 45)
_RATES = st.none() | st.floats(1.0, 1e13, allow_nan=False)
# What a file may hold: control characters are refused, because they would write to terminals.
_TEXT = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), include_characters="\n\t"), max_size=12
)

_EVIDENCE = st.builds(
    CxlEvidence,
    kind=st.sampled_from(["cxl-region", "hmat-cpuless", "distance-cpuless"]),
    detail=_TEXT,
    region=st.none() | _TEXT,
    memdevs=st.lists(_TEXT, max_size=2).map(tuple),
    interleave_ways=st.none() | st.integers(1, 8),
)
_LINKS = st.builds(Link, _RATES, _RATES, st.none() | st.floats(0, 1), _RATES, _TEXT, _TEXT)


@st.composite
def nodes(draw: st.DrawFn, node_id: int) -> Node:
    return Node(
        id=node_id,
        kind=draw(st.sampled_from(NodeKind)),
        cpus=tuple(sorted(draw(st.sets(st.integers(0, 500), max_size=5)))),
        capacity_bytes=draw(_SIZES),
        free_bytes=draw(st.none() | _SIZES),
        allowed=draw(st.booleans()),
        online=draw(st.booleans()),
        socket=draw(st.none() | st.integers(0, 3)),
        zones=draw(
            st.lists(st.builds(Zone, _TEXT, _SIZES, st.none() | _SIZES), max_size=2).map(tuple)
        ),
        blocks=draw(
            st.lists(st.builds(BlockGroup, _TEXT, _TEXT, _SIZES, _SIZES), max_size=2).map(tuple)
        ),
        huge_pages=draw(
            st.lists(st.builds(HugePagePool, _SIZES, _SIZES, _SIZES), max_size=2).map(tuple)
        ),
        evidence=draw(st.none() | _EVIDENCE),
        description=draw(_TEXT),
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    ids = sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=4)))
    some = st.sampled_from(ids)
    pairs = draw(st.sets(st.tuples(some, some), max_size=4))
    gpus = tuple(
        Gpu(f"gpu{index}", draw(st.none() | some), draw(st.none() | _SIZES), link=draw(_LINKS))
        for index in range(draw(st.integers(0, 2)))
    )
    order = draw(st.permutations(ids))
    return Machine(
        name=draw(_TEXT),
        nodes=tuple(draw(nodes(node_id)) for node_id in ids),
        distances={a: {b: draw(st.integers(10, 255)) for b in ids} for a in ids},
        accesses=tuple(Access(a, b, draw(_RATES), None, draw(_RATES)) for a, b in sorted(pairs)),
        gpus=gpus,
        tiers=(Tier("ldram", tuple(order[:1])), Tier("cxl", tuple(order[1:])), Tier("nvme", ())),
        dax=tuple(
            draw(st.lists(st.builds(DaxDevice, _TEXT, st.just("devdax"), _SIZES), max_size=2))
        ),
        limits=draw(
            st.builds(
                Limits,
                mems_allowed=st.none() | st.just(tuple(ids)),
                cgroup_version=st.sampled_from([None, 1, 2]),
                cgroup_max_bytes=st.none() | _SIZES,
                memlock_bytes=st.none() | _SIZES,
            )
        ),
        simulated=draw(st.booleans()),
        initiator=draw(some),
        dma_paths=tuple(DmaPath(gpu.name, draw(some), draw(_RATES)) for gpu in gpus),
        facts=tuple(draw(st.lists(st.builds(Fact, _TEXT, st.floats(0, 1e9), _TEXT), max_size=2))),
        variant=draw(st.dictionaries(_TEXT, st.booleans() | st.integers(0, 9) | _TEXT, max_size=2)),
        notes=tuple(draw(st.lists(_TEXT, max_size=2))),
    )
