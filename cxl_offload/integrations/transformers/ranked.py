"""A generation that the ranks of a job divide: each takes rows, or a part of every layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from cxl_offload.errors import ConfigError, CxlOffloadError
from cxl_offload.integrations.transformers.attention import AttentionCalls
from cxl_offload.integrations.transformers.conventions import text_config
from cxl_offload.memory import Session
from cxl_offload.objects.placement_rows import PlacementRow
from cxl_offload.ranks import RankShare

if TYPE_CHECKING:
    from cxl_offload.integrations.transformers.generation import GenerateReport

Divided = Literal["rows", "tensors"]
"""``rows``: every rank has the whole model and some prompts. ``tensors``: all prompts, and its part
of the weights and heads, by transformers' own tensor parallelism."""

DIVIDED: tuple[Divided, ...] = ("rows", "tensors")


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one of ``size`` ranks does of a generation; the default is a process alone.

    Attributes
    ----------
    divided
        What the ranks divide; one rank divides nothing.
    """

    rank: int = 0
    size: int = 1
    divided: Divided = "rows"

    def __post_init__(self) -> None:
        if self.divided not in DIVIDED:
            raise ConfigError(f"ranks divide {self.divided!r}: it is {' or '.join(DIVIDED)}")

    def rows(self, count: int) -> slice:
        """Its rows of so many: each rank the same number, or one more.

        Raises
        ------
        ConfigError
            Fewer rows than ranks.
        """
        if self.divided != "rows":
            return slice(0, count)
        if count < self.size:
            raise ConfigError(
                f"{count} prompts for {self.size} ranks that divide rows; give each a prompt, or "
                "start fewer"
            )
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def distributed(self) -> DistributedConfig | None:
        """How transformers divides the weights."""
        if self.size == 1 or self.divided != "tensors":
            return None
        return DistributedConfig(tp_plan="auto", tp_size=self.size)

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model that transformers does not divide among so many ranks.

        Raises
        ------
        ConfigError
            It has no plan for that, or heads that do not divide.
        """
        if self.distributed() is None:
            return
        name, config = type(model).__name__, text_config(model)
        if not getattr(config, "base_model_tp_plan", None):
            raise ConfigError(
                f"{name} has no tensor parallel plan in transformers; let ranks divide rows"
            )
        heads = config.num_attention_heads
        for count in (heads, getattr(config, "num_key_value_heads", None) or heads):
            if count % self.size:
                raise ConfigError(
                    f"{name} has {count} heads, which {self.size} ranks cannot divide; start as "
                    "many as divide them, or let ranks divide rows"
                )

    def check_alone(self, what: str) -> None:
        """Refuse what only a process alone does; ``what`` begins the sentence.

        Raises
        ------
        ConfigError
            There are several ranks.
        """
        if self.size > 1:
            raise ConfigError(f"{what} by a process alone; leave it out under torchrun")

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """All ranks come to the end of the block, or the error of one is raised on all."""
        if self.size == 1:
            yield
            return
        told: list[tuple[bool, str] | None] = [None] * self.size
        own: Exception | None = None
        try:
            yield
        except (CxlOffloadError, MemoryError, ValueError, OSError) as error:
            own = error
        mine = None if own is None else (isinstance(own, MemoryError), str(own))
        dist.all_gather_object(told, mine)
        for rank, failed in enumerate(told):
            if failed is not None:
                kind = MemoryError if failed[0] else ConfigError
                raise kind(f"rank {rank}: {failed[1]}") from own


def session_of(share: RankShare, most: Mapping[int, int]) -> Session:
    """A session of a rank's share, held to limits of its own besides."""
    held = {node: min(count, most.get(node, count)) for node, count in share.node_bytes.items()}
    return replace(share, node_bytes=held).session()


def gathered(mine: Any, part: RankPart) -> list[Any]:
    """What every rank gives, in order of rank."""
    everybody: list[Any] = [mine] * part.size
    if part.size > 1:
        dist.all_gather_object(everybody, mine)
    return everybody


def joined_rows(parts: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
    """Tokens of all ranks below each other, shorter rows filled up."""
    longest = max(tokens.shape[1] for tokens in parts)
    return torch.cat(
        [
            torch.nn.functional.pad(tokens, (0, longest - tokens.shape[1]), value=fill)
            for tokens in parts
        ]
    )


def joined_calls(parts: Sequence[AttentionCalls]) -> AttentionCalls:
    """Of all ranks together."""
    own: dict[str, int] = {}
    for calls in parts:
        for why, count in calls.own.items():
            own[why] = own.get(why, 0) + count
    return AttentionCalls(
        kernel=sum(calls.kernel for calls in parts),
        joined=sum(calls.joined for calls in parts),
        several=sum(calls.several for calls in parts),
        prompt=sum(calls.prompt for calls in parts),
        accelerator=sum(calls.accelerator for calls in parts),
        own=own,
    )


def joined_placement(parts: Sequence[Sequence[PlacementRow]]) -> tuple[PlacementRow, ...]:
    """Bytes of all ranks of every part of every kind; tiers are those that each rank sees."""
    made: dict[tuple[str, str], PlacementRow] = {}
    for row in (row for rows in parts for row in rows):
        key = row.kind, row.part
        one = made.get(key)
        made[key] = (
            row
            if one is None
            else replace(
                one,
                requested_bytes=one.requested_bytes + row.requested_bytes,
                granted=_added(one.granted, row.granted),
                tiers=_added(one.tiers, row.tiers),
            )
        )
    return tuple(made.values())


def _added(one: Mapping[Any, int], other: Mapping[Any, int]) -> dict[Any, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in (*one, *other)}


def report_of_all(mine: GenerateReport, part: RankPart, fill: int) -> GenerateReport:
    """One report of all ranks; seconds are those of the slowest, and no plan predicted them."""
    if part.size == 1:
        return mine
    reports: list[GenerateReport] = gathered(mine, part)
    tokens, answers = mine.tokens, mine.answers
    last = max(reports, key=lambda each: each.load_seconds)
    if part.divided == "rows":
        tokens = joined_rows([each.tokens for each in reports], fill)
        answers = tuple(text for each in reports for text in each.answers)
    return replace(
        mine,
        ranks=part.size,
        tokens=tokens,
        answers=answers,
        gen_len=tokens.shape[1] - mine.prompt_len,
        load_seconds=last.load_seconds,
        load_parts=last.load_parts,
        prefill_seconds=max(each.prefill_seconds for each in reports),
        decode_seconds=max(each.decode_seconds for each in reports),
        placement=joined_placement([each.placement for each in reports]),
        placement_notes=tuple(dict.fromkeys(n for each in reports for n in each.placement_notes)),
        speed_notes=next((each.speed_notes for each in reports if each.speed_notes), ()),
        calls=joined_calls([each.calls for each in reports]),
        predicted_tokens_per_s=None,
    )
