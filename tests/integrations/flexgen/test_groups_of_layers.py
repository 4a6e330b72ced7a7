"""Groups of weights, as the plan has them, against the layers of the real FlexGen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flexgen.flex_opt as flex_opt
from flexgen.opt_config import OptConfig
from flexgen.utils import ExecutionEnv, ValueHolder

from cxl_offload.integrations.flexgen.model import resolve_model
from cxl_offload.integrations.flexgen.scope import replaced
from cxl_offload.integrations.flexgen.sizes import tensor_sizes
from cxl_offload.plan.flexgen.job import flexgen_job
from cxl_offload.plan.model.file import load_model

from .test_plan_realised import write_model


def flexgens_own_groups(config: OptConfig) -> list[tuple[tuple[int, ...], ...]]:
    """Shapes of the weights that FlexGen's layers share out together."""
    seen: list[tuple[tuple[int, ...], ...]] = []

    def note(specs: Sequence[Any], *_: Any) -> list[Any]:
        seen.append(tuple(tuple(shape) for shape, _, _ in specs))
        return []

    nowhere = SimpleNamespace(compressed_device=None)
    env = ExecutionEnv(gpu=nowhere, cpu=nowhere, disk=nowhere)
    policy = SimpleNamespace(compress_weight=False, cpu_cache_compute=False)
    layers = [flex_opt.InputEmbed(config, env, policy)]
    for at in range(config.num_hidden_layers):
        layers.append(flex_opt.SelfAttention(config, env, policy, at))
        layers.append(flex_opt.MLP(config, env, policy, at))
    layers.append(flex_opt.OutputEmbed(config, env, policy))
    with replaced(flex_opt, init_weight_list=note):
        for layer in layers:
            layer.init_weight(ValueHolder(), "")
    return seen


def test_groups_are_those_of_flexgens_own_layers(tmp_path: Path) -> None:
    for seed in range(20):
        folder = write_model(tmp_path / f"groups{seed}", random.Random(seed))
        config = resolve_model(str(folder), "_DUMMY_").config
        theirs = flexgens_own_groups(config)

        first, attention, mlp, last = flexgen_job(load_model(folder), prompt=3, generated=2).groups

        layers = [attention.shapes, mlp.shapes] * config.num_hidden_layers
        assert theirs == [first.shapes, *layers, last.shapes]
        assert [each.count for each in (attention, mlp)] == [config.num_hidden_layers] * 2
        assert tensor_sizes(config, prompt_len=3, gen_len=2).groups == (first, attention, mlp, last)
