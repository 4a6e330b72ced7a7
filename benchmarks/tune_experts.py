"""Experts of a tiny Mixtral: what its tokens ask for, and what keeping the most used near gains.

The requests are *measured*: a Mixtral with random weights computes on this machine's CPU, and what
its routers choose is counted. Its router rows lean towards some experts, so that requests are
spread as in Zipf's law. The times are *simulated*: bytes over the bandwidths of published machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cxl_offload import zeros
from cxl_offload.memory import Session
from cxl_offload.topology import load_machine
from cxl_offload.tune import MostUsedParts, Slice

LAYERS, EXPERTS, ASKED = 4, 16, 2
NEAR_PART = 4
"""One of so many experts is near."""

HIDDEN = 64
PART_BYTES = 64 << 10
"""Of an expert in the replay; times scale with it, shares of traffic do not depend on it."""


def zipf_mixtral(exponent: float, seed: int) -> Any:
    """A Mixtral with random weights whose routers prefer experts as Zipf's law does.

    All embeddings share a direction that stays in the hidden states, and every row of a router
    leans along it by the logarithm of its expert's popularity. Every layer has an order of its own.
    """
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=512, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=EXPERTS,
        num_experts_per_tok=ASKED, max_position_embeddings=1024,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    direction = torch.randn(HIDDEN).sign()
    wanted = -exponent * torch.log(torch.arange(1, EXPERTS + 1, dtype=torch.float32))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.randn(512, HIDDEN) + direction)
        for layer in model.model.layers:
            popularity = (wanted - wanted.mean())[torch.randperm(EXPERTS)]
            rows = torch.randn(EXPERTS, HIDDEN) * (2 / HIDDEN) ** 0.5
            layer.mlp.gate.weight.copy_(rows + popularity[:, None] * direction * 2**0.5 / HIDDEN)
    return model


def measured_requests(model: Any, tokens: int, seed: int) -> NDArray[np.float64]:
    """What random tokens ask for, one after another: float64 ``(tokens, layers * experts)``."""
    import torch

    chosen: list[list[Any]] = [[] for _ in range(LAYERS)]

    def listen(at: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            chosen[at].append(args[1].clone())

        return hook

    hooks = [
        layer.mlp.experts.register_forward_pre_hook(listen(at))
        for at, layer in enumerate(model.model.layers)
    ]
    length = 512
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _ in range(-(-tokens // length)):
            model(torch.randint(0, 512, (1, length), generator=draw), use_cache=False)
    torch.set_num_threads(threads)
    for hook in hooks:
        hook.remove()
    asked = np.zeros((tokens, LAYERS * EXPERTS))
    for at, parts in enumerate(chosen):
        index = torch.cat(parts)[:tokens].numpy()
        asked[np.arange(tokens)[:, None], at * EXPERTS + index] = 1.0
    return asked


@dataclass(frozen=True)
class ExpertReads:
    """Parts that were read near and far, of a run over the same requests.

    Attributes
    ----------
    near, far
        Parts read on each tier, of the later half of the run.
    moved
        Parts moved in that half.
    moved_of_all
        Bytes moved over bytes read, of the whole run.
    """

    near: float
    far: float
    moved: float = 0.0
    moved_of_all: float = 0.0

    def seconds(self, near_rate: float, far_rate: float) -> float:
        """Time of the reads, and of the moves at the rate of the slower tier."""
        slower = min(near_rate, far_rate)
        return self.near / near_rate + self.far / far_rate + self.moved / slower


def run_most_used(asked: NDArray[np.float64]) -> ExpertReads:
    """The requests replayed on simulated pages, experts moving as they are asked for.

    Which experts move does not depend on the machine, only what that gains does.
    """
    import torch

    near, far = 0, 2
    session = Session.simulated(load_machine("epyc9354-cxl-a"))
    tokens, parts = asked.shape
    stack = zeros((parts, PART_BYTES), dtype=torch.uint8, policy=f"bind:{far}", session=session)
    ours = MostUsedParts(
        {str(at): [Slice(stack[at].data_ptr(), PART_BYTES)] for at in range(parts)},
        near=[near], far=[far], room_bytes=parts // NEAR_PART * PART_BYTES, session=session,
        budget_bytes_per_round=4 * PART_BYTES,
    )  # fmt: skip
    half = (0, 0, 0)
    for token in range(tokens):
        if token == tokens // 2:
            half = (ours.asked_bytes, ours.near_bytes, ours.moved_bytes)
        ours.round(asked[token])
    if ours.granted() != ours.most_used.near:
        raise AssertionError("experts are not where the last decision said")
    read, hits, moved = (
        (end - begin) / PART_BYTES
        for end, begin in zip(
            (ours.asked_bytes, ours.near_bytes, ours.moved_bytes), half, strict=True
        )
    )
    return ExpertReads(hits, read - hits, moved, ours.moved_bytes / ours.asked_bytes)


def fixed(asked: NDArray[np.float64], chosen: NDArray[np.intp]) -> ExpertReads:
    """The same half of the requests with these parts near all the time."""
    later = asked[len(asked) // 2 :]
    hits = float(later[:, chosen].sum())
    return ExpertReads(hits, float(later.sum()) - hits)


def peers(asked: NDArray[np.float64], seed: int) -> dict[str, ExpertReads]:
    """What moving is compared with; the oracle knows how often each expert will have been asked."""
    parts = asked.shape[1]
    room = parts // NEAR_PART
    order = np.argsort(-asked.sum(axis=0), kind="stable")
    drawn = np.random.default_rng(seed).permutation(parts)
    return {
        "oracle": fixed(asked, order[:room]),
        "first experts near": fixed(asked, np.arange(room)),
        "random experts near": fixed(asked, drawn[:room]),
        "all far": fixed(asked, np.arange(0)),
    }
