"""The load of bench_vllm_kv.py: conversations of several turns over a shared prefix, by HTTP.

Prompts are token ids, the same for every server, whatever it answers: the turns of the other side
are part of the load. So all servers do the same work and their answers can be compared.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

FIRST_WORD, WORDS = 3, 512
"""Ids of the model's words; those before are special."""


@dataclass(frozen=True)
class Load:
    """What is asked.

    Attributes
    ----------
    conversations
        Each with a text of its own of ``document`` tokens after the ``shared`` ones.
    turns
        Each adds ``message`` tokens of the user and ``answer`` of the other side.
    generate
        Tokens that are generated for a turn.
    clients
        Requests under way at once. All conversations have their first turn, then all their second.
    """

    conversations: int
    turns: int
    shared: int
    document: int
    message: int
    answer: int
    generate: int
    clients: int

    @property
    def longest_prompt(self) -> int:
        per_turn = self.message + self.answer
        return self.shared + self.document + self.turns * per_turn - self.answer

    @property
    def prompt_tokens(self) -> int:
        """Of all requests together."""
        turn = self.message + self.answer
        first = self.shared + self.document + self.message
        return self.conversations * sum(first + at * turn for at in range(self.turns))

    @property
    def reusable_tokens(self) -> int:
        """Of the prompts, those that an endless cache would have had."""
        return self.prompt_tokens - self.working_set_tokens

    @property
    def working_set_tokens(self) -> int:
        """Different tokens in all prompts: what a cache would have to hold."""
        return self.shared + self.conversations * (self.longest_prompt - self.shared)

    def describe(self) -> dict[str, Any]:
        return asdict(self) | {
            "longest_prompt": self.longest_prompt,
            "prompt_tokens": self.prompt_tokens,
            "reusable_share": self.reusable_tokens / self.prompt_tokens,
            "working_set_tokens": self.working_set_tokens,
        }

    def rounds(self, seed: int) -> list[list[list[int]]]:
        """Prompts by turn and conversation; another seed has no token sequence in common."""
        words = np.random.default_rng(seed)

        def text(tokens: int) -> list[int]:
            return [int(word) for word in words.integers(FIRST_WORD, WORDS, tokens)]

        shared = text(self.shared)
        history = [shared + text(self.document) for _ in range(self.conversations)]
        made = []
        for _ in range(self.turns):
            history = [each + text(self.message) for each in history]
            made.append([list(each) for each in history])
            history = [each + text(self.answer) for each in history]
        return made


@dataclass(frozen=True)
class Answered:
    """One request: when its first token and its last came, and all tokens."""

    first_token_s: float
    total_s: float
    tokens: tuple[int, ...]


def ask(port: int, prompt: Sequence[int], generate: int, timeout_s: float) -> Answered:
    """One streamed completion.

    Raises
    ------
    RuntimeError
        The server refused, or gave another number of tokens.
    """
    body = {
        "model": "bench",
        "prompt": list(prompt),
        "max_tokens": generate,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    begin, first = time.perf_counter(), 0.0
    tokens: list[int] = []
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.read(500)!r}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line[len(b"data: ") :]).get("choices") or [{}]
            new = choices[0].get("token_ids") or []
            if new and not tokens:
                first = time.perf_counter() - begin
            tokens += new
    finally:
        connection.close()
    if len(tokens) != generate:
        raise RuntimeError(f"{len(tokens)} tokens came, {generate} were asked for")
    return Answered(first, time.perf_counter() - begin, tuple(tokens))


@dataclass(frozen=True)
class LoadRun:
    """One run of a load on one server."""

    seconds: float
    answers: tuple[Answered, ...]

    @property
    def first_token_s(self) -> list[float]:
        return [each.first_token_s for each in self.answers]


def run_load(port: int, load: Load, seed: int, timeout_s: float = 300) -> LoadRun:
    """All requests of a load, by so many clients that each wait for their answer."""
    begin = time.perf_counter()
    answers: list[Answered] = []
    for prompts in load.rounds(seed):
        answers += _together(port, prompts, load, timeout_s)
    return LoadRun(time.perf_counter() - begin, tuple(answers))


def _together(
    port: int, prompts: Sequence[Sequence[int]], load: Load, timeout_s: float
) -> list[Answered]:
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for at in range(len(prompts)):
        todo.put(at)
    found: dict[int, Answered] = {}
    failures: list[BaseException] = []

    def client() -> None:
        while not failures:
            try:
                at = todo.get_nowait()
            except queue.Empty:
                return
            try:
                found[at] = ask(port, prompts[at], load.generate, timeout_s)
            except BaseException as failure:
                failures.append(failure)

    threads = [threading.Thread(target=client) for _ in range(load.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [found[at] for at in range(len(prompts))]
