"""Plans of inference with transformers: batch, and a policy for every kind of tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cxl_offload.errors import ConfigError
from cxl_offload.plan.asked_tiers import refuse_drive
from cxl_offload.plan.decoding.block import Block
from cxl_offload.plan.decoding.engine import TRANSFORMERS
from cxl_offload.plan.decoding.executor import DecodingExecutor, DecodingRequest
from cxl_offload.plan.equations.row_states import STATES
from cxl_offload.plan.executor import Candidate, KindBytes, OwnFields
from cxl_offload.plan.hardware import GPU, NVME, Hardware
from cxl_offload.plan.known_errors import UNKNOWN_ERROR
from cxl_offload.plan.kv_types import KV_TYPES, kv_type_remedy
from cxl_offload.plan.pipeline import make_plan
from cxl_offload.plan.plan_file import OWN_FILE, Batch, Plan
from cxl_offload.plan.socket_rates import sockets_with_cores
from cxl_offload.plan.transformers.homes import (
    block_of,
    copies_policy,
    gpu_bytes,
    gpu_kv_bytes,
    largest_tensor,
    policy_of,
    resident_bytes,
)
from cxl_offload.plan.transformers.job import HEAD, DecoderJob, decoder_job
from cxl_offload.plan.transformers.layout import BATCHES, COPIED, COPIED_ROWS
from cxl_offload.plan.transformers.notes import about_kv_type, about_sockets, about_states
from cxl_offload.plan.transformers.on_gpu import shared_policy
from cxl_offload.plan.transformers.search import ANYTHING, BestHomes, Wish, search
from cxl_offload.plan.transformers.shares import KV
from cxl_offload.units import format_bytes

_HOMES = {
    "gpu": "on the GPU",
    "both": "on the GPU in part",
    "host": "on the host",
    "streamed": "streamed to the GPU",
}

ACCELERATOR = "cuda"
"""What generate calls the GPU of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersRequest(DecodingRequest):
    """What is to be planned for transformers.

    Attributes
    ----------
    batches
        Rows of an accelerator batch to try.
    kv_dtypes
        What keys and values may be kept as on the host beside what they are computed in, of
        :data:`~cxl_offload.plan.kv_types.KV_TYPES`. All lose precision, so none is
        taken that is not named.
    sockets
        Most sockets whose cores compute: the initiator's and the nearest others.
    """

    batches: Sequence[int] = BATCHES
    kv_dtypes: Sequence[str] = ()
    sockets: int = 1

    def __post_init__(self) -> None:
        super(TransformersRequest, self).__post_init__()
        for name in self.kv_dtypes:
            if name not in KV_TYPES:
                raise ConfigError(f"kv dtype {name!r}: {kv_type_remedy(name)}")


def plan_transformers(request: TransformersRequest) -> Plan:
    """The plan for transformers with the most tokens a second.

    Raises
    ------
    ConfigError
        The machine lacks what the equations need, or a limit is impossible.
    MemoryError
        Not one sequence fits; says what is needed and what there is.
    ValueError
        Lengths the model cannot have, or a model that the integration does not place.
    """
    kept_as = (None, *dict.fromkeys(request.kv_dtypes))
    numbers = dict.fromkeys((request.sockets, 1))
    executors = [
        Transformers(request, kept, sockets)
        for sockets, kept in itertools.product(numbers, kept_as)
    ]
    if len(executors) == 1:
        return make_plan(executors[0])
    found = [executor.search(executor.hardware()) for executor in executors]
    rates = [0.0 if best is None else best.tokens_per_s for best in found]
    at = rates.index(max(rates))
    best, margin = found[at], request.cxl_margin
    if best is not None and executors[at].copied_bytes(best):
        one = rates[-len(kept_as) :]  # room for copies is worth the same margin there
        if max(rates) < max(one) * (1 + margin):
            at = len(rates) - len(kept_as) + one.index(max(one))
    return make_plan(executors[at])


class Transformers(DecodingExecutor[BestHomes]):
    """The search and homes of transformers with this package's integration.

    Parameters
    ----------
    kv_dtype
        What keys and values are kept as on the host; None: what they are computed in.
    sockets
        Whose cores compute; None: as many as the request allows.
    """

    name = "transformers"

    def __init__(
        self,
        request: TransformersRequest,
        kv_dtype: str | None = None,
        sockets: int | None = None,
    ) -> None:
        self._request = request
        self._sockets = request.sockets if sockets is None else sockets
        self._job = decoder_job(
            request.model,
            prompt=request.prompt,
            generated=request.generated,
            engine=request.with_measured(TRANSFORMERS, sockets=self._sockets),
            kv_dtype=kv_dtype,
        )
        refuse_drive(request.tiers, request.limits, "transformers keeps nothing on a drive")

    @property
    def request(self) -> TransformersRequest:
        """What is asked for."""
        return self._request

    @property
    def job(self) -> DecoderJob:
        """What is generated."""
        return self._job

    def refusal(self) -> str | None:
        """None: ``cxl-offload generate`` runs every plan that is made."""
        return None

    def hardware(self) -> Hardware:
        """The hardware without the drive."""
        return self._request.hardware(needs_gpu=False, sockets=self._sockets).without(NVME)

    def search(
        self, hardware: Hardware, *, like: Candidate[BestHomes] | None = None
    ) -> Candidate[BestHomes] | None:
        """The best batch, layout and shares."""
        return self._best(hardware, like=None if like is None else like.choice)

    def _best(
        self, hardware: Hardware, *, like: BestHomes | None = None, wish: Wish = ANYTHING
    ) -> Candidate[BestHomes] | None:
        request = self._request
        found = search(
            self._job,
            hardware,
            batches=request.batches,
            most=request.most_batches,
            like=like,
            wish=wish,
        )
        if found is None:
            return None
        return Candidate(
            hardware=hardware,
            choice=found,
            tokens_per_s=found.tokens_per_s,
            sequences=found.homes.rows * found.homes.batches,
            host=found.homes.host,
            gpu_bytes=gpu_bytes(self._job, found.homes) if hardware.has_gpu else 0,
        )

    def batch(self, found: Candidate[BestHomes]) -> Batch:
        """Rows of an accelerator batch, and number of them."""
        homes, job = found.choice.homes, self._job
        return Batch(size=homes.rows, count=homes.batches, prompt=job.prompt, tokens=job.generated)

    def kinds(self, found: Candidate[BestHomes]) -> Iterable[KindBytes]:
        """Weights by kind, KV, hidden states of a block, and what CPUs work in."""
        homes, job, none = found.choice.homes, self._job, (0,) * len(found.hardware.nodes)
        rows = homes.rows * homes.batches
        policies = self._host_policies(found)

        def made(kind: str, gpu: int) -> KindBytes:
            policy = policies.get(kind, "")
            return KindBytes(kind, gpu, homes.kinds.get(kind, none), 0, (policy,) * len(none))

        layout = homes.layout
        for kind, size in job.kinds.items():
            if kind in layout.streamed:
                yield made(kind, resident_bytes(job, homes, kind))
            else:
                yield made(kind, 0 if kind in homes.kinds else size.bytes)
        yield made(KV, gpu_kv_bytes(job, homes))
        if found.hardware.has_gpu:
            on_gpu = layout.states == "gpu"
            yield made(STATES, job.between_bytes(rows) if on_gpu else layout.buffer_bytes(job))
        else:
            yield KindBytes("workspace", 0, homes.work, 0, ("",) * len(none))

    def _host_policies(self, found: Candidate[BestHomes]) -> dict[str, str]:
        """Policies of the kinds that have bytes on the host."""
        homes, job = found.choice.homes, self._job
        return {
            kind: copies_policy(found.hardware)
            if kind in homes.layout.copied
            else policy_of(
                found.hardware,
                homes.parts[homes.class_of(kind)],
                largest_tensor(job, homes, kind),
            )
            for kind, placed in homes.kinds.items()
            if sum(placed)
        }

    def copied_bytes(self, found: Candidate[BestHomes]) -> int:
        """What all copies of weights but the first take."""
        copied = found.choice.homes.layout.copied
        more = max(0, len(found.hardware.copy_nodes) - 1)
        return more * sum(self._job.kinds[kind].bytes for kind in copied)

    def rate_with_one_socket(self) -> float:
        """Tokens/s of the best plan for the cores of one socket."""
        alone = Transformers(self._request, self._job.kv_dtype, 1)
        found = alone.search(alone.hardware())
        return 0.0 if found is None else found.tokens_per_s

    def why_no_copies(self, found: Candidate[BestHomes]) -> str:
        """What is lost by copies of weights, and by what; or that there is no room."""
        hardware, kinds = found.hardware, COPIED & self._job.kinds.keys()
        other = self._best(hardware, wish=self._with_copies())
        if other is None:
            each = format_bytes(sum(self._job.kinds[kind].bytes for kind in kinds))
            where = " and ".join(hardware.nodes[at].where for at in hardware.copy_nodes)
            return f"there is no room for {each} on {where} each"
        slower = 1 - other.tokens_per_s / found.tokens_per_s
        if found.sequences > COPIED_ROWS:
            why = f"layers of more than {COPIED_ROWS} rows are torch's, which reads one copy"
        else:
            why = "prompts are torch's, which reads one copy"
        return f"{slower:.1%} slower with them, for {why}"

    def _with_copies(self) -> Wish:
        return Wish(homes=dict.fromkeys(COPIED & self._job.kinds.keys(), "copies"))

    def own_fields(self, found: Candidate[BestHomes]) -> OwnFields:
        """What ``cxl-offload generate --plan`` takes from the plan."""
        return OwnFields(
            threads=self.threads(found),
            policies=self._policies(found),
            on_cpu=tuple(sorted(found.choice.homes.layout.on_cpu)),
            kv_dtype=self._job.kv_dtype or "",
        )

    def _policies(self, found: Candidate[BestHomes]) -> dict[str, str]:
        """Policies of every kind that has one."""
        homes, on_host = found.choice.homes, self._host_policies(found)
        made = {kind: on_host.get(kind, GPU) for kind in (*self._job.kinds, KV)}
        for kind in homes.layout.streamed - {HEAD} if homes.resident else ():
            made[kind] = shared_policy(homes.resident / self._job.layers, made[kind])
        if homes.layout.kv == "both":
            made[KV] = shared_policy(homes.kv_gpu, made[KV])
        elif made[KV] == GPU and homes.batches > 1:  # a cache that layers compute parts of
            made[KV] = shared_policy(1.0, f"bind:{found.hardware.names[0]}")
        if STATES in on_host:
            made[STATES] = on_host[STATES]
        return made

    def command(self, found: Candidate[BestHomes]) -> tuple[str, ...]:
        """The command of this package that runs the plan."""
        request = self._request
        made = ["cxl-offload", "generate", "--plan", OWN_FILE, "--model", request.model_name]
        made += ["--prompts", "prompts.txt"]
        if found.hardware.has_gpu:
            made += ["--accelerator", ACCELERATOR]
        else:  # what is planned; CPUs are several times slower in others
            made += ["--dtype", "bfloat16"]
        if request.machine_name is not None:
            made += ["--machine", request.machine_name]
        return tuple(made)

    def block(self, found: Candidate[BestHomes]) -> Block:
        """Bytes of the homes."""
        return block_of(self._job, found.hardware, found.choice.homes)

    def other_homes(
        self, found: Candidate[BestHomes]
    ) -> Iterable[tuple[str, Candidate[BestHomes] | None]]:
        """Every large kind with who else could compute with it, and off every node it is on."""
        hardware, homes = found.hardware, found.choice.homes
        places = {KV: ("gpu", "both", "host"), STATES: ("gpu", "host")}
        for kind in (*sorted(homes.layout.large(self._job)), KV, STATES):
            now = homes.layout.home_of(kind)
            for other in places.get(kind, ("gpu", "streamed")) if hardware.has_gpu else ():
                if other != now:
                    wish = Wish(homes={kind: other})
                    yield f"{kind} {_HOMES[other]} instead", self._best(hardware, wish=wish)
        for name, parts in homes.parts.items():
            kinds = sorted(kind for kind in homes.kinds if homes.class_of(kind) == name)
            for at, part in enumerate(parts):
                if part and kinds:
                    wish = Wish(banned={name: frozenset({at})})
                    where = hardware.nodes[at].where
                    yield f"{' and '.join(kinds)} kept off {where}", self._best(hardware, wish=wish)
        yield from self._other_copies(found)
        yield from self._other_sockets(found)

    def _other_copies(
        self, found: Candidate[BestHomes]
    ) -> Iterable[tuple[str, Candidate[BestHomes] | None]]:
        """Weights in one copy where each socket has one, and the other way round."""
        with_copies = replace(found.hardware, copies=True)
        if not with_copies.copy_nodes:
            return
        kinds = sorted(COPIED & self._job.kinds.keys())
        if found.choice.homes.layout.copied:
            more = format_bytes(self.copied_bytes(found))
            what = f"{' and '.join(kinds)} in one copy, which takes {more} less"
            yield what, self._best(replace(found.hardware, copies=False))
        else:
            what = f"{' and '.join(kinds)} with a copy near each socket"
            yield what, self._best(with_copies, wish=self._with_copies())

    def _other_sockets(
        self, found: Candidate[BestHomes]
    ) -> Iterable[tuple[str, Candidate[BestHomes] | None]]:
        """With the cores of one socket, or of one more than there are."""
        have, request = max(1, len(found.hardware.sockets)), self._request
        if have > 1:
            one = Transformers(request, self._job.kv_dtype, 1)
            yield "with the cores of one socket", one.search(one.hardware())
        if have < sockets_with_cores(request.machine):
            more = Transformers(request, self._job.kv_dtype, have + 1)
            what = f"with the cores of {have + 1} sockets (--sockets {have + 1})"
            yield what, more.search(more.hardware())

    def notes(self, found: Candidate[BestHomes]) -> list[str]:
        """Usable shares, what CPUs do, and where rates are from."""
        request, layout = self._request, found.choice.homes.layout
        unknown = UNKNOWN_ERROR
        if found.hardware.has_gpu:
            unknown += "; no GPU has run a plan of it yet"
        notes = [self.memory_shares(found.hardware), unknown]
        if request.operators is not None:
            notes.append(
                f"work of the CPUs at rates measured with {request.operators.threads} threads"
            )
        notes += about_kv_type(self._job)
        if resident := found.choice.homes.resident:
            kinds = " and ".join(sorted(layout.streamed - {HEAD}))
            notes.append(f"{resident} of {self._job.layers} layers of {kinds} stay on the GPU")
        if layout.states == "host":
            notes.append(about_states(self._job, found.choice.homes))
        notes += about_sockets(found.hardware, layout, (self._sockets, request.sockets))
        return notes + self.about_threads(found) + self.source_of_rates(found.hardware)
