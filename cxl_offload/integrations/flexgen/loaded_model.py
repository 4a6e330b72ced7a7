"""One FlexGen run from request to report, leaving nothing behind."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from importlib.metadata import version
from types import TracebackType
from typing import Any

import numpy as np
import torch
from flexgen.flex_opt import SelfAttention
from flexgen.timer import timers
from flexgen.utils import ExecutionEnv, project_decode_latency

from cxl_offload.errors import forget_locals
from cxl_offload.integrations.fit import check_fit, room
from cxl_offload.integrations.flexgen.attention import SelfAttentionInPlace, SelfAttentionOnHost
from cxl_offload.integrations.flexgen.checkpoint import weights_folder
from cxl_offload.integrations.flexgen.functional import functional_of
from cxl_offload.integrations.flexgen.layout import FlexGenLayout, lay_out
from cxl_offload.integrations.flexgen.lm import TieredOptLM, WeightPlacer
from cxl_offload.integrations.flexgen.model import ModelSource, resolve_model
from cxl_offload.integrations.flexgen.predict import check_stripes
from cxl_offload.integrations.flexgen.recorder import Recorder
from cxl_offload.integrations.flexgen.report import FlexGenReport
from cxl_offload.integrations.flexgen.request import FlexGenRun
from cxl_offload.integrations.flexgen.scope import flexgen_globals
from cxl_offload.integrations.flexgen.tokens import ByteTokenizer, prompt_tokens
from cxl_offload.integrations.flexgen.tuning import TunedRun
from cxl_offload.integrations.flexgen.wiring import (
    build_devices,
    check_accelerator,
    flexgen_policy,
    make_copier,
    scratch_folder,
)
from cxl_offload.integrations.named_tiers import with_tiers
from cxl_offload.integrations.planned_threads import planned_threads
from cxl_offload.memory import Session, current_session
from cxl_offload.objects.kind_store import MemorySource, TierStore
from cxl_offload.objects.load_parts import LoadClock
from cxl_offload.objects.placement_rows import placement_rows
from cxl_offload.ops.shared_cpus import share_cpus
from cxl_offload.ops.threads import threads_by_default
from cxl_offload.profile.schedule import Progress
from cxl_offload.renamed import renamed_keywords
from cxl_offload.sim.trace import Trace
from cxl_offload.topology import Machine
from cxl_offload.tune import read_tuning

FLEXGEN_VERSION = "0.1.8"
_log = logging.getLogger(__name__)


@renamed_keywords(memory="session")
def run(
    request: FlexGenRun, *, session: Session | None = None, progress: Progress | None = None
) -> FlexGenReport:
    """Generate with FlexGen, every tensor in the tier the request names.

    Parameters
    ----------
    request
        What to run.
    session
        Where host tensors come from; ``None`` takes the current session.
    progress
        Called with a stage (``convert``, ``load``, ``generate``), what is done and the total.

    Raises
    ------
    ConfigError
        The request, the model folder or a policy is wrong; nothing was allocated.
    MemoryError
        A tier, a node or the accelerator is too small.
    OSError
        A disk is too full, or the kernel refused a call.
    """
    with LoadedModel(request, session=session, progress=progress) as loaded:
        return loaded.generate()


class LoadedModel:
    """A loaded model that can generate; a context manager that gives everything back.

    Also when loading or generating raises: then the frames of the exception are cleared, so that
    they keep no tensor alive. One session may be open in a process at a time.

    Parameters
    ----------
    request, session, progress
        As for :func:`run`; all checks happen here, before anything is allocated or written.

    Attributes
    ----------
    layout
        Where everything was planned to be.
    inputs
        int32 ``(rows, prompt_len)``: the padded prompts.
    store
        Counts host memory by kind, from ``with`` on.
    tuned
        What tunes the weights, from ``with`` on; None without ``tune``.
    """

    store: TierStore

    @renamed_keywords(memory="session")
    def __init__(
        self,
        request: FlexGenRun,
        *,
        session: Session | None = None,
        progress: Progress | None = None,
    ) -> None:
        request.check()
        self.request = request
        self.session = session or current_session()
        self.machine: Machine = with_tiers(self.session.machine, request.tiers)
        self._tuning = read_tuning(
            request.tune,
            machine=self.machine,
            budget_bytes=request.tune_budget_bytes,
            state=request.tune_state,
            signals=("step_time",),
        )
        self.tuned: TunedRun | None = None
        self.source: ModelSource = resolve_model(request.model, request.path)
        self.inputs, self._tokenizer = prompt_tokens(request, self.source)
        self._progress = progress
        prompt_len = int(self.inputs.shape[1])
        self.layout: FlexGenLayout = lay_out(request, self.source.config, prompt_len, self.machine)
        check_stripes(self.layout.needs)
        check_fit(self.layout.needs, room(self.session, request.tiers))
        check_accelerator(request, self.layout, self.session)
        self._open = contextlib.ExitStack()
        self._model: TieredOptLM | None = None
        self._clock = LoadClock()

    @property
    def model(self) -> TieredOptLM:
        """FlexGen's model, inside the ``with`` block."""
        if self._model is None:
            raise RuntimeError("the session is not open; use it in a with statement")
        return self._model

    def __enter__(self) -> LoadedModel:
        if version("flexgen") != FLEXGEN_VERSION:
            _log.warning("flexgen %s found, checked with %s", version("flexgen"), FLEXGEN_VERSION)
        try:
            with self._clock:
                self._load()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if error is not None:
            forget_locals(error)
        self._open.close()

    # Long: what is opened one after the other and closed in the reverse order.
    def _load(self) -> None:
        request, layout, config = self.request, self.layout, self.source.config
        scratch = self._open.enter_context(scratch_folder(request.offload_dir))
        folder = weights_folder(self.source, scratch, progress=self._progress)
        source = MemorySource(self.session)
        self.store = TierStore(source, layout.parts, pin=request.accelerator == "cuda")
        self._recorder = Recorder(source.bytes_per_node, local_node=self.session.kernel.local_node)
        copies = make_copier(request, self.session, source, self._recorder)
        self._open.callback(copies.close)
        threads = planned_threads(request.plan, self.session)
        self._open.enter_context(threads_by_default(threads.counts))
        self._thread_notes = threads.notes
        self._open.enter_context(share_cpus())
        placer = WeightPlacer(layout.homes.cuts)
        self._open.enter_context(
            flexgen_globals(
                copy=copies,
                init_weight_list=placer,
                self_attention=self_attention_of(
                    request, layout, loads_nothing=copies.stays_in_host_memory
                ),
                functional=functional_of(request),
                without_cuda=request.accelerator == "host",
            )
        )
        devices = build_devices(
            request,
            layout,
            self.store,
            copies,
            self._recorder,
            activation=config.activation_fn,
            disk_folder=scratch / "disk",
        )
        placer.homes = devices.weight_homes
        self._open.callback(self._close_model)
        self._open.callback(devices.disk.close_copy_threads)  # before the model: it drains copies
        env = ExecutionEnv(
            gpu=devices.accelerator, cpu=devices.host, disk=devices.disk, mixed=devices.cache
        )
        self._model = TieredOptLM(
            config,
            env,
            folder,
            flexgen_policy(request, layout.homes.percent),
            recorder=self._recorder,
            copies=copies,
            loaded=lambda done, total: self._tell("load", done, total),
        )
        self._model.sync()
        if self._tuning is not None:
            self.tuned = TunedRun(
                self._model.weight_tensors(),
                self.session,
                self._tuning,
                before_moves=self._before_moves,
            )

    def _before_moves(self) -> None:
        self.model.sync()
        self._recorder.weights_move()

    def _close_model(self) -> None:
        self.tuned = None
        if self._model is not None:
            self._model.close()
            self._model = None

    def _tell(self, stage: str, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(stage, done, total)

    def generate(self, *, token_begins: Callable[[int], None] | None = None) -> FlexGenReport:
        """Generate the answers to the request's prompts; may be called again.

        Parameters
        ----------
        token_begins
            Called before a token of every row is computed, with its number; 0 is the prompt's.
        """
        request, model = self.request, self.model
        if request.warmup:
            model.generate(self.inputs, max_new_tokens=1)
        computed = request.cut_gen_len or request.gen_len

        def begins(token: int) -> None:
            if self.tuned is not None:
                self.tuned.token_begins(token)
            self._tell("generate", token, computed)
            if token_begins is not None:
                token_begins(token)

        timers("generate").reset()
        if request.record:
            self._recorder.start()
        model.token_begins = begins
        try:
            with torch.no_grad(), share_cpus() as shared:
                tokens = model.generate(
                    self.inputs,
                    max_new_tokens=request.gen_len,
                    do_sample=request.do_sample,
                    temperature=request.temperature,
                    stop=request.stop,
                    cut_gen_len=request.cut_gen_len,
                )
        finally:
            model.token_begins = None
            trace = self._recorder.stop()
        self._tell("generate", computed, computed)
        costs = [float(cost) for cost in timers("generate").costs]
        return self._report(tokens, trace, costs, shared.notes())

    def _report(
        self,
        tokens: np.ndarray[Any, np.dtype[np.int32]],
        trace: Trace,
        costs: list[float],
        notes: tuple[str, ...],
    ) -> FlexGenReport:
        request = self.request
        rows, prompt_len = self.inputs.shape
        if request.record:
            trace.count_tokens("prefill", rows * prompt_len)
            trace.count_tokens("decode", rows * (len(costs) - 1))
        return FlexGenReport(
            tokens=tokens,
            answers=self._answers(tokens),
            accelerator=request.accelerator,
            machine=self.machine.name,
            simulated_placement=self.session.is_simulated,
            config=self.source.config,
            model=str(self.source.config.name),
            parameters=self.source.parameters,
            prompt_len=prompt_len,
            gen_len=request.gen_len if request.cut_gen_len else len(costs),
            load_seconds=self._clock.seconds,
            load_parts=self._clock.parts,
            prefill_seconds=costs[0],
            decode_seconds=_decode_seconds(costs, request, prompt_len),
            projected=request.cut_gen_len is not None,
            shares=self.layout.rows,
            placement=placement_rows(self.store.use(), self.layout.parts, self.machine),
            outside=self.layout.outside,
            trace=trace,
            notes=(*self.layout.notes, *self._tokenizer_notes(), *self._thread_notes, *notes),
        )

    def _tokenizer_notes(self) -> tuple[str, ...]:
        if not isinstance(self._tokenizer, ByteTokenizer):
            return ()
        return (
            "one token a byte, since there are no tokenizer files: a model trained with another "
            "tokenizer does not understand these prompts",
        )

    def _answers(self, tokens: np.ndarray[Any, Any]) -> tuple[str, ...]:
        if self._tokenizer is None:
            return ()
        start, pad = self.inputs.shape[1], self.source.config.pad_token_id
        rows = [[int(token) for token in row[start:] if token != pad] for row in tokens]
        return tuple(self._tokenizer.decode(row) for row in rows)


def self_attention_of(request: FlexGenRun, layout: FlexGenLayout, *, loads_nothing: bool) -> Any:
    """FlexGen's layer, or one of ours that moves no cache."""
    if layout.attends_in_place:
        return SelfAttentionInPlace
    is_plain = not request.cpu_cache_compute and not request.compress_cache
    in_place = request.cpu_attention == "in-place" and layout.homes.sequences[0] == 0
    if loads_nothing and is_plain and in_place:
        return SelfAttentionOnHost
    return SelfAttention


def _decode_seconds(costs: list[float], request: FlexGenRun, prompt_len: int) -> float:
    if request.cut_gen_len is None:
        return sum(costs[1:])
    return float(project_decode_latency(costs, prompt_len, request.gen_len))
