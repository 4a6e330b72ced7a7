"""What a run did: tokens, measured speed, and every byte requested against granted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from flexgen.opt_config import OptConfig

from cxl_offload.integrations.flexgen.places import FlexGenKind
from cxl_offload.integrations.flexgen.shares import ShareRow
from cxl_offload.integrations.run_report import RunReport
from cxl_offload.renamed import old_names
from cxl_offload.sim.trace import Trace

__getattr__ = old_names(__name__)

BYPASSES = (
    "transposed copies of K and V, scores and masks inside CPU attention: PyTorch's own memory",
    "one weight at a time while it is read from its file: numpy's own memory",
    "compressed tensors while they are packed or unpacked on the accelerator: PyTorch's own memory",
)
"""Host memory of a run that no policy places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexGenReport(RunReport):
    """Result of :func:`cxl_offload.integrations.flexgen.run`.

    Attributes
    ----------
    tokens
        int32.
    accelerator
        ``cuda`` or ``host``; with ``host`` every figure is of a CPU in a GPU's place.
    config
        Of the model.
    projected
        Whether the seconds of decoding are projected from fewer tokens.
    shares
        Requested against realised percentages.
    outside
        Bytes of weights and KV cache whose home is the accelerator or the disk, by home and kind.
    trace
        Events for replay; empty when the request did not record.
    notes
        What the reader of these figures should know besides.
    """

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    accelerator: Literal["cuda", "host"]
    config: OptConfig
    projected: bool
    shares: tuple[ShareRow, ...]
    outside: Mapping[str, Mapping[FlexGenKind, int]]
    trace: Trace
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Everything but the trace. ``role`` is the old name of ``kind`` in a row's placement and
        goes with the next version.
        """
        made = super(FlexGenReport, self).to_json()
        made["measured"]["decode_projected"] = self.projected
        made["placement"] = [{**row, "role": row["kind"]} for row in made["placement"]]
        return {
            **made,
            "accelerator": self.accelerator,
            "shares": [
                {
                    "kind": row.kind,
                    "home": row.home,
                    "requested_percent": row.requested_percent,
                    "realised_percent": row.realised_percent,
                }
                for row in self.shares
            ],
            "outside": {home: dict(kinds) for home, kinds in self.outside.items()},
            "notes": list(self.notes),
        }
