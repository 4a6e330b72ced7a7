"""Placement that adapts: tuners choose the share on the far tier from step times.

Tuners are plain objects that move no memory (:class:`ModelTuner`, :class:`Climb`,
:class:`PublishedCaption`, :class:`PhaseTuner`, :class:`MostUsedItems`); :class:`StepTuner` measures
steps, asks a tuner, and carries its decisions out on tensors (:class:`TunedHomes`).
:func:`tune_optimizer` does all of this for the states of a torch optimizer. Only it needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names

if TYPE_CHECKING:
    from cxl_offload.tune.climb import Climb as Climb
    from cxl_offload.tune.climb import ClimbRule as ClimbRule
    from cxl_offload.tune.climb import PublishedCaption as PublishedCaption
    from cxl_offload.tune.counters import CounterEstimator as CounterEstimator
    from cxl_offload.tune.counters import Counts as Counts
    from cxl_offload.tune.counters import StepCounters as StepCounters
    from cxl_offload.tune.counts import DecisionCount as DecisionCount
    from cxl_offload.tune.counts import decisions as decisions
    from cxl_offload.tune.curves import TierRatios as TierRatios
    from cxl_offload.tune.decision import Bounds as Bounds
    from cxl_offload.tune.decision import Decision as Decision
    from cxl_offload.tune.decision import Tuner as Tuner
    from cxl_offload.tune.homes import Moved as Moved
    from cxl_offload.tune.homes import TunedHomes as TunedHomes
    from cxl_offload.tune.machine import tier_ratios as tier_ratios
    from cxl_offload.tune.model_based import ModelRule as ModelRule
    from cxl_offload.tune.model_based import ModelTuner as ModelTuner
    from cxl_offload.tune.most_used import MostUsedItems as MostUsedItems
    from cxl_offload.tune.most_used import MostUsedRule as MostUsedRule
    from cxl_offload.tune.most_used import Swap as Swap
    from cxl_offload.tune.most_used_parts import MostUsedParts as MostUsedParts
    from cxl_offload.tune.most_used_parts import Slice as Slice
    from cxl_offload.tune.most_used_rows import MostUsedRows as MostUsedRows
    from cxl_offload.tune.new_regions import NewRegions as NewRegions
    from cxl_offload.tune.new_regions import StepWatch as StepWatch
    from cxl_offload.tune.next_use import NextUse as NextUse
    from cxl_offload.tune.optimizer import TunedOptimizer as TunedOptimizer
    from cxl_offload.tune.optimizer import tune_optimizer as tune_optimizer
    from cxl_offload.tune.optimizer import tune_optimizer_phases as tune_optimizer_phases
    from cxl_offload.tune.options import Signal as Signal
    from cxl_offload.tune.options import TuneOptions as TuneOptions
    from cxl_offload.tune.options import read_tuning as read_tuning
    from cxl_offload.tune.phase_steps import PhaseSteps as PhaseSteps
    from cxl_offload.tune.phase_steps import follow_phases as follow_phases
    from cxl_offload.tune.phases import CycleShares as CycleShares
    from cxl_offload.tune.phases import PhaseTuner as PhaseTuner
    from cxl_offload.tune.phases import cycle_shares as cycle_shares
    from cxl_offload.tune.recording import ReplayedDecision as ReplayedDecision
    from cxl_offload.tune.recording import StepRecording as StepRecording
    from cxl_offload.tune.recording import replay_recording as replay_recording
    from cxl_offload.tune.step_tuner import StepTuner as StepTuner
    from cxl_offload.tune.threads import PhaseThreads as PhaseThreads
    from cxl_offload.tune.threads import ThreadChoice as ThreadChoice
    from cxl_offload.tune.tiers import near_and_far as near_and_far
    from cxl_offload.tune.window import StepSamples as StepSamples
    from cxl_offload.tune.window import Window as Window

__getattr__, __dir__ = lazy_names(__name__)
