"""What is asked of kept prefixes, and what is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from cxl_offload.errors import ConfigError
from cxl_offload.kept import Placing, kept_folder, kept_path, takes_policy, why_not_placed
from cxl_offload.memory import Dax, Pages, Policy, PolicyLike, Session, known_policy
from cxl_offload.units import whole_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPrefixes:
    """Where the KV of prompts' beginnings is kept; the names are those of vLLM's cold tier.

    Parameters
    ----------
    bytes
        Of all blocks together, as a number or ``"8GiB"``. A store of another size is not taken
        over.
    policy
        Where the pages are; None: where ``kv`` is. A folder on a disk places them itself.
    pages
        ``"base"`` or ``"thp"``.
    persist
        A name: what is kept outlives the process, and the next one with this name, this model and
        these options finds it. ``/dev/daxX.Y``: it lies on that Device-DAX device, without a file.
        None: it ends with the ``with`` block.
    persist_folder
        Where the file is; None: ``/dev/shm``.
    block_tokens
        Tokens of a block; of a prompt whole blocks are kept.

    Raises
    ------
    ConfigError
        In one line: an option that cannot be.
    """

    bytes: int | str
    policy: PolicyLike | None = None
    pages: Pages = "base"
    persist: str | None = None
    persist_folder: str | Path | None = None
    block_tokens: int = 16

    def __post_init__(self) -> None:
        if self.persist_folder is not None and self.persist is None:
            raise ConfigError("prefixes: persist_folder does nothing without persist")
        tokens = self.block_tokens
        is_whole = isinstance(tokens, int) and not isinstance(tokens, bool)
        if not is_whole or not 1 <= tokens <= 1 << 16:
            raise ConfigError(f"prefixes: block_tokens {tokens!r}: a whole number, 1 to 65536")
        if self.pages not in ("base", "thp"):
            raise ConfigError(f"prefixes: pages {self.pages!r}: base or thp")
        self.path  # noqa: B018 - as all of these, so that what is wrong is known at once
        self.nbytes  # noqa: B018

    @property
    def path(self) -> Path:
        """The file, or the device; without a name one of a new name, which goes with the block."""
        given = self.persist_folder
        try:
            folder = kept_folder(given)
        except ValueError as error:
            raise ConfigError(f"prefixes: persist_folder {str(given)!r}: {error}") from None
        try:
            return kept_path(
                f"unnamed-{uuid4().hex}" if self.persist is None else self.persist, folder
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"prefixes: persist: {error}") from None

    @property
    def nbytes(self) -> int:
        """``bytes`` as a number."""
        try:
            given = whole_bytes(self.bytes)
        except ValueError as error:
            raise ConfigError(f"prefixes: bytes {self.bytes!r}: {error}") from None
        if given < 1:
            raise ConfigError(f"prefixes: bytes {self.bytes!r}: at least a block")
        return given

    def placing(self, session: Session, kv: Policy) -> Placing | None:
        """What gives the store its pages; None: its file system does.

        Raises
        ------
        ConfigError
            A policy that cannot be, or one for a folder that is not in memory.
        """
        path = self.path
        is_placed = takes_policy(path)
        if not is_placed and self.policy is not None:
            raise ConfigError(
                f"prefixes: policy {self.policy}: {why_not_placed(path)}; leave it out"
            )
        try:
            chosen = kv if self.policy is None else self.policy
            policy = known_policy(chosen, session.machine, "a kept prefix")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"prefixes: policy: {error}") from None
        if isinstance(policy, Dax) and is_placed:
            raise ConfigError(
                f"prefixes: policy {policy} is no memory of a file; name nodes, or persist on a "
                "Device-DAX device of its own: '/dev/daxX.Y'"
            )
        if session.is_simulated or not is_placed:
            return None
        return Placing(session, policy, self.pages)


@dataclass(slots=True)
class PrefixCounts:
    """What was found and kept since the block began.

    Attributes
    ----------
    prompt_tokens
        Of all prompts of ``generate()``, padding not counted; a prompt counts once for every beam.
    found_tokens
        Those of them whose KV was read and not computed.
    kept_blocks
        Blocks that were written.
    damaged_blocks
        Blocks that were found damaged, dropped, and computed again.
    computed
        Calls that used no store, by the reason.
    """

    prompt_tokens: int = 0
    found_tokens: int = 0
    kept_blocks: int = 0
    damaged_blocks: int = 0
    computed: Counter[str] = field(default_factory=Counter)

    @property
    def hit_rate(self) -> float:
        """Found tokens of all; 0 where there were none."""
        return self.found_tokens / max(1, self.prompt_tokens)

    def to_json(self) -> dict[str, Any]:
        """All of it, ready for ``json.dumps``."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "found_tokens": self.found_tokens,
            "hit_rate": self.hit_rate,
            "kept_blocks": self.kept_blocks,
            "damaged_blocks": self.damaged_blocks,
            "computed": dict(self.computed),
        }
