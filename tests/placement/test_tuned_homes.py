"""What a tuner decides, on real and simulated pages: every decision arrives, contents stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from cxl_offload.memory import Bind
from cxl_offload.tune.homes import TunedHomes
from tests.placement.child import MIB
from tests.placement.rig import Rig

SHARES = (0.5, 1.0, 1 / 11, 0.0)


@dataclass
class Owned:
    """Stands in for a tensor: guests have no torch."""

    block: Any

    def data_ptr(self) -> int:
        return int(self.block.address)


def test_pages_are_where_the_last_decision_said(rig: Rig) -> None:
    np = pytest.importorskip("numpy")
    if len(rig.nodes) < 2:
        pytest.skip("one node has no second tier; the simulated machines and the guests have")
    near, far = rig.nodes[0], rig.nodes[-1]
    blocks = [rig.session.allocate(nbytes, Bind((near,))) for nbytes in (MIB, 3 * MIB, 2 * MIB)]
    views = [np.from_dlpack(block).view(np.uint32) for block in blocks]
    for view in views:
        view[:] = np.arange(view.size, dtype=np.uint32)
    owned: Any = {str(at): Owned(block) for at, block in enumerate(blocks)}
    homes = TunedHomes(owned, near=[near], far=[far], session=rig.session)
    for share in SHARES:
        homes.aim(share)
        while homes.pending_bytes:
            assert homes.advance(MIB).refused is None
        pages = [node for block in blocks for node in rig.page_nodes(block.address, block.nbytes)]
        assert pages.count(far) / len(pages) == pytest.approx(share, abs=0.03)
        assert homes.granted() == pytest.approx(pages.count(far) / len(pages))
        assert homes.share == pytest.approx(homes.granted())
        assert all((view == np.arange(view.size, dtype=np.uint32)).all() for view in views)
