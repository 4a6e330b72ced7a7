"""The accelerator of a block: what it refuses, how it is opened, and what a model does there."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.transformers.compute_device import CudaModelCopies, free_bytes
from cxl_offload.integrations.transformers.layer_shares import LayerShares
from cxl_offload.integrations.transformers.on_accelerator import (
    WeightHomes,
    check_room,
    check_streamable,
    compute_on,
)
from cxl_offload.integrations.transformers.state_sizes import least_states
from cxl_offload.integrations.transformers.streamed_states import (
    StateCopies,
    StateStream,
)
from cxl_offload.integrations.transformers.streamed_weights import WeightStream
from cxl_offload.integrations.transformers.watched_copies import Told, WatchedCopies
from cxl_offload.memory import Session
from cxl_offload.objects.kind_store import TierStore
from cxl_offload.plan.equations.row_states import STATES


class Streams(NamedTuple):
    """What layers on an accelerator are given; no states: these stay there."""

    weights: WeightStream
    states: StateStream | None


class ModelDevice:
    """The accelerator of a block: what it refuses, and how it is opened.

    Parameters
    ----------
    device
        With its number.
    session
        Has what lies in tiers.
    shares
        Of the layers that stay on the accelerator, by kind of weight.

    Attributes
    ----------
    device
        As given.
    told
        Called for every copy of the next block; None: nobody is told.
    """

    def __init__(
        self, device: torch.device, session: Session, shares: LayerShares | None = None
    ) -> None:
        self.device = device
        self._session = session
        self._shares = shares or LayerShares()
        self.told: Told | None = None

    @staticmethod
    def refuse(*, tune: object = None, near_expert_bytes: int = 0, prefixes: object = None) -> None:
        """Refuse what moves weights that are pinned, or keeps what an accelerator computes.

        Raises
        ------
        ConfigError
            Names it.
        """
        asked = {"tune": tune, "near_expert_bytes": near_expert_bytes, "prefixes": prefixes}
        for name, given in asked.items():
            if given:
                raise ConfigError(
                    f"{name} is for models that compute on the CPU; leave it or accelerator out"
                )

    def __str__(self) -> str:
        return str(self.device)

    def free_bytes(self) -> int:
        """What the device has left for this process."""
        return free_bytes(self.device)

    def open(self, most_unfinished: int) -> StateCopies:
        """Copies to the device; to be closed."""
        return CudaModelCopies(self.device, self._session, most_unfinished=most_unfinished)

    def check(
        self, model: PreTrainedModel, kinds: Collection[str], rows_at_once: int | None
    ) -> None:
        """As :func:`check_streamable`, with the buffers that the shortest pass has."""
        staying = self._shares.names(model)
        buffers = least_states(rows_at_once).buffers_bytes(model, kinds)
        check_streamable(model, kinds, self.device, self.free_bytes(), staying, buffers)

    def check_room(
        self,
        model: PreTrainedModel,
        kinds: Collection[str],
        *,
        kv_bytes: int = 0,
        state_bytes: int = 0,
    ) -> None:
        """As :func:`check_room`, of a model that may be without its weights."""
        homes = WeightHomes.of(model, kinds, self._shares.names(model))
        check_room(
            type(model).__name__,
            homes,
            self.device,
            self.free_bytes(),
            kv_bytes=kv_bytes,
            state_bytes=state_bytes,
        )

    def take(
        self,
        model: PreTrainedModel,
        store: TierStore,
        rows_at_once: int | None,
        stack: contextlib.ExitStack,
    ) -> Streams:
        """As :func:`compute_on`, with copies that are closed before what they copied goes.

        Hidden states of rows that are computed in turn are streamed too, where they have a tier.
        """
        homes = WeightHomes.of(model, store.parts, self._shares.names(model))
        copies = self.open(2 * homes.largest_stage_bytes)
        stack.callback(copies.close)
        of_weights, of_states = copies, copies
        if self.told is not None:
            of_weights = WatchedCopies(copies, "weights", self.told)
            of_states = WatchedCopies(copies, "act", self.told)
        states = None
        if rows_at_once is not None and STATES in store.parts:
            states = StateStream(of_states, store, rows_at_once, homes.looked_up)
            stack.callback(states.close)
        return Streams(compute_on(model, homes, of_weights, stack, states), states)
