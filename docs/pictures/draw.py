"""Draws the pictures of the concepts as SVG files beside this script.

    python docs/pictures/draw.py [FOLDER]

Numbers and pages come from a shipped machine file and from simulated tensors. A picture has a
background of its own and follows the light or dark scheme of the reader.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

import torch

import cxl_offload
from cxl_offload.topology import Machine
from cxl_offload.units import GB, format_bytes

MACHINE = "epyc9354-cxl-a"
POLICIES = (
    ("bind:ldram", "bind:ldram"),
    ("preferred:ldram,cxl", "preferred:ldram,cxl, with room for 10 granules in ldram"),
    ("interleave:ldram,cxl", "interleave:ldram,cxl"),
    ("weighted:ldram=3,cxl=1", "weighted:ldram=3,cxl=1"),
    ("interleave:ldram,rdram,cxl", "interleave:ldram,rdram,cxl"),
)
GRANULES = 16
GRANULE = 2 << 20
"""Bytes; the granule of a policy that names none."""

STYLE = """
 .paper { fill: #ffffff } .card { fill: #f4f6f8; stroke: #8c959f; stroke-width: 2 }
 text { font: 14px system-ui, sans-serif; fill: #1c1e21 } .dim { fill: #5d646c; font-size: 12.5px }
 .bold { font-weight: 600 } .line { stroke: #5d646c; stroke-width: 2; fill: none }
 .tip { fill: #5d646c } .ldram { fill: #0072b2; stroke: #0072b2 }
 .rdram { fill: #3f9fd6; stroke: #3f9fd6 } .cxl { fill: #c8500a; stroke: #c8500a }
 .gpu { fill: #7a4fb5; stroke: #7a4fb5 } .yes { fill: #0a7d4f; stroke: #0a7d4f }
 .edge { fill-opacity: 0.12; stroke-width: 2 }
 @media (prefers-color-scheme: dark) {
 .paper { fill: #16181b } .card { fill: #1f2226; stroke: #6e7681 } text { fill: #e8eaed }
 .dim { fill: #a3abb3 } .line { stroke: #a3abb3 } .tip { fill: #a3abb3 }
 .ldram { fill: #4fa9e3; stroke: #4fa9e3 } .rdram { fill: #8cc8ef; stroke: #8cc8ef }
 .cxl { fill: #f08a4b; stroke: #f08a4b } .gpu { fill: #b794f0; stroke: #b794f0 }
 .yes { fill: #4fc08d; stroke: #4fc08d } .edge { fill-opacity: 0.2 } }
"""


class Sheet:
    """The parts of one picture, in the order in which they are drawn."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, look: str, *lines: str) -> None:
        """A rounded box; its first line is bold, and all are centred."""
        self.parts.append(
            f'<rect class="{look}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="8"/>'
        )
        top = y + h / 2 - 9 * (len(lines) - 1) + 5
        for at, line in enumerate(lines):
            self.text(x + w / 2, top + 18 * at, line, "bold" if at == 0 else "dim", "middle")

    def text(self, x: float, y: float, line: str, look: str = "", anchor: str = "start") -> None:
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{look}" text-anchor="{anchor}">{escape(line)}</text>'
        )

    def arrow(self, points: str, *, both: bool = False) -> None:
        """A path through ``points`` ("x y x y ..."), with a tip at its end, or at both."""
        tips = ' marker-end="url(#tip)"' + (' marker-start="url(#tip)"' if both else "")
        self.parts.append(f'<path class="line" d="M{points}"{tips}/>')

    def svg(self) -> str:
        tip = (
            '<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            'markerHeight="7" orient="auto-start-reverse">'
            '<path class="tip" d="M0 0L10 5L0 10z"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n<defs>{tip}</defs>\n"
            f'<rect class="paper" width="{self.width}" height="{self.height}" rx="10"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def machine() -> Sheet:
    """A GPU above, two sockets with their DRAM, and a CXL card: numbers of a machine file."""
    shown = cxl_offload.load_machine(MACHINE)
    sheet = Sheet(720, 392, "A host with two sockets, a CXL card and a GPU")
    (gpu,) = shown.gpus
    assert gpu.link is not None
    assert gpu.link.h2d_bandwidth_bytes_per_s is not None
    rate = f"{gpu.link.h2d_bandwidth_bytes_per_s / GB:g} GB/s"
    sheet.box(60, 24, 230, 66, "gpu edge", f"GPU ({gpu.name})", format_bytes(gpu.memory_bytes or 0))
    sheet.arrow("175 90 175 150", both=True)
    sheet.text(187, 124, f"link, {rate} assumed", "dim")
    sheet.box(60, 150, 230, 56, "card", "CPUs of socket 1", "read and write tensors")
    sheet.box(430, 150, 230, 56, "card", "CPUs of socket 0", "idle, or helping")
    sheet.arrow("290 178 430 178", both=True)
    sheet.text(360, 168, "between sockets", "dim", "middle")
    sheet.arrow("120 206 120 270", both=True)
    sheet.arrow("545 206 545 270", both=True)
    sheet.arrow("250 206 250 238 360 238 360 270", both=True)
    for x, node, name in ((25, 0, "ldram"), (265, 2, "cxl"), (450, 1, "rdram")):
        sheet.box(x, 270, 190 if node != 2 else 170, 88, f"{name} edge", *_node(shown, node, name))
    sheet.text(360, 380, "as the CPUs of socket 1 see it; published numbers", "dim", "middle")
    return sheet


def _node(shown: Machine, node: int, tier: str) -> list[str]:
    access = shown.access(0, node)
    assert access is not None
    assert access.read_bandwidth_bytes_per_s is not None
    latency = access.read_latency_ns
    return [
        f"node {node}: {tier}",
        format_bytes(shown.node(node).capacity_bytes or 0),
        f"at most {access.read_bandwidth_bytes_per_s / GB:g} GB/s",
        "latency not published" if latency is None else f"{latency:g} ns",
    ]


def steps() -> Sheet:
    """Who reads what: one step of ZeRO-Offload, and one token of decoding."""
    sheet = Sheet(720, 366, "Who reads what in a training step and in a decoded token")
    rows = (
        (
            "A training step (ZeRO-Offload)",
            ("forward, backward", "parameters", "GPU"),
            ("gradients to the host", "2 bytes a parameter", "link"),
            ("optimizer", "28 bytes a parameter", "CPU"),
            ("parameters back", "2 bytes a parameter", "link"),
        ),
        (
            "A decoded token (weights and KV cache offloaded)",
            ("weights of a layer", "all of them", "link"),
            ("products", "GPU memory", "GPU"),
            ("attention", "the whole KV cache", "CPU"),
            ("result to the GPU", "one row a sequence", "link"),
        ),
    )
    for at, (head, *boxes) in enumerate(rows):
        top = 24 + 150 * at
        sheet.text(24, top + 14, head, "bold")
        for number, (what, size, who) in enumerate(boxes):
            x = 24 + 172 * number
            look = {"GPU": "gpu edge", "CPU": "ldram edge", "link": "card"}[who]
            sheet.box(x, top + 32, 152, 84, look, who, what, size)
            if number:
                sheet.arrow(f"{x - 20} {top + 74} {x - 3} {top + 74}")
    sheet.text(
        24, 326, "A link is as fast as the slower of itself and the memory that it reads.", "dim"
    )
    sheet.text(
        24, 346, "What the CPU does is as fast as the tiers in which the tensors lie.", "dim"
    )
    return sheet


def policies() -> Sheet:
    """Pages of tensors on simulated nodes, one row a policy."""
    sheet = Sheet(720, 76 + 62 * len(POLICIES), "Where the pages of one tensor lie")
    for at, name in enumerate(("ldram", "rdram", "cxl")):
        sheet.parts.append(
            f'<rect class="{name}" x="{24 + 110 * at}" y="22" width="16" height="16" rx="3"/>'
        )
        sheet.text(48 + 110 * at, 35, name)
    for row, (policy, label) in enumerate(POLICIES):
        top = 60 + 62 * row
        sheet.text(24, top + 12, label, "dim")
        for at, tier in enumerate(granules(policy)):
            sheet.parts.append(
                f'<rect class="{tier}" x="{24 + 42 * at}" y="{top + 20}" '
                'width="36" height="26" rx="4"/>'
            )
    return sheet


def granules(policy: str) -> list[str]:
    """The tier of each granule of a tensor, asked from its simulated pages."""
    shown = cxl_offload.load_machine(MACHINE)
    room = {0: 10 * GRANULE} if policy.startswith("preferred") else None
    session = cxl_offload.Session.simulated(shown, limits=room)
    tensor = cxl_offload.empty(
        GRANULES * GRANULE, dtype=torch.uint8, policy=policy, session=session
    )
    tiers = {node: tier.name for tier in shown.tiers for node in tier.nodes}
    found = []
    for at in range(GRANULES):
        (node,) = session.bytes_per_node(tensor.data_ptr() + at * GRANULE, GRANULE)
        found.append(tiers[node])
    return found


def decision() -> Sheet:
    """The five questions of does-cxl-pay.md; a verdict stands right of its question."""
    sheet = Sheet(720, 580, "Does CXL pay for me? Five questions")
    rows = (
        ("1. Does all fit in DRAM,", "at the batch you want?", None, ""),
        ("2. Do you train?", "", "pays only if the", "states fit no other way"),
        (
            "3. Is the alternative a drive,",
            "a smaller batch, or nothing?",
            "CXL pays",
            "by its room",
        ),
        ("4. Does the GPU read it", "over a PCIe 5 link?", "keep it in DRAM", "the card is slower"),
        ("5. Is DRAM saturated by", "long runs of bytes?", "interleave large ones", "and measure"),
    )
    for at, (first, second, verdict, why) in enumerate(rows):
        top = 24 + 96 * at
        sheet.box(150, top, 240, 62, "card", *filter(None, (first, second)))
        if verdict is not None:
            look = "yes edge" if at in (2, 4) else "rdram edge"
            sheet.box(500, top, 196, 62, look, *filter(None, (verdict, why)))
            sheet.arrow(f"390 {top + 31} 497 {top + 31}")
            sheet.text(444, top + 24, "yes", "dim", "middle")
        if at in (0, 1, 2, 3):
            sheet.arrow(f"270 {top + 62} 270 {top + 93}")
            sheet.text(280, top + 83, "no", "dim")
    sheet.arrow("150 55 60 55 60 343 147 343")
    sheet.text(105, 47, "yes", "dim", "middle")
    sheet.arrow("270 470 270 503")
    sheet.text(280, 492, "no", "dim")
    sheet.box(150, 506, 240, 50, "cxl edge", "leave CXL memory alone")
    return sheet


PICTURES = (machine, steps, policies, decision)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for draw in PICTURES:
        (folder / f"{draw.__name__}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
