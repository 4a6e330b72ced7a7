"""The steps of a vLLM server: tokens of the running, and prompts in the same step.

A step copies the weights that are off the GPU, whatever it computes, so a prompt that begins on an
idle server waits for them too. A step takes so many tokens, those of the running first; a longer
prompt is computed in several (chunked prefill), and its first token is there when its last step
ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from cxl_offload.plan.vllm.offload import WeightOffload, copy_seconds_per_step, kv_room_bytes

STEP_TOKENS = 8192
"""Tokens of a step, ``--max-num-batched-tokens``: vLLM's default for a server on a GPU with 70 GiB
or more (``EngineArgs``, version 0.11); plans' commands say it, so that it is the same on every
GPU."""


@dataclass(frozen=True, slots=True)
class PromptWork:
    """What is to be done for a prompt, or for a part of it.

    Attributes
    ----------
    compute_s
        Seconds of the GPU's arithmetic.
    tokens
        That are computed.
    load_s
        Seconds beside it: what is cached crosses the link, and the server handles the request.
    """

    compute_s: float
    tokens: float
    load_s: float = 0.0

    def part(self, tokens: float) -> PromptWork:
        """The work of so many of the tokens."""
        share = tokens / self.tokens
        return PromptWork(self.compute_s * share, tokens, self.load_s * share)

    def beside(self, other: PromptWork) -> PromptWork:
        """Both in one step."""
        return PromptWork(
            self.compute_s + other.compute_s,
            self.tokens + other.tokens,
            self.load_s + other.load_s,
        )


NO_PROMPT = PromptWork(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ServerSteps:
    """Steps of one server.

    Attributes
    ----------
    case
        Of the plan: model, GPU and link.
    offload_bytes
        Weights that every step copies.
    most_tokens
        Of one step.
    """

    case: WeightOffload
    offload_bytes: float
    most_tokens: int = STEP_TOKENS

    @property
    def kv_room_tokens(self) -> float:
        """Tokens whose KV fits on the GPU."""
        return kv_room_bytes(self.case, self.offload_bytes) / self.case.kv_bytes_per_token

    def seconds(self, running: int, kv_tokens: float, prompt: PromptWork = NO_PROMPT) -> float:
        """One step: a token of each of the running, whose KV is so large, and parts of prompts.

        Where nothing is decoded, the GPU reads its weights while it computes the prompt.
        """
        case = self.case
        seconds = copy_seconds_per_step(case, self.offload_bytes) + prompt.load_s
        seconds += (running + prompt.tokens) * case.exchange_seconds_per_token
        if running:
            return seconds + case.gpu_seconds(running, kv_tokens) + prompt.compute_s
        reads = case.read_bytes(prompt.tokens) / case.gpu.memory_bytes_per_s
        return seconds + max(reads, prompt.compute_s) + case.step_s

    def passes(self, prompt: PromptWork) -> int:
        """Steps of a prompt that is alone on the server."""
        return max(1, -int(-prompt.tokens // self.most_tokens))

    def alone(self, prompt: PromptWork) -> float:
        """Seconds to the first token of a request that is alone on the server."""
        return self.beside(0, 0.0, prompt)

    def beside(self, running: int, kv_tokens: float, prompt: PromptWork) -> float:
        """Seconds of all steps of a prompt while others run; every step takes tokens of theirs."""
        room = max(1, self.most_tokens - running)
        whole, rest = divmod(prompt.tokens, room)
        total = rest and self.seconds(running, kv_tokens, prompt.part(rest))
        return total + (whole and whole * self.seconds(running, kv_tokens, prompt.part(room)))
