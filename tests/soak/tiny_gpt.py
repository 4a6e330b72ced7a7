"""A small GPT, and its training by one optimizer or another: in ordinary memory, or in tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import cxl_offload
from cxl_offload.memory import Policy
from cxl_offload.ops.adam import CPUAdam

from .beside import REFUSED, again

WORDS, WIDTH, HEADS, LENGTH = 61, 48, 3, 24
OPTIMIZERS = ("torch", "float32", "bf16 copies", "8 bits")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        heads = self.qkv(self.norm(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = heads[0] @ heads[1].mT / 4
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        seen = scores.masked_fill(later, -torch.inf).softmax(-1) @ heads[2]
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        gated: torch.Tensor = self.down(nn.functional.gelu(self.up(self.last(x))))
        return x + gated


class TinyGpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Mean loss of the next tokens."""
        given, follow = ids[:, :-1], ids[:, 1:]
        x = self.words(given) + self.places(torch.arange(given.shape[1]))
        said = self.head(self.blocks(x))
        return nn.functional.cross_entropy(said.flatten(0, 1), follow.flatten())


class PlainAdam(CPUAdam):
    """The oracle's: its states are in torch's own memory."""

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self.state_dtype)


class Training:
    """A model, its optimizer and what belongs to them, in ordinary memory."""

    def __init__(self, optimizer: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = TinyGpt()
        self.params = list(self.model.parameters())
        self.optimizer = self._optimizer(optimizer)
        self.copies: dict[torch.Tensor, torch.Tensor] = {}
        if optimizer == "bf16 copies":
            self.copies = {param: self.placed(param.detach().bfloat16()) for param in self.params}
        for param in self.params:
            param.grad = self.placed(torch.zeros_like(param))

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        if name == "torch":
            return torch.optim.AdamW(self.params, lr=0.01, foreach=False)
        dtype = torch.uint8 if name == "8 bits" else torch.float32
        return self.adam()(self.params, lr=0.01, state_dtype=dtype, **self.adam_options())

    def adam(self) -> type[CPUAdam]:
        return PlainAdam

    def adam_options(self) -> dict[str, Any]:
        return {}

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def saving(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def attempt(self, operation: Callable[[], Any]) -> Any:
        return operation()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with self.saving():
            loss: torch.Tensor = self.model(ids)
        return loss

    def step(self, ids: torch.Tensor) -> float:
        loss = self.attempt(lambda: self.forward(ids))
        loss.backward()
        self.update()
        self.optimizer.zero_grad(set_to_none=False)
        return float(loss.detach())

    def update(self) -> None:
        options = {"low_precision_copies": self.copies} if self.copies else {}
        self.attempt(lambda: self.optimizer.step(**options))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every value that training changes, by name."""
        found = {f"param.{at}": param.detach() for at, param in enumerate(self.params)}
        for at, param in enumerate(self.params):
            states = self.optimizer.state.get(param, {})
            found |= {f"state.{at}.{name}": each for name, each in states.items()}
            if param in self.copies:
                found[f"copy.{at}"] = self.copies[param]
        return found

    def read(self, saved: dict[str, torch.Tensor]) -> None:
        """Goes on from a checkpoint of ``tensors()``."""
        states: dict[int, dict[str, torch.Tensor]] = {at: {} for at in range(len(self.params))}
        for key, value in saved.items():
            kind, at, *name = key.split(".", 2)
            if kind == "param":
                self.params[int(at)].data.copy_(value)
            elif kind == "copy":
                self.copies[self.params[int(at)]].copy_(value)
            else:
                states[int(at)][name[0]] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.load({"state": states, "param_groups": groups})

    def load(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


class TieredTraining(Training):
    """The same with states, gradients and activations where policies say.

    Every call that a fault or a full node refuses is made again.
    """

    def __init__(
        self, optimizer: str, seed: int, policies: dict[str, Policy], counts: Counter[str]
    ) -> None:
        self.policies = policies
        self.counts = counts
        self._activations = cxl_offload.offload_activations(
            policies["activations"], min_bytes=1, prefetch=seed % 3, pages="base"
        )
        super().__init__(optimizer, seed)
        self._states = (
            cxl_offload.offload_optimizer(self.optimizer, policies["states"], pages="base")
            if optimizer == "torch"
            else None
        )

    def adam(self) -> type[CPUAdam]:
        return CPUAdam

    def adam_options(self) -> dict[str, Any]:
        return {"policy": self.policies["states"], "pages": "base"}

    def placed(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self.attempt(
            lambda: cxl_offload.from_tensor(tensor, policy=self.policies["gradients"])
        )
        assert isinstance(made, torch.Tensor)
        return made

    def saving(self) -> AbstractContextManager[Any]:
        return self._activations

    def attempt(self, operation: Callable[[], Any]) -> Any:
        return again(operation, self.counts)

    def update(self) -> None:
        if self._states is None:
            super().update()
            return
        self._swept(self.optimizer.step)

    def load(self, state: dict[str, Any]) -> None:
        if self._states is None:
            self.attempt(lambda: self.optimizer.load_state_dict(state))
            return
        self._swept(lambda: self.optimizer.load_state_dict(state))

    def _swept(self, change: Callable[[], Any]) -> None:
        """What torch's optimizer has done stays done where its states then find no room."""
        assert self._states is not None
        try:
            change()
        except REFUSED as error:
            self.counts[type(error).__name__] += 1
            self.attempt(self._states.sweep)

    def movable(self) -> list[torch.Tensor]:
        """What lies in tiers at the moment."""
        grads = [param.grad for param in self.params if param.grad is not None]
        kept = [each for key, each in self.tensors().items() if not key.startswith("param.")]
        return [each for each in (*grads, *kept) if each.dim() > 0]
