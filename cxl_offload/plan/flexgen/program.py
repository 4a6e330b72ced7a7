"""FlexGen's placement for one batch as a (mixed-integer) linear program.

Columns: ``n`` (GPU batches) and ``one``, both fixed; bytes of weights in every home; sequences of a
whole block in every home of KV; seconds. Whole columns choose cuts of weights and sequences.

Seconds are those of ``flexgen.phases``; a test holds the two together. Columns hold bytes and
seconds in units of their size.
"""

from __future__ import annotations

from functools import cached_property

from cxl_offload.plan.decoding.engine import kv_store_costs
from cxl_offload.plan.decoding.phases import decode_gpu_seconds, prefill_flops
from cxl_offload.plan.flexgen.choice import Choice, Stripe, page_slack
from cxl_offload.plan.flexgen.job import FlexGenJob
from cxl_offload.plan.flexgen.layout import WeightCut
from cxl_offload.plan.flexgen.mode import Mode, Ratios
from cxl_offload.plan.flexgen.stripes import (
    on_nodes,
    segments_of,
    sixteenths,
    slowest,
    stripes_slack,
    times,
)
from cxl_offload.plan.hardware import Hardware
from cxl_offload.plan.solve import TOLERANCE, Program, Solution, Terms
from cxl_offload.renamed import old_names

ROOM_TOLERANCE = 4 * TOLERANCE
"""Rooms are narrowed by more than the solver may exceed a row by, as a share of all weights."""

_PRESOLVED_LEVELS = 8
"""Levels of weights up to which presolve takes less time than it saves, of 3 to 13 nodes: a third
of the time of all programs for OPT-175B (8 levels), but 5 times that for Mixtral 8x7B (28)."""


class PlacementProgram:
    """One mode as a program.

    Parameters
    ----------
    batches
        Number of GPU batches.
    most_seconds
        Refuse anything slower than so many seconds a block.
    on_fastest_homes
        Of what keeps ``most_seconds``, the choice with least on slow homes: GPU, then the nodes in
        their order, then the drive.
    unit_s
        Seconds of the program's unit of time, near the answer: the solver's tolerances are
        absolute. The unit of bytes is all weights.
    """

    def __init__(
        self,
        job: FlexGenJob,
        hardware: Hardware,
        mode: Mode,
        *,
        batches: int,
        levels: tuple[WeightCut, ...],
        most_seconds: float | None = None,
        unit_s: float = 1.0,
        on_fastest_homes: bool = False,
    ) -> None:
        self.unit_bytes, self.unit_s = float(job.weight_bytes), unit_s
        self.job, self.hardware, self.mode, self.levels = job, hardware, mode, levels
        self.batches = batches
        self.program = Program()
        self._by_rank = on_fastest_homes
        self._drive = hardware.drive_usable_bytes > 0
        self._columns()
        self._shares()
        self._capacities()
        self._decode()
        self._prefill()
        steps = float(job.generated - 1)
        add = self.program
        terms = {self.total: 1.0, self.pre: -1.0, self.slowest: -steps}
        if job.engine.overlaps:
            add.row("load beside", {self.load: 1.0, self.slowest: -1.0}, high=0.0)
        else:
            terms[self.load] = -steps
        add.row("total", terms, low=0.0, high=0.0)
        if most_seconds is not None:
            add.row("at most", {self.total: 1.0}, high=most_seconds / unit_s)

    def _timed(self, name: str, terms: Terms) -> None:
        """``terms <= 0``, those of other columns than times given in seconds."""
        times = (
            *(self.total, self.pre, self.load, self.slowest, self.read),
            *(self.striped_load, self.striped_read),
        )
        scaled = {at: value if at in times else value / self.unit_s for at, value in terms.items()}
        self.program.row(name, scaled, high=0.0)

    def _columns(self) -> None:
        column, tiers = self.program.column, self.hardware.nodes
        fixed = float(self.batches)
        self.n = column("n", low=fixed, high=fixed)
        self.one = column("one", low=1.0, high=1.0)
        parts = [segments_of(self.hardware, stripe) for stripe in self._stripes]
        most = None if self._drive else 0.0
        high = float("inf") if most is None else most
        each = self.job.kv_sequence_bytes / self.unit_bytes
        last = 2.0 * (len(tiers) + 1) * self._by_rank
        self.weights = [column("weights drive", high=high, cost=last)]
        for at, stripe in enumerate(parts[0]):
            self.weights.append(column(f"weights segment {at}", cost=self._rank(stripe)))
        self.weights.append(column("weights gpu"))
        kv_high = high if self.job.engine.kv_drive_store_bytes_per_s else 0.0
        self.kv = [column("kv drive", high=kv_high, cost=last * each)]
        for at, stripe in enumerate(parts[1]):
            self.kv.append(column(f"kv segment {at}", cost=self._rank(stripe) * each))
        self.kv.append(column("kv gpu"))
        self.act = column("activations gpu", high=1.0, whole=True)
        self.act_n = column("n * activations gpu")
        self.scratch = [
            column(f"scratch {tier.name}", high=1.0, whole=True, cost=1e-3 * at * self._by_rank)
            for at, tier in enumerate(tiers)
        ]
        self.act_scratch = [column(f"activations {tier.name}") for tier in tiers]
        self.some_off_gpu = column("weights off gpu", high=1.0)
        self.total = column("total", cost=0.0 if self._by_rank else 1.0)
        self.pre, self.load = column("prefill"), column("load")
        self.slowest, self.read = column("slowest"), column("attention memory")
        self.striped_load, self.striped_read = column("striped load"), column("striped read")
        whole = (self.weights[1:-1], self.kv[1:-1])
        self.weights_on, self.kv_on = (
            on_nodes(self.program, self.hardware, columns, stripe)
            for columns, stripe in zip(whole, self._stripes, strict=True)
        )

    @property
    def _stripes(self) -> tuple[Stripe | Ratios | None, Stripe | Ratios | None]:
        return self.mode.weight_stripe, self.mode.kv_stripe

    def _rank(self, stripe: Stripe) -> float:
        """How late in the order of homes a segment is; 0 unless the fastest homes are wanted."""
        return self._by_rank * sum((at + 1) * w for at, w in enumerate(stripe)) / sum(stripe)

    def _shares(self) -> None:
        """Weights by realisable cuts, KV by whole sequences, one scratch tier."""
        add, job, size = self.program, self.job, self.mode.gpu_batch
        total = job.weight_bytes / self.unit_bytes
        add.row(
            "all weights", {**dict.fromkeys(self.weights, 1.0), self.one: -total}, low=0, high=0
        )
        add.row("all kv", {**dict.fromkeys(self.kv, 1.0), self.n: -float(size)}, low=0, high=0)
        add.row("one scratch", {**dict.fromkeys(self.scratch, 1.0), self.one: -1.0}, low=0, high=0)
        off = {self.weights[-1]: 1.0 / total, self.one: -1.0, self.some_off_gpu: 1.0}
        add.row("some off gpu", off, low=0)
        on_gpu = float(size) if self.mode.kv_on_gpu else size - 1.0
        low = 0.0 if self.mode.kv_on_gpu else -float("inf")
        add.row("kv on gpu", {self.kv[-1]: 1.0, self.n: -on_gpu}, low=low, high=0.0)
        # act_n = n * act, exact at both ends
        most = {self.act_n: 1.0, self.n: -1.0}
        add.row("act_n <= n", most, high=0.0)
        link = {self.act_n: 1.0, self.act: -float(self.batches)}
        add.row("act_n = n act", link, low=0.0, high=0.0)
        self._whole()
        add.row("act <= act_n", {self.act: 1.0, self.act_n: -1.0}, high=0.0)
        add.row("act <= one", {self.act: 1.0, self.one: -1.0}, high=0.0)

    def _whole(self) -> None:
        add, top = self.program, len(self.levels) - 1
        below = [level.bytes_below / self.unit_bytes for level in self.levels]
        self.cuts: list[list[int]] = []
        for at in range(len(self.weights) - 1):
            names = [f"cut {at} at {level}" for level in range(top + 1)]
            self.cuts.append([add.column(name, high=1.0, whole=True) for name in names])
        for at, cut in enumerate(self.cuts):
            add.row(f"cut {at}", dict.fromkeys(cut, 1.0), low=1.0, high=1.0)
            value: Terms = {self.weights[at]: -1.0}
            value |= dict(zip(cut, below, strict=True))
            if at:
                before = self.cuts[at - 1]
                value |= {column: -nbytes for column, nbytes in zip(before, below, strict=True)}
                for level in range(top):  # a later cut is not below an earlier one
                    terms = dict.fromkeys(cut[: level + 1], 1.0)
                    terms |= dict.fromkeys(before[: level + 1], -1.0)
                    add.row(f"cut {at} after {at - 1}", terms, high=0.0)
            add.row(f"weights of cut {at}", value, low=0.0, high=0.0)
        # some_off_gpu is 1 unless the last cut is at 0
        add.row("off gpu", {self.some_off_gpu: 1.0, self.cuts[-1][0]: 1.0}, low=1.0)
        self.sequences = [
            add.column(f"sequences {at}", high=float(self.mode.gpu_batch), whole=True)
            for at in range(len(self.kv))
        ]
        for all_of_it, each in zip(self.kv, self.sequences, strict=True):
            terms = {all_of_it: 1.0, each: -float(self.batches)}
            add.row("whole sequences", terms, low=0.0, high=0.0)

    def _capacities(self) -> None:
        job, size, add = self.job, self.mode.gpu_batch, self.program
        sequence = job.kv_sequence_bytes / self.unit_bytes
        hidden = job.hidden_bytes(size) / self.unit_bytes
        pages = float(sum(page_slack(job, self.batches)))
        slack = stripes_slack(job, self.mode, self.batches, len(self.hardware.nodes))
        for at, tier in enumerate(self.hardware.nodes):
            terms: Terms = {**self.weights_on[at]}
            terms |= {column: sequence * share for column, share in self.kv_on[at].items()}
            beside = pages + slack[at]
            self._scratch_need(at, terms, hidden)
            # where that alone is more than there is, nothing is put there, and nothing lost
            room = (tier.usable_bytes - beside) / self.unit_bytes - ROOM_TOLERANCE
            add.row(f"room of {tier.name}", terms, high=max(0.0, room))
        held = {self.weights[-1]: 1.0, self.kv[-1]: sequence, self.act_n: hidden}
        held[self.some_off_gpu] = job.gpu_loaded_bytes / self.unit_bytes
        held[self.act] = -2 * hidden
        room = self.hardware.gpu_usable_bytes - job.gpu_work_bytes(size)
        held[self.one] = 2 * hidden - room / self.unit_bytes + ROOM_TOLERANCE
        add.row("room of gpu", held, high=0.0)
        if self._drive:
            terms = {self.weights[0]: 1.0, self.kv[0]: sequence}
            terms[self.one] = ROOM_TOLERANCE - self.hardware.drive_usable_bytes / self.unit_bytes
            add.row("room of nvme", terms, high=0.0)

    def _scratch_need(self, at: int, terms: Terms, hidden: float) -> None:
        """Hidden states, masks and the workspace, where this tier is the scratch tier.

        Products with the whole ``scratch`` column: exact when it is 0 or 1, below the truth else.
        """
        job, size, add = self.job, self.mode.gpu_batch, self.program
        copies = float(job.copies_on_host(self.batches))
        terms[self.act_scratch[at]] = copies * hidden
        needed = {self.act_scratch[at]: 1.0, self.scratch[at]: -1.0, self.act: 1.0}
        add.row("activations on scratch", needed, low=0.0)
        if self.mode.kv_on_gpu:
            return
        workspace = job.workspace_bytes(self.batches, size)
        terms[self.scratch[at]] = (copies * job.mask_bytes(size) + workspace) / self.unit_bytes

    def _decode(self) -> None:
        job, hardware, size = self.job, self.hardware, self.mode.gpu_batch
        rates = hardware.nodes
        link = hardware.link_bytes_per_s
        self.weights_link = self._link_terms()
        hidden = 2.0 * size * job.layers * job.width
        load: Terms = {self.load: -1.0, **self.weights_link}
        load |= {self.n: hidden / link, self.act_n: -hidden / link}
        self._timed("load", load)
        stores = {self.n: hidden / min(job.engine.hidden_store_bytes_per_s, link)}
        stores |= {self.act_n: -stores[self.n], self.slowest: -1.0}
        self._timed("hidden stores", stores)
        kv = job.mean_kv_tokens * job.kv_bytes_per_token  # bytes of a sequence
        if self._drive:
            read = hardware.drive_read_bytes_per_s
            drive = {
                self.weights[0]: self.unit_bytes / read,
                self.kv[0]: kv / read,
                self.slowest: -1.0,
            }
            self._timed("drive reads", drive)
        work: Terms = {self.slowest: -1.0, self.n: decode_gpu_seconds(job, hardware, size)}
        work[self.kv[-1]] = kv / hardware.gpu.memory_bytes_per_s
        off_gpu = self.kv[:-1]
        flops = 4 * job.mean_kv_tokens * job.width * job.layers
        each = flops / (hardware.cores * job.engine.attention_flops_per_core)
        self._timed("attention arithmetic", {**work, **dict.fromkeys(off_gpu, each)})
        reached = kv / job.engine.attention_share
        memory = {**work, self.read: 1.0, self.kv[0]: reached / rates[0].read_bytes_per_s}
        memory |= self._read_terms(reached, [tier.read_bytes_per_s for tier in rates])
        self._timed("attention memory", memory)
        if job.engine.overlaps:
            self._shared(kv)
        elements = (
            job.mean_kv_tokens * job.kv_elements_per_token * job.engine.workspace_bytes_per_element
        )
        self._workspace(elements)

    def _shared(self, kv: float) -> None:
        """No node gives more than its rate to copies of weights and to attention together."""
        for at, node in enumerate(self.hardware.nodes):
            rate = max(node.read_bytes_per_s, node.copy_bytes_per_s)
            terms: Terms = {self.slowest: -1.0}
            if at == 0:
                terms |= {self.weights[0]: self.unit_bytes / rate, self.kv[0]: kv / rate}
            for column, share in self.weights_on[at].items():
                terms[column] = self.unit_bytes * share / rate
            for column, share in self.kv_on[at].items():
                terms[column] = kv * share / rate
            self._timed(f"memory of {node.name}", terms)

    def _workspace(self, elements: float) -> None:
        """``read >= seconds * sequences off the GPU`` with the rate of the scratch tier."""
        size, off_gpu = self.mode.gpu_batch, self.kv[:-1]
        rates = [tier.read_bytes_per_s for tier in self.hardware.nodes]
        for column, rate in zip(self.scratch, rates, strict=True):
            seconds = elements / rate
            most = seconds * size * self.batches  # takes the row back where it is another tier
            terms = {self.read: -1.0, **dict.fromkeys(off_gpu, seconds)}
            self._timed("workspace", {**terms, self.one: -most, column: most})

    def _link_terms(self) -> Terms:
        hardware, link = self.hardware, self.hardware.link_bytes_per_s
        rates = [tier.copy_bytes_per_s for tier in hardware.nodes]
        terms = {self.weights[0]: self.unit_bytes / min(link, rates[0])}
        stripe, striped = self.mode.weight_stripe, self.striped_load
        if isinstance(stripe, Ratios):
            self._timed("striped link", {self.weights[1]: self.unit_bytes / link, striped: -1.0})
            for on, rate in zip(self.weights_on, rates, strict=True):
                self._timed("striped load", {**times(on, self.unit_bytes / rate), striped: -1.0})
            return {**terms, striped: 1.0}
        for column, part in zip(self.weights[1:-1], segments_of(hardware, stripe), strict=True):
            terms[column] = self.unit_bytes * max(slowest(part, rates), 1 / link)
        return terms

    def _read_terms(self, nbytes: float, rates: list[float]) -> Terms:
        """CPUs read so many bytes of every sequence on the host."""
        stripe, striped = self.mode.kv_stripe, self.striped_read
        if isinstance(stripe, Ratios):
            for on, rate in zip(self.kv_on, rates, strict=True):
                self._timed("striped read", {**times(on, nbytes / rate), striped: -1.0})
            return {striped: 1.0}
        pairs = zip(self.kv[1:-1], segments_of(self.hardware, stripe), strict=True)
        return {column: nbytes * slowest(part, rates) for column, part in pairs}

    def _prefill(self) -> None:
        job, hardware, size = self.job, self.hardware, self.mode.gpu_batch
        load = {**self.weights_link, self.pre: -1.0}
        kv = job.prompt * job.kv_bytes_per_token
        costs = kv_store_costs(job.engine, hardware)
        store: Terms = {self.pre: -1.0}
        for on, cost in zip(self.kv_on, costs, strict=True):
            for column, share in on.items():
                store[column] = store.get(column, 0.0) + kv * cost * share
        if self._drive:
            load[self.weights[0]] += self.unit_bytes / hardware.drive_read_bytes_per_s
            if written := min(
                hardware.drive_write_bytes_per_s, job.engine.kv_drive_store_bytes_per_s
            ):
                store[self.kv[0]] = kv * costs[0] + kv / written
        self._timed("prefill weights", load)
        self._timed("prefill KV stores", store)
        # arithmetic grows with n, reading the weights once does not
        flops = prefill_flops(job, size) / hardware.gpu.products_flops_per_s
        once = job.weight_bytes / hardware.gpu.memory_bytes_per_s
        for column, seconds in ((self.n, flops), (self.one, once)):
            self._timed("prefill GPU work", {column: seconds, self.pre: -1.0})

    def solve(self) -> tuple[Choice, float] | None:
        """The best choice of this batch and its seconds; None where nothing fits."""
        found = self._solved
        return None if found is None else (self._choice(found), found.objective * self.unit_s)

    def solve_ratios(self) -> tuple[float, list[list[float] | None]] | None:
        """Seconds that no stripe of the ratios undercuts; None where nothing fits.

        Beside them the sixteenths of every tier that are so fast: of weights, of KV; None of a kind
        that has no free ratios.
        """
        found = self._solved
        if found is None:
            return None
        on = zip(self._stripes, (self.weights_on, self.kv_on), strict=True)
        return found.objective * self.unit_s, [
            sixteenths(stripe, parts, found.values) if isinstance(stripe, Ratios) else None
            for stripe, parts in on
        ]

    def has_room(self) -> bool:
        """Whether anything fits, in the time that is asked for."""
        return self._solved is not None

    @cached_property
    def _solved(self) -> Solution | None:
        presolve = not self._by_rank and len(self.levels) <= _PRESOLVED_LEVELS
        return self.program.solve(presolve=presolve)

    def _choice(self, found: Solution) -> Choice:
        weights, kv = self._stripes
        assert not isinstance(weights, Ratios)
        assert not isinstance(kv, Ratios)
        values = found.values
        return Choice(
            gpu_batch=self.mode.gpu_batch,
            batches=self.batches,
            cuts=tuple(max(range(len(cut)), key=lambda at: values[cut[at]]) for cut in self.cuts),
            weight_stripe=weights,
            kv=tuple(round(values[column]) for column in self.sequences),
            kv_stripe=kv,
            activations_on_gpu=bool(values[self.act] > 0.5),
            scratch=max(range(len(self.scratch)), key=lambda at: values[self.scratch[at]]),
        )


__getattr__ = old_names(__name__)
