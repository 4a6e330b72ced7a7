"""What was renamed and what is gone: the one list of old names (:mod:`cxl_offload.renamed`)."""

from __future__ import annotations

RENAMED: dict[str, str] = {
    # memory
    "cxl_offload.Memory": "cxl_offload.Session",
    "cxl_offload.memory.Memory": "cxl_offload.memory.Session",
    "cxl_offload.memory.PlacementLike": "cxl_offload.memory.PolicyLike",
    "cxl_offload.memory.active": "cxl_offload.memory.current_session",
    "cxl_offload.memory.chosen": "cxl_offload.memory.chosen_session",
    "cxl_offload.memory.in_use.active": "cxl_offload.memory.current_session",
    "cxl_offload.memory.in_use.chosen": "cxl_offload.memory.chosen_session",
    "cxl_offload.memory.policy.PlacementLike": "cxl_offload.memory.PolicyLike",
    "cxl_offload.memory.session.Memory": "cxl_offload.memory.Session",
    # plan
    "cxl_offload.plan.cache": "cxl_offload.plan.fleet.cache",
    "cxl_offload.plan.equations.copies.CopyPath": "cxl_offload.validation.copy_path.CopyPath",
    "cxl_offload.plan.equations.copies.copy_seconds": (
        "cxl_offload.validation.copy_path.copy_seconds"
    ),
    "cxl_offload.plan.equations.loaded_latency": "cxl_offload.validation.loaded_latency",
    "cxl_offload.plan.equations.mixed_tier": "cxl_offload.validation.mixed_tier",
    "cxl_offload.plan.equations.pages": "cxl_offload.validation.pages",
    "cxl_offload.validation.threads": "cxl_offload.plan.equations.threads",
    "cxl_offload.plan.equations.interleave.concurrency_bound": (
        "cxl_offload.validation.mixed_tier.concurrency_bound"
    ),
    "cxl_offload.plan.equations.interleave.interleaved_bandwidth": (
        "cxl_offload.validation.mixed_tier.interleaved_bandwidth"
    ),
    "cxl_offload.plan.equations.interleave.optimal_shares": (
        "cxl_offload.plan.equations.interleave.shares_of_weights"
    ),
    "cxl_offload.plan.equations.footprint": "cxl_offload.validation.footprint",
    "cxl_offload.plan.flexgen.model.Throughput": "cxl_offload.validation.flexgen_shape.Throughput",
    "cxl_offload.plan.flexgen.model.throughput": "cxl_offload.validation.flexgen_shape.throughput",
    "cxl_offload.plan.flexgen.search": "cxl_offload.validation.flexgen_search",
    "cxl_offload.plan.flexgen.search.Request": (
        "cxl_offload.validation.flexgen_search.SearchRequest"
    ),
    "cxl_offload.plan.flexgen.terms.Placement": (
        "cxl_offload.validation.flexgen_shape.ShapeOnTiers"
    ),
    "cxl_offload.plan.flexgen.plan.CXL_MARGIN": "cxl_offload.plan.request.CXL_MARGIN",
    "cxl_offload.plan.flexgen.job.WeightLevel": "cxl_offload.plan.flexgen.layout.WeightCut",
    "cxl_offload.plan.flexgen.planner.Found": "cxl_offload.plan.flexgen.planner.Optimum",
    "cxl_offload.plan.flexgen.engine": "cxl_offload.plan.decoding.engine",
    "cxl_offload.plan.flexgen.phases": "cxl_offload.plan.decoding.phases",
    "cxl_offload.plan.flexgen.program.stripe_slack": (
        "cxl_offload.plan.flexgen.choice.stripe_slack"
    ),
    "cxl_offload.plan.flexgen.phases.phases_of": "cxl_offload.plan.flexgen.choice.phases_of",
    "cxl_offload.plan.flexgen.trace": "cxl_offload.plan.decoding.trace",
    "cxl_offload.plan.flexgen.trace.cpu_attention_engines": (
        "cxl_offload.plan.decoding.trace.cpu_engines"
    ),
    "cxl_offload.plan.hardware.HostRoom": "cxl_offload.plan.hardware.HostNode",
    "cxl_offload.plan.laws": "cxl_offload.plan.equations",
    "cxl_offload.plan.ObjectPolicy": "cxl_offload.plan.TensorPolicy",
    "cxl_offload.plan.ObjectUse": "cxl_offload.plan.TensorUse",
    "cxl_offload.plan.object_policies": "cxl_offload.plan.tensor_policies",
    "cxl_offload.plan.object_policy": "cxl_offload.plan.tensor_policy",
    "cxl_offload.plan.object_policy.ObjectPolicy": "cxl_offload.plan.TensorPolicy",
    "cxl_offload.plan.object_policy.ObjectUse": "cxl_offload.plan.TensorUse",
    "cxl_offload.plan.object_policy.object_policies": "cxl_offload.plan.tensor_policies",
    "cxl_offload.plan.rank_shares.Request": "cxl_offload.plan.rank_shares.NodeRequest",
    "cxl_offload.plan.transformers.kv_types": "cxl_offload.plan.kv_types",
    "cxl_offload.plan.preset": "cxl_offload.plan.machine_rates",
    "cxl_offload.plan.preset.MachineNumbers": "cxl_offload.plan.machine_rates.MachineRates",
    "cxl_offload.plan.equations.caption": "cxl_offload.tune.caption",
    "cxl_offload.plan.validate": "cxl_offload.validation",
    "cxl_offload.plan.vllm.flags.placement_text": "cxl_offload.plan.vllm.flags.policy_of_bytes",
    "cxl_offload.plan.equations.caption.replay_on_bandwidth": (
        "cxl_offload.validation.caption_replay.replay_on_bandwidth"
    ),
    "cxl_offload.plan.equations.caption.replay_on_states": (
        "cxl_offload.validation.caption_replay.replay_on_states"
    ),
    "cxl_offload.plan.equations.threads.assign_threads": (
        "cxl_offload.validation.thread_assignment.assign_threads"
    ),
    "cxl_offload.plan.training.zero_offload.HOST_BYTES_PER_PARAM": (
        "cxl_offload.plan.equations.adam_bytes.HOST_BYTES_PER_PARAM"
    ),
    "cxl_offload.plan.training.zero_offload.fits": "cxl_offload.validation.zero_memory.fits",
    "cxl_offload.plan.training.zero_offload.host_state_bytes": (
        "cxl_offload.validation.zero_memory.host_state_bytes"
    ),
    "cxl_offload.plan.training.zero_offload.largest_params": (
        "cxl_offload.validation.zero_memory.largest_params"
    ),
    "cxl_offload.plan.training.zero_offload.step_slowdown": (
        "cxl_offload.validation.zero_memory.step_slowdown"
    ),
    "cxl_offload.plan.vllm.offload.best_offload_bytes": (
        "cxl_offload.validation.offload_sizes.best_offload_bytes"
    ),
    "cxl_offload.plan.vllm.offload.copy_fraction": (
        "cxl_offload.validation.offload_sizes.copy_fraction"
    ),
    "cxl_offload.plan.vllm.offload.mean_throughput_ratio": (
        "cxl_offload.validation.offload_sizes.mean_throughput_ratio"
    ),
    "cxl_offload.plan.training.plan.ADAM_SHARE": "cxl_offload.plan.training.adam_rate.ADAM_SHARE",
    "cxl_offload.plan.training.zero_offload.OPTIMIZER_BYTES_PER_PARAM": (
        "cxl_offload.plan.equations.adam_bytes.OPTIMIZER_BYTES_PER_PARAM"
    ),
    # executor, whose rooms are true to their names now
    "cxl_offload.executor.RankShare": "cxl_offload.ranks.RankShare",
    "cxl_offload.executor.Recording": "cxl_offload.objects.Recording",
    "cxl_offload.executor.cache_operators": "cxl_offload.profile.operators.cache_operators",
    "cxl_offload.executor.decoder_layer": "cxl_offload.profile.operators.decoder_layer",
    "cxl_offload.executor.framework_code": "cxl_offload.profile.operators.framework_code",
    "cxl_offload.executor.operators": "cxl_offload.profile.operators.measure",
    "cxl_offload.executor.ranks": "cxl_offload.ranks.share",
    "cxl_offload.executor.record": "cxl_offload.objects.record",
    "cxl_offload.executor.record.Recording": "cxl_offload.objects.Recording",
    "cxl_offload.executor.record.record": "cxl_offload.objects.record",
    "cxl_offload.executor.share_machine": "cxl_offload.ranks.share_machine",
    # one class, one name
    "cxl_offload.ops.saved.Part": "cxl_offload.ops.saved.ByteRange",
    "cxl_offload.profile.measure.effort.Sizes": "cxl_offload.profile.measure.effort.WorkingSets",
    "cxl_offload.profile.measure.jobs.Request": "cxl_offload.profile.measure.jobs.MeasureRequest",
    "cxl_offload.sim.Home": "cxl_offload.sim.TensorHome",
    "cxl_offload.sim.schedule.Schedule": "cxl_offload.sim.schedule.TraceBuilder",
    "cxl_offload.sim.workload.Home": "cxl_offload.sim.TensorHome",
    "cxl_offload.sim.workload.Placed": "cxl_offload.sim.workload.PlacedBytes",
    "cxl_offload.transfer.Link": "cxl_offload.transfer.CopyLink",
    "cxl_offload.transfer.engine.Link": "cxl_offload.transfer.CopyLink",
    # one alias, one name
    "cxl_offload.integrations.flexgen.copies.Way": (
        "cxl_offload.integrations.flexgen.copies.CopyWay"
    ),
    "cxl_offload.ops.attention_arguments.Cache": "cxl_offload.ops.attention_arguments.CacheLike",
    "cxl_offload.ops.attention_arguments.Lengths": (
        "cxl_offload.ops.attention_arguments.SequenceLengths"
    ),
    "cxl_offload.plan.flexgen.planner.Interleave": "cxl_offload.plan.flexgen.planner.StripeWish",
    "cxl_offload.plan.equations.tco.Form": "cxl_offload.plan.equations.tco.TcoForm",
    "cxl_offload.plan.model.config.Family": "cxl_offload.plan.model.config.ModelFamily",
    "cxl_offload.profile.copies.Direction": "cxl_offload.profile.copies.CopyDirection",
    "cxl_offload.profile.curves.Kind": "cxl_offload.profile.curves.LoopKind",
    "cxl_offload.profile.measure.effort.Part": "cxl_offload.profile.measure.effort.PathPart",
    "cxl_offload.profile.model.Kind": "cxl_offload.profile.model.LoopKind",
    "cxl_offload.profile.model.Mode": "cxl_offload.profile.model.MeasureMode",
    "cxl_offload.sim.machine.Way": "cxl_offload.sim.machine.ReadOrWrite",
    "cxl_offload.plan.laws.mixed_tier.Access": "cxl_offload.sim.machine.ReadOrWrite",
    # the most used near
    "cxl_offload.integrations.transformers.hot_caches": (
        "cxl_offload.integrations.transformers.near_caches"
    ),
    "cxl_offload.integrations.transformers.hot_caches.HotCaches": (
        "cxl_offload.integrations.transformers.near_caches.NearCaches"
    ),
    "cxl_offload.integrations.transformers.hot_experts": (
        "cxl_offload.integrations.transformers.most_used_experts"
    ),
    "cxl_offload.integrations.transformers.hot_experts.HotExperts": (
        "cxl_offload.integrations.transformers.most_used_experts.MostUsedExperts"
    ),
    "cxl_offload.tune.HotParts": "cxl_offload.tune.MostUsedParts",
    "cxl_offload.tune.HotRows": "cxl_offload.tune.MostUsedRows",
    "cxl_offload.tune.HotRule": "cxl_offload.tune.MostUsedRule",
    "cxl_offload.tune.HotSet": "cxl_offload.tune.MostUsedItems",
    "cxl_offload.tune.hot": "cxl_offload.tune.most_used",
    "cxl_offload.tune.hot.HotRule": "cxl_offload.tune.MostUsedRule",
    "cxl_offload.tune.hot.HotSet": "cxl_offload.tune.MostUsedItems",
    "cxl_offload.tune.hot_parts": "cxl_offload.tune.most_used_parts",
    "cxl_offload.tune.hot_parts.HotParts": "cxl_offload.tune.MostUsedParts",
    "cxl_offload.tune.hot_rows": "cxl_offload.tune.most_used_rows",
    "cxl_offload.tune.hot_rows.HotRows": "cxl_offload.tune.MostUsedRows",
    # files
    "cxl_offload.profile.codec": "cxl_offload.files.codec",
    "cxl_offload.topology.document": "cxl_offload.files.document",
    # metrics
    "cxl_offload.metrics.prometheus.MetricsServer": "cxl_offload.metrics.MetricsServer",
    "cxl_offload.metrics.prometheus.serve": "cxl_offload.metrics.serve",
    # integrations
    "cxl_offload.integrations.deepspeed.placement": "cxl_offload.integrations.deepspeed.placing",
    "cxl_offload.integrations.deepspeed.scope.placement": (
        "cxl_offload.integrations.deepspeed.placing"
    ),
    "cxl_offload.integrations.flexgen.PlacementRow": "cxl_offload.objects.PlacementRow",
    "cxl_offload.integrations.flexgen.Role": "cxl_offload.integrations.flexgen.FlexGenKind",
    "cxl_offload.integrations.flexgen.layout.Layout": (
        "cxl_offload.integrations.flexgen.layout.FlexGenLayout"
    ),
    "cxl_offload.integrations.flexgen.layout.with_tiers": (
        "cxl_offload.integrations.named_tiers.with_tiers"
    ),
    "cxl_offload.integrations.flexgen.places.check_tiers": (
        "cxl_offload.integrations.named_tiers.check_tiers"
    ),
    "cxl_offload.integrations.flexgen.places.ROLES": (
        "cxl_offload.integrations.flexgen.places.KINDS"
    ),
    "cxl_offload.integrations.flexgen.places.Role": "cxl_offload.integrations.flexgen.FlexGenKind",
    "cxl_offload.integrations.flexgen.report.PlacementRow": "cxl_offload.objects.PlacementRow",
    "cxl_offload.integrations.flexgen.report.placement_rows": (
        "cxl_offload.objects.placement_rows.placement_rows"
    ),
    "cxl_offload.integrations.flexgen.predict.Room": "cxl_offload.integrations.fit.Room",
    "cxl_offload.integrations.flexgen.predict.check_fit": "cxl_offload.integrations.fit.check_fit",
    "cxl_offload.integrations.fit.capacities": "cxl_offload.integrations.fit.node_limits",
    "cxl_offload.integrations.flexgen.tiers.capacities": "cxl_offload.integrations.fit.node_limits",
    "cxl_offload.integrations.flexgen.tiers.room": "cxl_offload.integrations.fit.room",
    "cxl_offload.integrations.flexgen.store": "cxl_offload.objects.kind_store",
    "cxl_offload.integrations.flexgen.store.RoleUse": "cxl_offload.objects.kind_store.KindUse",
    "cxl_offload.integrations.flexgen.tiers.MemorySource": (
        "cxl_offload.objects.kind_store.MemorySource"
    ),
    "cxl_offload.integrations.vllm.weight_kinds": "cxl_offload.objects.weight_kinds",
    "cxl_offload.plan.fleet.wave": "cxl_offload.validation.wave",
    "cxl_offload.integrations.flexgen.Session": "cxl_offload.integrations.flexgen.LoadedModel",
    "cxl_offload.integrations.flexgen.sizes.Sizes": (
        "cxl_offload.integrations.flexgen.sizes.RunSizes"
    ),
    "cxl_offload.integrations.flexgen.session": "cxl_offload.integrations.flexgen.loaded_model",
    "cxl_offload.integrations.flexgen.session.Session": (
        "cxl_offload.integrations.flexgen.LoadedModel"
    ),
}
"""Old dotted name to new, which may have moved again; names inside of an old one follow it."""

_REACH = "give Cache the bytes by node; Machine.node(...).llc_bytes is the size of a cache"
_PLAN_IS_EXECUTED = "a plan is executed as data: cxl-offload flexgen --plan"

_PLANNED_TRACE = (
    "cxl_offload.plan.decoding.trace.planned_trace is the trace of a planned run; append events to "
    "a cxl_offload.sim.Trace for any other order"
)

GONE: dict[str, str] = {
    "cxl_offload.plan.gpu.TRAINING_EFFICIENCY": (
        "cxl_offload.plan.gpu.assumed_training_share has the share of every kind of GPU"
    ),
    "cxl_offload.plan.training.placement.place": (
        "fastest there finds a placement, and nearest the one in front of those as fast"
    ),
    "cxl_offload.sim.InferenceWork": _PLANNED_TRACE,
    "cxl_offload.sim.inference": _PLANNED_TRACE,
    "cxl_offload.sim.resources.Demand": "it was another name of Mapping[int, float]",
    "cxl_offload.sim.sharing": "cxl_offload.sim.replay shares resources in the core",
    "cxl_offload.sim.inference_trace": _PLANNED_TRACE,
    "cxl_offload.sim.llc_reach_bytes": _REACH,
    "cxl_offload.sim.cache.llc_reach_bytes": _REACH,
    "cxl_offload.integrations.flexgen.lm.weight_groups": (
        "cxl_offload.plan.flexgen.layout.opt_groups has FlexGen's groups of weights"
    ),
    "cxl_offload.plan.flexgen.flags.Spelled": _PLAN_IS_EXECUTED,
    "cxl_offload.plan.flexgen.flags.flags_of": _PLAN_IS_EXECUTED,
    "cxl_offload.plan.flexgen.flags.kv_sequences": _PLAN_IS_EXECUTED,
    "cxl_offload.plan.flexgen.flags.spell": _PLAN_IS_EXECUTED,
    "cxl_offload.plan.flexgen.job.weight_homes": (
        "cxl_offload.plan.flexgen.layout.weight_homes takes cuts, not shares"
    ),
    "cxl_offload.plan.flexgen.flags.bytes_per_node": "Hardware.node_bytes takes its place",
    "cxl_offload.plan.flexgen.model": "cxl_offload.plan.decoding.phases has the equations",
    "cxl_offload.plan.flexgen.terms": (
        "rates are in cxl_offload.plan.decoding.engine, equations in "
        "cxl_offload.plan.decoding.phases"
    ),
    "cxl_offload.plan.flexgen.plan.weigh_cxl": (
        "cxl_offload.plan.compare.best_without_idle_tiers does it for every executor"
    ),
    "cxl_offload.plan.flexgen.prices": "cxl_offload.plan.prices plans again with one unit more",
    "cxl_offload.plan.hardware.flexgen_hardware": "hardware_of returns it, with its notes in it",
    "cxl_offload.plan.preset.mixed_tiers": "it was for the validation alone, which has it now",
    "cxl_offload.plan.laws.copies.path_bandwidth": (
        "cxl_offload.plan.equations.copies.path_bytes_per_s takes its place"
    ),
    "cxl_offload.plan.laws.copies.extra_seconds": "subtract copy_seconds of the two tiers",
    "cxl_offload.plan.laws.copies.min_bytes_for_overhead": (
        "multiply the extra set-up by the link's rate and divide by the overhead"
    ),
    "cxl_offload.plan.laws.interleave.LINE_BYTES": "cxl_offload.core.LINE_BYTES is the core's",
    "cxl_offload.plan.laws.interleave.latency_factor": "divide the first one by mean_latency_ns",
    "cxl_offload.plan.laws.interleave.ratio_change": "cxl-offload validate has it as ratio_change",
    "cxl_offload.plan.laws.topology_path": "cxl_offload.sim.fabric.Fabric knows trees of switches",
}
"""Old dotted name of what has no successor, to what to do instead; using it is an error."""
