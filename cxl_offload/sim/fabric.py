"""Switches between the host and its endpoints: a tree, and who shares which of its links.

Notation (Wu et al., Performance Study of CXL Memory Topology, 3.1; a Newick string): the outermost
parentheses are the host's root complex, every inner pair is one switch, and what stands between
commas is an endpoint: a node's number or a GPU's name. A switch may have a name behind its closing
parenthesis, else it is numbered from 1 in the order of the text::

    (1,(2,3));          node 1 on the root complex, nodes 2 and 3 behind switch 1
    (1,(2,(3,gpu0)b)a); a switch behind a switch, and a GPU there

Every switch has one link towards the root, alike in both directions, which all traffic between the
host and what is below the switch shares. Traffic between two endpoints goes up to the root complex
and down again, unless both ends talk to each other directly (peer to peer): then only to the first
switch that is above both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cxl_offload.errors import ConfigError

LinkDirection = Literal["up", "down"]
Hop = tuple[str, LinkDirection]
"""A switch's link and the direction in which bytes cross it, up being towards the root."""

_WORD = re.compile(r"\s*([(),;]|[A-Za-z0-9_.\-]+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchLink:
    """The link of a switch towards the root.

    Attributes
    ----------
    bandwidth_bytes_per_s
        Of each direction.
    latency_ns
        What crossing the switch adds to an access, there and back.
    congestion_loss
        Largest share of the bandwidth that is lost when the link is offered more than it carries:
        offered ``x`` times its bandwidth, it carries ``1 - congestion_loss * (1 - 1/x)`` of it. 0
        is a switch that drops nothing; with more there is a knee, behind which further threads
        make everything slower (Wu et al., 3.3). No value is published.
    """

    bandwidth_bytes_per_s: float
    latency_ns: float = 0.0
    congestion_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth_bytes_per_s < float("inf"):
            raise ConfigError(
                f"switch with a bandwidth of {self.bandwidth_bytes_per_s} bytes/s: give a finite "
                "number above 0"
            )
        if not 0 <= self.latency_ns < float("inf") or not 0 <= self.congestion_loss < 1:
            raise ConfigError(
                f"switch with a latency of {self.latency_ns} ns and a congestion loss of "
                f"{self.congestion_loss}: latency must be >= 0, the loss in [0, 1)"
            )


@dataclass(frozen=True, slots=True)
class Fabric:
    """Where endpoints are in the tree.

    Attributes
    ----------
    above
        Endpoint -> switches from it to the root, nearest first; none for one on the root complex.
    links
        Switch -> its link.
    """

    above: Mapping[str, tuple[str, ...]]
    links: Mapping[str, SwitchLink] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        every: SwitchLink | None = None,
        links: Mapping[str, SwitchLink] | None = None,
    ) -> Fabric:
        """The fabric of a tree.

        Parameters
        ----------
        text
            The tree.
        every
            Link of the switches that ``links`` does not name.
        links
            Switch -> link.

        Raises
        ------
        ConfigError
            The text is no such tree, a name stands twice, or a switch has no link; says which.
        """
        above, switches = _TreeParser(text).tree()
        named = dict(links or {})
        unknown = sorted(set(named) - set(switches))
        if unknown:
            raise ConfigError(
                f"tree {text!r} has no switch {unknown[0]!r}; its switches are "
                f"{', '.join(switches) or 'none'}"
            )
        for switch in switches:
            if switch not in named:
                if every is None:
                    raise ConfigError(
                        f"tree {text!r}: no bandwidth of switch {switch}; give it in links, or one "
                        "for every switch"
                    )
                named[switch] = every
        return cls(above, named)

    def from_host(self, endpoint: str) -> tuple[str, ...]:
        """Switches between the root complex and an endpoint; what is not in the tree has none."""
        return self.above.get(endpoint, ())

    def latency_ns(self, endpoint: str) -> float:
        """What the switches on the way from the host add to an access."""
        return sum(self.links[switch].latency_ns for switch in self.from_host(endpoint))

    def bandwidth(self, endpoint_bytes_per_s: Mapping[str, float]) -> float:
        """Bytes/s with all these endpoints read at once: every switch caps what passes it.

        Valid for balanced streams. Source: Wu et al., 3.3 (a switch's bandwidth is shared).
        """
        above = {
            switch: "".join(path[at + 1 : at + 2])
            for path in self.above.values()
            for at, switch in enumerate(path)
        }
        through = dict.fromkeys([*above, ""], 0.0)
        for endpoint, rate in endpoint_bytes_per_s.items():
            through["".join(self.from_host(endpoint)[:1])] += rate
        depth = {
            switch: len(path) - at for path in self.above.values() for at, switch in enumerate(path)
        }
        for switch in sorted(above, key=lambda each: -depth[each]):
            through[above[switch]] += min(through[switch], self.links[switch].bandwidth_bytes_per_s)
        return through[""]

    def route(self, source: str | None, target: str | None, *, direct: bool = False) -> list[Hop]:
        """Links that bytes cross from ``source`` to ``target``; ``None`` is the host itself.

        ``direct``: peer to peer, so nothing goes above the first switch that both are below.
        """
        ups = self.from_host(source) if source is not None else ()
        downs = self.from_host(target) if target is not None else ()
        if direct:
            common = set(ups) & set(downs)
            ups = tuple(switch for switch in ups if switch not in common)
            downs = tuple(switch for switch in downs if switch not in common)
        return [(switch, "up") for switch in ups] + [(switch, "down") for switch in downs]


class _TreeParser:
    """Recursive descent over the words of a tree."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._words = self._split(text)
        self._at = 0
        self._above: dict[str, list[str]] = {}
        self._switches: list[str] = []

    def tree(self) -> tuple[dict[str, tuple[str, ...]], list[str]]:
        self._expect("(")
        self._children()
        if self._peek() == ";":
            self._at += 1
        if self._at < len(self._words):
            raise self._wrong(f"{self._words[self._at]!r} after the end of the tree")
        return {name: tuple(path) for name, path in self._above.items()}, self._switches

    def _split(self, text: str) -> list[str]:
        words = []
        at = 0
        while at < len(text):
            match = _WORD.match(text, at)
            if match is None:
                raise self._wrong(f"{text[at]!r} at {at} is no name and none of ( ) , ;")
            words.append(match.group(1))
            at = match.end()
        return words

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(f"tree {self._text!r}: {what}; want a tree like (1,(2,3));")

    def _peek(self) -> str:
        return self._words[self._at] if self._at < len(self._words) else ""

    def _expect(self, word: str) -> None:
        if self._peek() != word:
            raise self._wrong(f"{self._peek() or 'the end'!r} where {word!r} belongs")
        self._at += 1

    def _children(self) -> list[str]:
        """Endpoints of one pair of parentheses, whose opening one has been read."""
        below = [*self._child()]
        while self._peek() == ",":
            self._at += 1
            below += self._child()
        self._expect(")")
        return below

    def _child(self) -> list[str]:
        word = self._peek()
        if word == "(":
            self._at += 1
            place = len(self._switches)
            self._switches.append("")
            below = self._children()
            name = str(place + 1)
            if self._peek() not in ("", "(", ")", ",", ";"):
                name = self._peek()
                self._at += 1
            if name in self._switches:
                raise self._wrong(f"two switches are called {name!r}")
            self._switches[place] = name
            for endpoint in below:
                self._above[endpoint].append(name)
            return below
        if word in ("", ")", ",", ";"):
            raise self._wrong(f"{word or 'the end'!r} where an endpoint belongs")
        self._at += 1
        if word in self._above:
            raise self._wrong(f"endpoint {word!r} stands twice")
        self._above[word] = []
        return [word]
