"""The two ways to train of train_gpt_zero_offload.py: DeepSpeed's ZeRO-Offload, and plain torch."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from gpt_text import END, SPECIAL, VOCABULARY
from transformers import OPTConfig, OPTForCausalLM

import cxl_offload
from cxl_offload.integrations.deepspeed.kinds import parse_request
from cxl_offload.ops.adam import CPUAdam
from cxl_offload.ops.lion import CPULion

Weights = dict[str, torch.Tensor]

STATES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
"""What the states of CPUAdam and CPULion may be kept in."""

PARAMETERS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What the parameters of plain torch may be, without master weights beside them."""

OPTIMIZERS = {"adam": CPUAdam, "lion": CPULion}


def name_of(tensor: torch.Tensor) -> str:
    """Of its type."""
    return str(tensor.dtype).removeprefix("torch.")


class Trainer(Protocol):
    """What a step needs, whoever does it."""

    def loss(self, tokens: torch.Tensor) -> torch.Tensor: ...
    def step(self, batches: list[torch.Tensor]) -> float: ...
    def weights(self) -> Weights: ...
    def placed(self) -> str: ...


def model_config(args: argparse.Namespace) -> OPTConfig:
    return OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        word_embed_proj_dim=args.hidden,
        ffn_dim=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        max_position_embeddings=2048,
        dropout=0.0,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=SPECIAL.index("<pad>"),
    )


def schedule(args: argparse.Namespace) -> Callable[[Any], Any]:
    """Ten steps of warm-up in a hundred, then a cosine down to a tenth."""
    warm = max(1, args.steps // 10)

    def factor(step: int) -> float:
        done = min(1.0, max(0, step - warm) / max(1, args.steps - warm))
        return min(1.0, (step + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * done))

    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class ZeroTrainer:
    """DeepSpeed's ZeRO-Offload; the ``with placing`` is all that this package needs."""

    def __init__(self, args: argparse.Namespace, saving: AbstractContextManager[Any]) -> None:
        import deepspeed

        from cxl_offload.integrations.deepspeed import placing

        model = OPTForCausalLM(model_config(args))
        optimizer = CPUAdam(
            model.parameters(),
            lr=args.lr,
            weight_decay=0.01,
            state_dtype=STATES[args.states or "fp32"],
        )
        # Under `cxl-offload run` the placement has begun already.
        under_run = "CXL_OFFLOAD_PLAN" in os.environ
        scope = (
            contextlib.nullcontext() if under_run else placing(parse_request(args.placement or ""))
        )
        with scope as self._scope:
            self.engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                lr_scheduler=schedule(args),
                config=zero_config(args),
            )
        self._saving = saving

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(self.engine.device)
        found: torch.Tensor = self.engine(input_ids=tokens, labels=tokens).loss
        return found

    def step(self, batches: list[torch.Tensor]) -> float:
        total = 0.0
        for batch in batches:
            with self._saving:
                loss = self.loss(batch)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item()
        return total / len(batches)

    def weights(self) -> Weights:
        import deepspeed

        module = self.engine.module
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return {
                name: value.detach().cpu().clone() for name, value in module.state_dict().items()
            }

    def placed(self) -> str:
        return "placed by cxl-offload run" if self._scope is None else self._scope.table()


def zero_config(args: argparse.Namespace) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": args.stage,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
    }
    if args.offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        # CPUAdam is this package's: one pass, the same states and checkpoints as DeepSpeedCPUAdam.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


class PlainTrainer:
    """torch on the CPU, the states of its own AdamW moved by ``offload_optimizer``.

    With ``--states`` CPUAdam or CPULion, which keep them in tiers by themselves. Parameters of
    bfloat16 have no master weights: what those optimizers write is rounded at random.
    """

    def __init__(self, args: argparse.Namespace, saving: AbstractContextManager[Any]) -> None:
        dtype = PARAMETERS[args.parameters]
        self.model = OPTForCausalLM(model_config(args)).to(dtype)
        node = cxl_offload.memory.current_session().machine.initiator
        policy = parse_request(args.placement or f"preferred:{node}")
        if isinstance(policy, Path):
            raise SystemExit(
                f"--placement {policy}: a plan places what DeepSpeed keeps; install it"
            )
        settings = {"lr": args.lr, "weight_decay": 0.01}
        self._optimizer: torch.optim.Optimizer
        if args.states or args.optimizer == "lion":
            self._optimizer = OPTIMIZERS[args.optimizer](
                self.model.parameters(),
                state_dtype=STATES[args.states or "fp32"],
                rounding_seed=None if dtype is torch.float32 else args.seed,
                policy=policy,
                **settings,
            )
        else:
            self._optimizer = torch.optim.AdamW(self.model.parameters(), **settings)
            self._placements = cxl_offload.offload_optimizer(self._optimizer, policy).placements
        self._schedule = schedule(args)(self._optimizer)
        self._saving = saving

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return found

    def step(self, batches: list[torch.Tensor]) -> float:
        self._optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            with self._saving:
                loss = self.loss(batch) / len(batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._schedule.step()
        return total

    def weights(self) -> Weights:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def placed(self) -> str:
        if isinstance(self._optimizer, CPUAdam | CPULion):
            param = next(self.model.parameters())
            held = {
                name: value
                for name, value in self._optimizer.state[param].items()
                if torch.is_tensor(value) and value.numel() > 1
            }
            return "\n".join(
                [f"parameters of {name_of(param)}"]
                + [
                    f"{name} of {name_of(value)}: {cxl_offload.placement_of(value).granted}"
                    for name, value in held.items()
                ]
            )
        nodes: dict[str, dict[int, int]] = {}
        for (_, _, name), place in self._placements().items():
            for node, count in place.granted.items():
                nodes.setdefault(name, {}).setdefault(node, 0)
                nodes[name][node] += count
        return "\n".join(f"{name}: bytes by node {found}" for name, found in nodes.items())
