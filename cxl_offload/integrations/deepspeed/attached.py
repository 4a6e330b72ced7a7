"""One engine whose host tensors are kept at their places, from its start to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam

from cxl_offload.integrations.deepspeed import objects
from cxl_offload.integrations.deepspeed.accelerator import Capture
from cxl_offload.integrations.deepspeed.early_steps import EarlySteps, follow_gradients
from cxl_offload.integrations.deepspeed.kinds import KINDS, cxl_note
from cxl_offload.integrations.deepspeed.objects import HostObject
from cxl_offload.integrations.deepspeed.phases import PhasedEngine
from cxl_offload.integrations.deepspeed.report import KindRow, table
from cxl_offload.integrations.deepspeed.states import keep_states_as
from cxl_offload.integrations.deepspeed.store import Store
from cxl_offload.integrations.deepspeed.tuning import TunedEngine
from cxl_offload.ops.optimizer import OnePassOptimizer
from cxl_offload.ops.shared_cpus import share_cpus
from cxl_offload.ops.state_codes import CODES, SCALES
from cxl_offload.tensor import copy_whole
from cxl_offload.units import format_bytes

_MOMENTS = ("exp_avg", "exp_avg_sq")
_NOT_ASKED = (
    "DeepSpeed allocated it without asking (pin_memory is false, or the engine was there before), "
    "and other tensors are views of it"
)


class AttachedEngine:
    """Keeps the host tensors of one engine at their places; made by ``placing`` and ``attach``.

    Holds no reference to the engine, so that dropping the engine returns its memory.

    Attributes
    ----------
    store
        What allocates, by kind.
    tuned
        What tunes its placement; None without ``tune``.
    """

    def __init__(self, engine: Any, store: Store, capture: Capture) -> None:
        zero = engine.optimizer
        self.store = store
        self._capture = capture
        self._passed = capture.passed_bytes
        self._passed_before = Counter(capture.passed_bytes)
        self._zero: Callable[[], Any] = lambda: None
        self._missed = list(objects.unplaced(engine))
        self._frozen = objects.in_other_process(engine)
        self._hooks: list[Any] = []
        self.tuned: TunedEngine | PhasedEngine | None = None
        self._early: EarlySteps | None = None
        self._settled = True
        self._cpus = share_cpus().__enter__()  # ends with this
        inner = objects.inner_optimizer(zero)
        if zero is None or not any(True for _ in objects.host_objects(zero)):
            return
        self._zero = ref(zero)
        capture.owners[zero] = store
        capture.on_destroy[zero] = self.release
        if self._frozen:
            return
        self.settle()
        if inner is None:
            return
        if keep_states_as(inner, store.policies.state_dtype):
            objects.relink(zero)
        for master in objects.masters(zero):
            self._seed(inner, master, inner.param_groups[0])
        self.settle()
        self._early = follow_gradients(zero)
        self._settled = False  # the first backward pass makes more
        self._hooks = [
            inner.register_step_pre_hook(self._before_step),
            inner.register_step_post_hook(self._after_step),
            inner.register_load_state_dict_post_hook(self._after_load),
        ]

    def _before_step(self, inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in inner.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._seed(inner, param, group)
        # Once, not at each step: in stage 3 there is a step for every sub-group.
        if not self._settled:
            self.settle()
            self._settled = True

    @torch.no_grad()
    def _after_step(self, inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in inner.param_groups:
            for param in group["params"]:
                for each in _states_of(inner, param):
                    self._settle(each)

    def _after_load(self, inner: torch.optim.Optimizer) -> None:
        self.settle()
        self._settled = False  # an optimizer may replace what was loaded after this hook

    def _seed(
        self, inner: torch.optim.Optimizer, param: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Makes the states of a parameter that has none, as its optimizer would in its step."""
        if inner.state.get(param) or param.device.type != "cpu":
            return
        if isinstance(inner, OnePassOptimizer):
            inner.init_state(param, group)
        elif isinstance(inner, DeepSpeedCPUAdam):
            dtype = torch.float32 if inner.fp32_optimizer_states else param.dtype
            made = {
                name: self.store.take(name, tuple(param.shape), dtype, pinned=False).zero_()
                for name in _MOMENTS
            }
            inner.state[param].update(step=0, **made)

    def _objects(self) -> Iterator[HostObject]:
        zero = self._zero()
        if zero is None:
            return
        yield from objects.host_objects(zero)
        inner = objects.inner_optimizer(zero)
        if inner is not None and objects.masters(zero):
            for param in inner.state:
                yield from _states_of(inner, param)

    @torch.no_grad()
    def settle(self) -> int:
        """Brings every tensor that can be moved to its place; the hooks call it.

        Returns
        -------
        int
            Tensors moved.
        """
        zero = self._zero()
        if zero is None or self._frozen:
            return 0
        if self._early is not None:
            self._early.wait()  # what is copied to another place is written by nobody else
        moved = [each.kind for each in self._objects() if self._settle(each)]
        if moved:
            objects.relink(zero)
        return len(moved)

    def _settle(self, each: HostObject) -> bool:
        value = each.tensor
        if not each.movable or self.store.at_home(value, each.kind):
            return False
        # What DeepSpeed had pinned stays pinned; what it had not is not for the GPU's copies.
        pinned = self.store.owns(value) and self.store.is_pinned(value)
        placed = self.store.take(each.kind, tuple(value.shape), value.dtype, pinned=pinned)
        value.data = copy_whole(placed, value.detach())
        return True

    def placed_tensors(self, kinds: Collection[str]) -> dict[str, torch.Tensor]:
        """The tensors of some kinds that lie in this package's memory, by kind and number."""
        return {
            f"{each.kind}.{number}": each.tensor
            for number, each in enumerate(self._objects())
            if each.kind in kinds and self.store.owns(each.tensor)
        }

    def rows(self) -> tuple[KindRow, ...]:
        """Every kind that is on the host now, placed or not."""
        found = list(self._objects())
        made = []
        for kind in KINDS:
            own = [each.tensor for each in found if each.kind == kind]
            spans = [
                ((value.data_ptr(), value.nbytes), self.store.owns(value))
                for value in own
                if value.device.type == "cpu"
            ]
            if kind == "other":
                spans += [((address, size), True) for _, address, size in self.store.others()]
            for placed in (True, False):
                part = [span for span, is_placed in spans if is_placed is placed]
                if part:
                    made.append(self._row(kind, part, placed))
        return tuple(made)

    def _row(self, kind: str, spans: list[tuple[int, int]], placed: bool) -> KindRow:
        places = [self.store.session.placement(*span) for span in spans]
        granted: dict[int, int] = {}
        for place in places:
            for node, nbytes in place.granted.items():
                granted[node] = granted.get(node, 0) + nbytes
        notes = {note: None for place in places for note in place.notes}
        policy = self.store.policies.by_kind[kind]
        advice = cxl_note(kind, policy, self.store.session.machine)
        if advice is not None and placed:
            notes[advice] = None
        if not placed:
            notes[_NOT_ASKED] = None
        return KindRow(
            kind=kind,
            tensors=len(spans),
            nbytes=sum(size for _, size in spans),
            requested=str(policy) if placed else None,
            granted=granted,
            pinned=all(place.pinned for place in places),
            simulated=self.store.session.is_simulated and placed,
            notes=tuple(notes),
        )

    def missed(self) -> tuple[str, ...]:
        """What no policy reaches, in words; empty when everything is at its place."""
        left: Counter[str] = Counter()
        for each in self._objects():
            if each.tensor.device.type == "cpu" and not self.store.owns(each.tensor):
                left[each.kind] += each.tensor.nbytes
        passed = self._passed - self._passed_before
        left.update({f"pinned by {site}": size for site, size in passed.items()})
        return (*self._missed, *(f"{what}: {format_bytes(size)}" for what, size in left.items()))

    def table(self) -> str:
        """Kind, bytes, requested, granted and pinned, as text."""
        title = f"Host memory of ZeRO-Offload, by {self.store.policies.source}"
        if self.store.share is not None:
            title += f"\nmay hold: {self.store.share}"
        return table(self.rows(), title, self.missed())

    def to_json(self) -> dict[str, Any]:
        """Rank, machine and rows as plain data."""
        machine = self.store.session.machine
        return {
            "rank": dist.get_rank() if dist.is_initialized() else 0,
            "machine": machine.name,
            "simulated": self.store.session.is_simulated,
            "rows": [row.to_json(machine) for row in self.rows()],
        }

    def release(self) -> None:
        """Gives all memory back and stops following the engine, which cannot train any more.

        ``engine.destroy()`` calls it.
        """
        zero = self._zero()
        held = [each.tensor for each in self._objects()]
        if zero is not None:
            held += objects.held_tensors(zero)
        self.remove()
        for value in held:
            if self.store.owns(value):
                value.data = torch.empty(0, dtype=value.dtype)

    def remove(self) -> None:
        """Stops following the engine. Its tensors stay where they are."""
        self._cpus.end()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._early is not None:
            self._early.wait()
            self._early.remove()
        if self.tuned is not None:
            self.tuned.remove()
        zero = self._zero()
        if zero is not None and self._capture.owners.get(zero) is self.store:
            del self._capture.owners[zero]


def _states_of(inner: torch.optim.Optimizer, param: Any) -> Iterator[HostObject]:
    """States on the host that have values for the elements; those in 8 bits have two tensors."""
    for name, value in inner.state.get(param, {}).items():
        if not isinstance(value, torch.Tensor) or not value.dim() or not value.numel():
            continue
        if value.device.type == "cpu":
            moment = name.removesuffix(CODES).removesuffix(SCALES)
            yield HostObject(moment if moment in _MOMENTS else "other_states", value)
