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
    from cxl_offload.tune.climb import Climb, ClimbRule, PublishedCaption
    from cxl_offload.tune.counters import CounterEstimator, Counts, StepCounters
    from cxl_offload.tune.counts import DecisionCount, decisions
    from cxl_offload.tune.curves import TierRatios
    from cxl_offload.tune.decision import Bounds, Decision, Tuner
    from cxl_offload.tune.homes import Moved, TunedHomes
    from cxl_offload.tune.machine import tier_ratios
    from cxl_offload.tune.model_based import ModelRule, ModelTuner
    from cxl_offload.tune.most_used import MostUsedItems, MostUsedRule, Swap
    from cxl_offload.tune.most_used_parts import MostUsedParts, Slice
    from cxl_offload.tune.most_used_rows import MostUsedRows
    from cxl_offload.tune.new_regions import NewRegions, StepWatch
    from cxl_offload.tune.next_use import NextUse
    from cxl_offload.tune.optimizer import TunedOptimizer, tune_optimizer, tune_optimizer_phases
    from cxl_offload.tune.options import Signal, TuneOptions, read_tuning
    from cxl_offload.tune.phase_steps import PhaseSteps, follow_phases
    from cxl_offload.tune.phases import CycleShares, PhaseTuner, cycle_shares
    from cxl_offload.tune.recording import ReplayedDecision, StepRecording, replay_recording
    from cxl_offload.tune.step_tuner import StepTuner
    from cxl_offload.tune.threads import PhaseThreads, ThreadChoice
    from cxl_offload.tune.tiers import near_and_far
    from cxl_offload.tune.window import StepSamples, Window

__all__ = [
    "Bounds",
    "Climb",
    "ClimbRule",
    "CounterEstimator",
    "Counts",
    "CycleShares",
    "Decision",
    "DecisionCount",
    "ModelRule",
    "ModelTuner",
    "MostUsedItems",
    "MostUsedParts",
    "MostUsedRows",
    "MostUsedRule",
    "Moved",
    "NewRegions",
    "NextUse",
    "PhaseSteps",
    "PhaseThreads",
    "PhaseTuner",
    "PublishedCaption",
    "ReplayedDecision",
    "Signal",
    "Slice",
    "StepCounters",
    "StepRecording",
    "StepSamples",
    "StepTuner",
    "StepWatch",
    "Swap",
    "ThreadChoice",
    "TierRatios",
    "TuneOptions",
    "TunedHomes",
    "TunedOptimizer",
    "Tuner",
    "Window",
    "cycle_shares",
    "decisions",
    "follow_phases",
    "near_and_far",
    "read_tuning",
    "replay_recording",
    "tier_ratios",
    "tune_optimizer",
    "tune_optimizer_phases",
]

__getattr__, __dir__ = lazy_names(__name__)
