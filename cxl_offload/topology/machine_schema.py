"""The sections of a machine file: each function turns one list of entries into model objects.

An entry may carry ``when: {snc: 4}``: it counts only for that choice of the file's variants.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from cxl_offload.files import Field
from cxl_offload.topology.links import Access, DmaPath, Drive, Gpu, Link
from cxl_offload.topology.model import TIER_NAMES, Fact, Tier, Variant
from cxl_offload.topology.node import Node, NodeKind
from cxl_offload.topology.quantity import (
    SOURCE_KEYS,
    Citations,
    fact_parser,
    parse_flops,
    parse_seconds,
)

_LOCAL_DISTANCE = 10  # ACPI SLIT: the distance of a node to itself
_TIER_KINDS = {
    "ldram": {NodeKind.DRAM},
    "rdram": {NodeKind.DRAM},
    "cxl": {NodeKind.CXL},
    "hbm": {NodeKind.HBM, NodeKind.GPU},
    "nvme": set[NodeKind](),
}


@dataclass(frozen=True, slots=True)
class Sections:
    """Reads the lists of one machine file for one choice of its variants."""

    citations: Citations
    variant: Variant

    def _chosen(self, field: Field | None) -> list[Field]:
        """Items of a list whose ``when`` matches the chosen variant."""
        return [item for item in (field.items() if field else []) if self._matches(item)]

    def _matches(self, item: Field) -> bool:
        when = item.entries().get("when")
        if when is None:
            return True
        wanted = when.entries()
        for name, value in wanted.items():
            if name not in self.variant:
                known = ", ".join(self.variant) or "none"
                value.fail(f"{name!r} is no variant of this file; its variants are {known}")
        return all(self.variant[name] == value.choice() for name, value in wanted.items())

    def nodes(self, field: Field) -> tuple[Node, ...]:
        """``nodes``: ids, kinds, CPUs and capacities."""
        nodes: dict[int, Node] = {}
        for item in self._chosen(field):
            node = self._node(item)
            if node.id in nodes:
                item.fail(f"node {node.id} appears twice")
            nodes[node.id] = node
        if not nodes:
            field.fail("a machine has at least one node")
        return tuple(nodes[node_id] for node_id in sorted(nodes))

    def _node(self, item: Field) -> Node:
        optional = ["socket", "cpus", "capacity", "installed", "llc", "gpu", "description", "when"]
        parts = item.mapping(["id", "kind"], optional)
        kinds = [kind.value for kind in NodeKind]
        if parts["kind"].text() not in kinds:
            parts["kind"].fail(f"{parts['kind'].text()!r} is no kind of node: {', '.join(kinds)}")
        node_id = parts["id"].integer()
        cite, what = self.citations, f"node {node_id}"
        return Node(
            id=node_id,
            kind=NodeKind(parts["kind"].text()),
            cpus=cite.cpus(parts.get("cpus"), f"{what} CPUs"),
            capacity_bytes=cite.bytes(parts.get("capacity"), f"{what} capacity") or 0,
            installed_bytes=cite.bytes(parts.get("installed"), f"{what} installed memory"),
            llc_bytes=cite.bytes(parts.get("llc"), f"{what} last-level cache"),
            socket=parts["socket"].integer() if "socket" in parts else None,
            gpu=parts["gpu"].text() if "gpu" in parts else None,
            description=parts["description"].text() if "description" in parts else "",
        )

    def distances(self, field: Field | None, ids: set[int]) -> dict[int, dict[int, int]]:
        """``distances``: a full square of rows, 10 on the diagonal, more elsewhere."""
        if field is None:
            return {}
        parts = field.mapping(["rows"], SOURCE_KEYS)
        rows: dict[int, dict[int, int]] = {}
        for row in parts["rows"].entries().values():
            node = self._key_node(row, ids)
            columns = {self._key_node(cell, ids): cell for cell in row.entries().values()}
            rows[node] = {to: cell.integer(minimum=_LOCAL_DISTANCE) for to, cell in columns.items()}
            for to, cell in columns.items():
                if (rows[node][to] == _LOCAL_DISTANCE) != (to == node):
                    cell.fail(
                        f"{_LOCAL_DISTANCE} is the distance of a node to itself, and no other"
                    )
            missing = sorted(ids - set(columns))
            if missing:
                row.fail(f"has no distance to node {missing[0]}; every row names every node")
        if set(rows) != ids:
            parts["rows"].fail(f"node {min(ids - set(rows))} has no row")
        self.citations.cite(field, parts, "distances", f"{len(rows)}x{len(rows)}")
        return rows

    def _key_node(self, field: Field, ids: set[int]) -> int:
        text = field.path.rpartition(".")[2]
        if not text.isdigit() or int(text) not in ids:
            field.fail(f"{text!r} is no node of this file: {', '.join(map(str, sorted(ids)))}")
        return int(text)

    def _reference(self, field: Field, ids: set[int]) -> int:
        node_id = field.integer()
        if node_id not in ids:
            field.fail(f"node {node_id} is not one of {', '.join(map(str, sorted(ids)))}")
        return node_id

    def accesses(self, field: Field | None, ids: set[int]) -> tuple[Access, ...]:
        """``accesses``: what the CPUs of one node reach on another; entries of a pair add up."""
        found: dict[tuple[int, int], Access] = {}
        for item in self._chosen(field):
            access = self._access(item, ids)
            pair = (access.initiator, access.target)
            found[pair] = _merged(found[pair], access, item) if pair in found else access
        return tuple(found[pair] for pair in sorted(found))

    def _access(self, item: Field, ids: set[int]) -> Access:
        numbers = ("read_latency", "write_latency", "read_bandwidth", "write_bandwidth")
        threads = ("read_saturation_threads", "write_saturation_threads")
        parts = item.mapping(["from", "to"], [*numbers, *threads, "when"])
        initiator = self._reference(parts["from"], ids)
        target = self._reference(parts["to"], ids)
        cite, before = self.citations, len(self.citations.collected)
        what = f"access {initiator}->{target}"
        access = Access(
            initiator,
            target,
            cite.latency_ns(parts.get("read_latency"), f"{what} read latency"),
            cite.latency_ns(parts.get("write_latency"), f"{what} write latency"),
            cite.bandwidth(parts.get("read_bandwidth"), f"{what} read bandwidth"),
            cite.bandwidth(parts.get("write_bandwidth"), f"{what} write bandwidth"),
            "",
            cite.count(parts.get("read_saturation_threads"), f"{what} read saturation"),
            cite.count(parts.get("write_saturation_threads"), f"{what} write saturation"),
        )
        return replace(access, source=self._sources_since(before))

    def _sources_since(self, before: int) -> str:
        fresh = self.citations.collected[before:]
        return "; ".join(dict.fromkeys(citation.source for citation in fresh))

    def gpus(self, field: Field | None, ids: set[int]) -> tuple[Gpu, ...]:
        """``gpus``, each with its link to the host."""
        return tuple(self._gpu(item, ids) for item in self._chosen(field))

    def _gpu(self, item: Field, ids: set[int]) -> Gpu:
        numbers = ["memory", "memory_bandwidth", "peak_flops", "link"]
        optional = [*numbers, "model", "node", "memory_node", "peer_to_peer_cxl", "when"]
        parts = item.mapping(["name"], optional)
        name, cite = parts["name"].text(), self.citations
        before, what = len(cite.collected), f"GPU {name}"
        flops = parts.get("peak_flops")
        gpu = Gpu(
            name=name,
            node=self._reference(parts["node"], ids) if "node" in parts else None,
            memory_node=self._reference(parts["memory_node"], ids)
            if "memory_node" in parts
            else None,
            memory_bytes=cite.bytes(parts.get("memory"), f"{what} memory"),
            memory_bandwidth_bytes_per_s=cite.bandwidth(
                parts.get("memory_bandwidth"), f"{what} memory bandwidth"
            ),
            peak_flops_per_s=cite.number(flops, f"{what} peak rate", parse_flops)
            if flops
            else None,
            link=self._link(parts["link"], f"{what} link") if "link" in parts else None,
            peer_to_peer_cxl="peer_to_peer_cxl" in parts and parts["peer_to_peer_cxl"].boolean(),
            model=parts["model"].text() if "model" in parts else "",
        )
        return replace(gpu, source=self._sources_since(before))

    def _link(self, field: Field, what: str) -> Link:
        parts = field.mapping([], ["description", "peak", "h2d", "d2h", "setup"])
        cite, before = self.citations, len(self.citations.collected)
        setup = parts.get("setup")
        link = Link(
            cite.bandwidth(parts.get("h2d"), f"{what} host to device"),
            cite.bandwidth(parts.get("d2h"), f"{what} device to host"),
            cite.number(setup, f"{what} setup", parse_seconds) if setup else None,
            cite.bandwidth(parts.get("peak"), f"{what} peak"),
            parts["description"].text() if "description" in parts else "",
        )
        return replace(link, source=self._sources_since(before))

    def dma_paths(
        self, field: Field | None, ids: set[int], gpus: tuple[Gpu, ...]
    ) -> tuple[DmaPath, ...]:
        """``dma_paths``: what a node delivers to a GPU's copies."""
        names = {gpu.name for gpu in gpus}
        return tuple(self._dma_path(item, ids, names) for item in self._chosen(field))

    def _dma_path(self, item: Field, ids: set[int], names: set[str]) -> DmaPath:
        parts = item.mapping(["gpu", "node"], ["h2d", "d2h", "extra_latency", "when"])
        gpu = parts["gpu"].text()
        if gpu not in names:
            parts["gpu"].fail(f"{gpu!r} is no GPU of this file: {', '.join(sorted(names))}")
        node = self._reference(parts["node"], ids)
        cite, before, what = self.citations, len(self.citations.collected), f"copies {gpu}-{node}"
        path = DmaPath(
            gpu,
            node,
            cite.bandwidth(parts.get("h2d"), f"{what} host to device"),
            cite.bandwidth(parts.get("d2h"), f"{what} device to host"),
            cite.latency_ns(parts.get("extra_latency"), f"{what} extra latency"),
        )
        return replace(path, source=self._sources_since(before))

    def drives(self, field: Field | None) -> tuple[Drive, ...]:
        """``drives`` behind the nvme tier."""
        return tuple(self._drive(item) for item in self._chosen(field))

    def _drive(self, item: Field) -> Drive:
        optional = ["read_bandwidth", "write_bandwidth", "when"]
        parts = item.mapping(["name", "capacity"], optional)
        name, cite = parts["name"].text(), self.citations
        before, what = len(cite.collected), f"drive {name}"
        drive = Drive(
            name,
            cite.bytes(parts["capacity"], f"{what} capacity") or 0,
            cite.bandwidth(parts.get("read_bandwidth"), f"{what} read bandwidth"),
            cite.bandwidth(parts.get("write_bandwidth"), f"{what} write bandwidth"),
        )
        return replace(drive, source=self._sources_since(before))

    def tiers(self, field: Field, nodes: tuple[Node, ...]) -> tuple[Tier, ...]:
        """``tiers``: known names, nodes of the fitting kind, no node in two tiers."""
        tiers: list[Tier] = []
        by_id = {node.id: node for node in nodes}
        for name, listed in field.entries().items():
            if name not in TIER_NAMES:
                listed.fail(f"tier {name!r} is unknown; tiers are {', '.join(TIER_NAMES)}")
            ids: list[int] = []
            for item in listed.items():
                node = by_id[self._reference(item, set(by_id))]
                if node.kind not in _TIER_KINDS[name]:
                    item.fail(f"node {node.id} is {node.kind.value}, which is no {name} memory")
                if node.id in ids or any(node.id in tier.nodes for tier in tiers):
                    item.fail(f"node {node.id} is already in a tier")
                ids.append(node.id)
            tiers.append(Tier(name, tuple(ids)))
        return tuple(sorted(tiers, key=lambda tier: TIER_NAMES.index(tier.name)))

    def facts(self, field: Field | None) -> tuple[Fact, ...]:
        """``facts``: published numbers that fit no other field."""
        found: dict[str, Fact] = {}
        for item in self._chosen(field):
            name = item.mapping(["name", "value"], [*SOURCE_KEYS, "when"])["name"]
            if name.text() in found:
                name.fail(f"fact {name.text()!r} appears twice")
            found[name.text()] = self._fact(item, name)
        return tuple(found.values())

    def _fact(self, item: Field, name: Field) -> Fact:
        before = len(self.citations.collected)
        parse = fact_parser(name)
        number = self.citations.fact(item, name.text(), parse)
        return Fact(name.text(), number, self._sources_since(before))


def _merged(first: Access, second: Access, item: Field) -> Access:
    changes: dict[str, object] = {}
    for entry in fields(Access):
        if entry.name in ("initiator", "target", "source"):
            continue
        old, new = getattr(first, entry.name), getattr(second, entry.name)
        if old is not None and new is not None:
            item.fail(f"{entry.name} from {first.initiator} to {first.target} appears twice")
        changes[entry.name] = new if old is None else old
    source = "; ".join(dict.fromkeys(part for part in (first.source, second.source) if part))
    return replace(first, **changes, source=source)  # type: ignore[arg-type]
