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


def test_answers_of_a_workload_are_the_same_bits_while_a_tuner_moves_it(rig: Rig) -> None:
    np = pytest.importorskip("numpy")
    from cxl_offload.tune import ModelTuner, StepTuner, TierRatios

    if len(rig.nodes) < 2:
        pytest.skip("one node has no second tier; the simulated machines and the guests have")
    near, far = rig.nodes[0], rig.nodes[-1]
    blocks = [rig.session.allocate(MIB, Bind((far,))) for _ in range(4)]
    views = [np.from_dlpack(block).view(np.float32) for block in blocks]
    alone = []
    for number, view in enumerate(views):
        view[:] = np.linspace(number, number + 1, view.size, dtype=np.float32)
        alone.append(view.copy())
    owned: Any = {str(at): Owned(block) for at, block in enumerate(blocks)}
    homes = TunedHomes(owned, near=[near], far=[far], session=rig.session)
    model = ModelTuner(TierRatios(0.3, 2.2), start=1.0)
    tuner = StepTuner(homes, model, budget_bytes_per_step=MIB // 2, steps=4, warm_up=1)
    moves = 0
    for step in range(60):
        for one in (*views, *alone):
            one *= np.float32(0.99)
            one += np.float32(0.01) * np.sqrt(np.abs(one))
        was_moving = tuner.is_moving
        tuner.step(1.0 + 2.0 * homes.share + 0.001 * (step % 3))  # the far tier is slow
        moves += was_moving
        pages = [node for block in blocks for node in rig.page_nodes(block.address, block.nbytes)]
        if was_moving and not tuner.is_moving:
            assert pages.count(far) / len(pages) == pytest.approx(model.share, abs=0.03)
    assert moves > 0
    assert model.share < 1.0
    assert set(pages) <= {near, far}
    for view, expected in zip(views, alone, strict=True):
        assert view.tobytes() == expected.tobytes()
