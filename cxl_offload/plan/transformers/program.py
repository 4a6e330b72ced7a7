"""Shares of every kind on every node, for one layout, as a linear program.

All columns are of one batch: bytes and seconds of a block over its number of batches, so that this
number is a column too (its inverse), and the program without it fixed bounds all numbers at once.
What CPUs multiply is then charged as if it were spread by the nodes' rates; with the number fixed,
seconds are those of :mod:`cxl_offload.plan.decoding.phases`, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping

from cxl_offload.plan.decoding.copied_states import store_costs
from cxl_offload.plan.decoding.engine import kv_store_costs
from cxl_offload.plan.decoding.phases import (
    between_products_seconds,
    decode_gpu_seconds,
    decode_rows_seconds,
    first_copy_rate,
    joined_bytes,
    joined_calls_seconds,
    prefill_between_seconds,
    prefill_cpu_seconds,
    prefill_flops,
    states_calls_seconds,
)
from cxl_offload.plan.equations.row_states import STATES
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.solve import Program, Terms
from cxl_offload.plan.transformers.job import DecoderJob
from cxl_offload.plan.transformers.layout import Layout
from cxl_offload.plan.transformers.shares import IDLE, KV, ON_CPU, STREAMED, Fixed, Shares
from cxl_offload.plan.transformers.states import copied_states

_FIRST_PREFERRED = 1e-7
"""Cost of a slow home, in units of the seconds of a batch: of equals, the fast homes."""


_KV_BOTH = (0.01, 0.99)
"""Shares of a cache on the GPU that is in both places: all and nothing are other layouts."""


class SharesProgram:
    """One layout as a program.

    Parameters
    ----------
    batches
        Fewest and most batches: the number where they are equal, or else as many as are best, not
        only whole ones. Without a GPU a pass over them then reads what the fewest ask for of
        experts, which is a bound.
    unit_s
        Seconds near the answer.
    banned
        Classes of tensors, each with the nodes that it may not be on.
    fixed
        Shares that are given.
    """

    def __init__(
        self,
        job: DecoderJob,
        hardware: Hardware,
        layout: Layout,
        *,
        batches: tuple[int, int],
        unit_s: float,
        banned: Mapping[str, frozenset[int]] | None = None,
        fixed: Fixed | None = None,
    ) -> None:
        self.job, self.hardware, self.layout = job, hardware, layout
        self._banned = banned or {}
        self._batches, self._fixed = batches, fixed or Fixed()
        fewest, most = batches
        self._unit_b, self._unit_s = float(job.weight_bytes), unit_s
        self.program = Program()
        self.resident: int | None = None
        self.kv_there: int | None = None
        self.copied = layout.bytes_of(job, layout.copied)
        self.state_bytes = layout.state_bytes(job, layout.rows)
        self.copied_states = copied_states(job, layout, layout.rows)
        self.inverse = self.program.column("1 / batches", low=1.0 / most, high=1.0 / fewest)
        self._columns()
        self._rooms()
        self._decode()
        self._prefill()

    def _columns(self) -> None:
        column, layout, job = self.program.column, self.layout, self.job
        totals = {
            STREAMED: float(layout.bytes_of(job, layout.streamed)),
            ON_CPU: float(layout.bytes_of(job, layout.on_cpu)),
            IDLE: float(layout.bytes_of(job, layout.idle)),
        }
        self.on: dict[str, list[int]] = {}
        for name, nbytes in totals.items():
            if nbytes:
                self.on[name] = self._on_nodes(name)
                terms = dict.fromkeys(self.on[name], 1.0)
                if name == STREAMED:
                    terms |= self._resident_layers()
                self._row(f"all {name}", {**terms, self.inverse: -nbytes / self._unit_b}, equal=0)
        self.kv_bytes = layout.rows * job.kv_sequence_bytes
        if layout.kv != "gpu":
            self.on[KV] = self._on_nodes(KV)
            terms = dict.fromkeys(self.on[KV], 1.0)
            if layout.kv == "both":
                given = self._fixed.kv_gpu
                low, high = _KV_BOTH if given is None else (given, given)
                whole = self.kv_bytes / self._unit_b
                self.kv_there = column("kv gpu", low=low * whole, high=high * whole)
                terms[self.kv_there] = 1.0
            self._row("all kv", terms, equal=self.kv_bytes / self._unit_b)
        if self.state_bytes:
            self.on[STATES] = self._on_nodes(STATES)
            terms = dict.fromkeys(self.on[STATES], 1.0)
            self._row("all states", terms, equal=self.state_bytes / self._unit_b)
        steps = float(self.job.generated - 1)
        self.prefill, self.token = column("prefill", cost=1.0), column("token", cost=steps)
        self.load, self.attention = column("load"), column("attention")
        self.products = column("products")
        self.prefill_load = column("prefill load") if self.state_bytes else self.load

    def _resident_layers(self) -> Terms:
        """Of the streamed kinds, the layers that stay on the accelerator; not all of them."""
        nbytes = self.layout.layered_bytes(self.job) / self._unit_b
        if not nbytes:
            return {}
        self.resident = self.program.column("resident")
        given = self._fixed.resident
        most = 1 - 1 / self.job.layers if given is None else given
        terms = {self.resident: 1.0, self.inverse: -nbytes * most}
        low = -float("inf") if given is None else 0.0
        self.program.row("resident layers", terms, low=low, high=0.0)
        return {self.resident: 1.0}

    def _on_nodes(self, name: str) -> list[int]:
        """A column a node; of equals the first ones are taken."""
        banned = self._banned.get(name, frozenset())
        return [
            self.program.column(
                name, high=0.0 if at in banned else float("inf"), cost=_FIRST_PREFERRED * (at + 1)
            )
            for at in range(len(self.hardware.nodes))
        ]

    def _row(self, name: str, terms: Terms, *, equal: float) -> None:
        self.program.row(name, terms, low=equal, high=equal)

    def _timed(self, name: str, terms: Mapping[int, float], *, least: float = 0.0) -> None:
        """``terms + least <= 0``; byte columns are given in seconds a byte, times as they are."""
        loads = (self.load, self.prefill_load)
        times = (self.prefill, self.token, *loads, self.attention, self.products)
        scale = self._unit_b / self._unit_s
        row = {
            at: value
            if at in times
            else value * (scale if at != self.inverse else 1 / self._unit_s)
            for at, value in terms.items()
        }
        self.program.row(name, row, high=-least / self._unit_s)

    def _rooms(self) -> None:
        hardware, held = self.hardware, list(self.on.values())
        if not hardware.has_gpu:  # the first node falls short of working memory: the next has it
            work = self._on_nodes("workspace")
            nbytes = self.job.work_bytes(self.layout.rows)
            self._row("all workspace", dict.fromkeys(work, 1.0), equal=nbytes / self._unit_b)
            held.append(work)
        for at, node in enumerate(hardware.nodes):
            terms: Terms = {columns[at]: 1.0 for columns in held}
            room = node.usable_bytes - (self.copied if at in hardware.copy_nodes else 0)
            terms[self.inverse] = -room / self._unit_b
            self.program.row(f"room of {node.name}", terms, high=0.0)
        if hardware.has_gpu:
            self._room_of_gpu()

    def _room_of_gpu(self) -> None:
        """While layers compute the rows of a batch, and while the head has those of all."""
        job, layout, rows = self.job, self.layout, self.layout.rows
        room = self.hardware.gpu_usable_bytes - layout.gpu_bytes(job)
        terms: Terms = {at: 1.0 for at in (self.resident, self.kv_there) if at is not None}
        kv = self.kv_bytes if layout.kv == "gpu" else 0.0
        held = layout.held_bytes(job, rows) + kv
        self.program.row(
            "room of gpu",
            {**terms, self.inverse: -room / self._unit_b},
            high=-held / self._unit_b,
        )
        self.program.row(
            "room of logits",
            {**terms, self.inverse: -(room + job.work_bytes(rows)) / self._unit_b},
            high=-(job.logits_bytes(rows) + kv) / self._unit_b,
        )

    def _decode(self) -> None:
        job, hardware, layout, engine = self.job, self.hardware, self.layout, self.job.engine
        self._loads(self.load, 1)
        self._timed("in turn", {self.load: 1.0, self.token: -1.0})
        mean = job.mean_kv_tokens * job.kv_bytes_per_token
        rows, kv = layout.rows, self.on.get(KV, [])
        share = mean / job.kv_sequence_bytes
        for costs in self._read_costs(engine.attention_share) if kv else ():
            terms = {kv[at]: share * cost for at, cost in costs.items()}
            self._timed("attention memory", {self.attention: -1.0, **terms})
        if kv:
            flops = 4 * rows * job.mean_kv_tokens * job.query_width * job.layers
            least = flops / (hardware.cores * engine.attention_flops_per_core)
            terms = dict.fromkeys(kv, least / self.kv_bytes)
            self._timed("attention arithmetic", {self.attention: -1.0, **terms})
        self._products()
        work = self._gpu_work() + decode_rows_seconds(job, hardware, rows)
        terms = {self.attention: 1.0, self.products: 1.0, self.token: -1.0}
        terms[self.inverse] = between_products_seconds(job, hardware)
        if layout.kv == "gpu":
            work += rows * mean / hardware.gpu.memory_bytes_per_s
        elif self.kv_there is not None:
            work += joined_calls_seconds(job)
            terms[self.kv_there] = gpu_part_seconds(job, hardware, rows) / self.kv_bytes
        if self.state_bytes:
            work += states_calls_seconds(job)
            self._timed("hidden stores", {self.token: -1.0, **self._hidden_stores(1)})
        self._timed("work", terms, least=work)
        self._shared(share)

    def _loads(self, time: int, tokens: int) -> None:
        """Streamed weights, and hidden states, in a pass of so many tokens of every sequence."""
        hardware, part = self.hardware, self._state_share(self.copied_states.bytes_in(tokens))
        parts = {STREAMED: 1.0, STATES: part}
        moved = [(column, n) for name, n in parts.items() for column in self.on.get(name, [])]
        self._timed("link", {time: -1.0, **{c: n / hardware.link_bytes_per_s for c, n in moved}})
        for at, node in enumerate(hardware.nodes):
            rate = node.copy_bytes_per_s
            terms = {self.on[name][at]: n / rate for name, n in parts.items() if name in self.on}
            if terms:
                self._timed("copies", {time: -1.0, **terms})

    def _hidden_stores(self, tokens: int) -> Terms:
        """Hidden states that come back in such a pass."""
        part = self._state_share(self.copied_states.bytes_out(tokens))
        costs = zip(self.on[STATES], store_costs(self.hardware), strict=True)
        return {column: part * cost for column, cost in costs}

    def _state_share(self, nbytes: float) -> float:
        """Bytes that are moved over those that lie in the tier."""
        return nbytes / self.state_bytes if self.state_bytes else 0.0

    def _gpu_work(self) -> float:
        layout, job = self.layout, self.job
        params = sum(job.kinds[kind].met for kind in layout.multiplied)
        nbytes = float(layout.bytes_of(job, layout.on_cpu))
        return decode_gpu_seconds(
            job,
            self.hardware,
            layout.rows,
            params_cpu=params,
            cpu_bytes=nbytes,
            unread=layout.unread_bytes(job, self.rows),
        )

    def _products(self) -> None:
        """What CPUs multiply, read once for every batch; in the one batch of a CPU, once.

        Experts that nobody asks for are not read. Of copies each socket reads its own.
        """
        on_cpu = self.on.get(ON_CPU, [])
        job, layout, hardware, engine = self.job, self.layout, self.hardware, self.job.engine
        if not layout.multiplied:
            return
        flops = 2 * layout.rows * sum(job.kinds[kind].met for kind in layout.multiplied)
        arithmetic = flops / (hardware.cores * engine.products_flops_per_core)
        passes, reached = self.passes, engine.products_share
        share = layout.cpu_read_share(job, self.rows)
        if passes is None:
            rates = [reached * node.read_bytes_per_s / share for node in hardware.nodes]
            least = arithmetic + layout.bytes_of(job, layout.on_cpu) / sum(rates)
            self._timed("products", {self.products: -1.0}, least=least)
            return
        beside: Terms = {self.products: -1.0}
        if self.copied:
            beside[self.inverse] = self.copied / hardware.near_bytes_per_s / reached
        for costs in self._read_costs(reached) if on_cpu else ({},):
            terms = {on_cpu[at]: passes * share * cost for at, cost in costs.items()}
            self._timed("products", {**beside, **terms}, least=arithmetic)

    def _read_costs(self, reached: float) -> list[Terms]:
        """Seconds of a byte on nodes and links, by node's place; each is a row.

        ``reached`` is the share of the rates that CPUs reach.
        """
        hardware = self.hardware
        nodes = [{at: 1 / (reached * rate)} for at, rate in enumerate(hardware.even_rates)]
        links = [{at: cost / reached for at, cost in link.items()} for link in hardware.link_costs]
        return nodes + links

    @property
    def rows(self) -> int:
        """Of one batch; the fewest there can be where their number is not fixed yet."""
        return self.layout.rows if self.hardware.has_gpu else self._batches[0]

    @property
    def passes(self) -> int | None:
        """How often a block reads what CPUs multiply; None: not fixed yet."""
        if not self.hardware.has_gpu:
            return 1
        fewest, most = self._batches
        return fewest if fewest == most else None

    def _shared(self, share: float) -> None:
        """No node gives more than its rate to copies, attention and products together."""
        for at, node in enumerate(self.hardware.nodes):
            rate = max(node.read_bytes_per_s, node.copy_bytes_per_s)
            terms: Terms = {self.token: -1.0}
            products = (self.passes or 0.0) * self.layout.cpu_read_share(self.job, self.rows)
            times = {STREAMED: 1.0, KV: share, ON_CPU: products, STATES: self._both_ways(1)}
            terms |= {self.on[name][at]: n / rate for name, n in times.items() if name in self.on}
            self._timed(f"memory of {node.name}", terms)

    def _both_ways(self, tokens: int) -> float:
        """Hidden states that come and go in a pass, over those that lie in the tier."""
        states = self.copied_states
        return self._state_share(states.bytes_in(tokens) + states.bytes_out(tokens))

    def _prefill(self) -> None:
        job, hardware, layout, engine = self.job, self.hardware, self.layout, self.job.engine
        rows = layout.rows
        if not hardware.has_gpu:
            least, reached = prefill_cpu_seconds(job, hardware, rows), engine.products_share
            once = prefill_between_seconds(job, hardware)
            if self.copied:
                once += self.copied / first_copy_rate(hardware) / reached
            on_cpu = self.on.get(ON_CPU, [])
            for costs in self._read_costs(reached) if on_cpu else ({},):
                terms = {on_cpu[at]: cost for at, cost in costs.items()}
                beside = {self.prefill: -1.0, self.inverse: once}
                self._timed("prefill", {**beside, **terms}, least=least)
        else:
            self._prefill_link()
            least = prefill_flops(job, rows) / hardware.gpu.products_flops_per_s
            self._timed("prefill GPU work", {self.prefill: -1.0}, least=least)
            once = job.weight_bytes / hardware.gpu.memory_bytes_per_s
            self._timed("prefill weights", {self.prefill: -1.0, self.inverse: once})
        stored = kv_store_costs(engine, hardware)
        share = job.prompt * job.kv_bytes_per_token / job.kv_sequence_bytes
        stores = {c: share * cost for c, cost in zip(self.on.get(KV, []), stored, strict=False)}
        if self.state_bytes:
            stores |= self._hidden_stores(job.prompt)
        self._timed("prefill KV stores", {self.prefill: -1.0, **stores})

    def _prefill_link(self) -> None:
        """The link, and where hidden states cross it the memory that all copies want."""
        job = self.job
        if self.state_bytes:
            self._loads(self.prefill_load, job.prompt)
        self._timed("prefill link", {self.prefill_load: 1.0, self.prefill: -1.0})
        if not self.state_bytes:
            return
        stored = job.prompt * job.kv_bytes_per_token / job.kv_sequence_bytes
        times = {STREAMED: 1.0, KV: stored, STATES: self._both_ways(job.prompt)}
        for at, node in enumerate(self.hardware.nodes):
            rate = max(node.read_bytes_per_s, node.copy_bytes_per_s)
            terms = {self.on[name][at]: n / rate for name, n in times.items() if name in self.on}
            self._timed(f"prefill memory of {node.name}", {self.prefill: -1.0, **terms})

    def solve(self) -> Shares | None:
        """The fastest shares; None where nothing fits."""
        found = self.program.solve()
        if found is None:
            return None
        values = found.values
        shares = {}
        for name, columns in self.on.items():
            parts = [max(0.0, float(values[column])) for column in columns]
            total = sum(parts)
            if total:
                shares[name] = tuple(part / total for part in parts)
        steps = self.job.generated - 1
        seconds = float(values[self.prefill] + steps * values[self.token]) * self._unit_s
        inverse, resident, kv_gpu = float(values[self.inverse]), 0.0, 0.0
        if self.resident is not None:
            layered = self.layout.layered_bytes(self.job) / self._unit_b
            resident = max(0.0, float(values[self.resident]) / (layered * inverse))
        if self.layout.kv == "gpu":
            kv_gpu = 1.0
        elif self.kv_there is not None:
            there = float(values[self.kv_there]) * self._unit_b / self.kv_bytes
            kv_gpu = min(max(there, _KV_BOTH[0]), _KV_BOTH[1])
        return Shares(shares, resident, kv_gpu, 1 / inverse, seconds)


def gpu_part_seconds(job: DecoderJob, hardware: Hardware, rows: int) -> float:
    """A decode step of so many rows if the GPU attends to all of a cache that it shares."""
    tokens = rows * job.mean_kv_tokens
    nbytes = tokens * job.kv_bytes_per_token + joined_bytes(job, tokens)
    return nbytes / hardware.gpu.memory_bytes_per_s
