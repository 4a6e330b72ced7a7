"""Eviction by cost, the cold tier and the region, by vLLM's interfaces but without an engine."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("vllm")

PAGE = 4096
ROW = 2 * PAGE


def keys_of(*numbers: int) -> list[Any]:
    from vllm.v1.kv_offload.base import make_offload_key

    return [make_offload_key(number.to_bytes(8, "big"), 0) for number in numbers]


def request(name: str = "r") -> Any:
    from vllm.v1.kv_offload.base import ReqContext

    return ReqContext(name)


class Policy:
    """A policy of some capacity, driven as vLLM's manager drives it."""

    def __init__(self, cls: Any, capacity: int) -> None:
        from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

        self._chunk = ChunkStatus
        self.policy = cls(capacity)
        self.capacity = capacity

    def use(self, number: int) -> list[int]:
        """Touches or inserts; gives what was evicted for it."""
        (key,) = keys_of(number)
        if self.policy.get(key) is not None:
            self.policy.touch([key], request())
            return []
        gone: list[int] = []
        if len(self.policy.chunks) == self.capacity:
            gone = [int.from_bytes(each[:8], "big") for each, _ in self.policy.evict(1, {key})]
        chunk = self._chunk(0)
        self.policy.insert(key, chunk)
        chunk.ref_cnt = 0
        self.policy.mark_evictable(key)
        return gone


def test_cost_policy_with_one_cost_is_lru() -> None:
    from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy

    from cxl_offload.integrations.vllm.kv_eviction import CostPolicy

    ours, theirs = Policy(CostPolicy, 8), Policy(LRUCachePolicy, 8)
    ours.policy.cost = lambda key: 0.25
    draw = random.Random(3)
    evictions = 0
    for _ in range(3000):
        number = min(draw.randrange(24), draw.randrange(24))
        gone = ours.use(number)
        assert gone == theirs.use(number)
        evictions += len(gone)
    assert evictions > 500


class GreedyDual:
    """The textbook's: lowers every credit at each eviction, instead of moving a clock."""

    def __init__(self, capacity: int, cost: dict[int, float]) -> None:
        self.capacity, self.cost = capacity, cost
        self.credit: dict[int, float] = {}
        self.age: dict[int, int] = {}
        self.now = 0

    def use(self, number: int) -> list[int]:
        gone = []
        if number not in self.credit and len(self.credit) == self.capacity:
            victim = min(self.credit, key=lambda each: (self.credit[each], self.age[each]))
            least = self.credit.pop(victim)
            self.credit = {each: credit - least for each, credit in self.credit.items()}
            gone = [victim]
        self.now += 1
        self.credit[number], self.age[number] = self.cost[number], self.now
        return gone


def test_cost_policy_evicts_what_the_textbook_evicts() -> None:
    from cxl_offload.integrations.vllm.kv_eviction import CostPolicy

    draw = random.Random(5)
    # Powers of two: sums and differences are exact, so that ties are ties in both.
    cost = {number: draw.choice([0.25, 1.0, 4.0]) for number in range(40)}
    ours, textbook = Policy(CostPolicy, 12), GreedyDual(12, cost)
    ours.policy.cost = lambda key: cost[int.from_bytes(key[:8], "big")]
    for _ in range(3000):
        number = min(draw.randrange(40), draw.randrange(40))
        assert ours.use(number) == textbook.use(number)


def test_chunk_that_the_other_tier_lost_is_kept_longer() -> None:
    from cxl_offload.integrations.vllm.kv_eviction import CostPolicy

    ours = Policy(CostPolicy, 3)
    elsewhere = {1, 2, 3}
    ours.policy.cost = lambda key: 0.1 if int.from_bytes(key[:8], "big") in elsewhere else 1.0
    for number in (1, 2, 3):
        ours.use(number)
    elsewhere.remove(1)
    ours.policy.rank_again(keys_of(1, 77))
    assert ours.use(4) == [2]
    assert ours.use(5) == [3]


def test_protected_and_pinned_chunks_stay() -> None:
    from cxl_offload.integrations.vllm.kv_eviction import CostPolicy

    ours = Policy(CostPolicy, 3)
    for number in (1, 2, 3):
        ours.use(number)
    (one, two, three) = keys_of(1, 2, 3)
    ours.policy.mark_non_evictable(one)
    assert ours.policy.evict(2, {two}) is None
    assert [key for key, _ in ours.policy.evict(1, {two})] == [three]
    ours.policy.mark_evictable(one)
    assert [key for key, _ in ours.policy.evict(2, set())] == [one, two]


class Tier:
    """A cold tier behind a hot one of 8 chunks that are numbered."""

    def __init__(self, *, spec: Any = None, **options: Any) -> None:
        from cxl_offload.integrations.vllm.kv_plugin import register_names
        from cxl_offload.integrations.vllm.kv_tier import ColdTierManager

        register_names()
        self.hot = np.zeros((8, ROW), dtype=np.uint8)
        spec = spec or SimpleNamespace(
            kv_events_config=SimpleNamespace(enable_kv_cache_events=False)
        )
        self.tier = ColdTierManager(
            spec, memoryview(self.hot), "cxl", **({"policy": "bind:0"} | options)
        )
        self.context = request()
        self.tier.on_new_request(self.context)
        self._jobs = 0

    def _job(self, numbers: list[int], chunks: list[int], *, loads: bool) -> Any:
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._jobs += 1
        ids = np.array(chunks, dtype=np.int32)
        return TransferJob(self._jobs, keys_of(*numbers), ids, loads, self.context)

    def store(self, numbers: list[int], chunks: list[int]) -> Any:
        self.tier.submit_store(self._job(numbers, chunks, loads=False))
        return self.finish()

    def load(self, numbers: list[int], chunks: list[int]) -> Any:
        self.tier.submit_load(self._job(numbers, chunks, loads=True))
        return self.finish()

    def finish(self) -> Any:
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        assert result.job_id == self._jobs
        return result

    def finds(self, *numbers: int) -> str:
        return " ".join(self.tier.lookup(key, self.context).name for key in keys_of(*numbers))

    def counted(self) -> dict[str, int]:
        return self.tier.books.tier_counts.totals


def test_chunks_come_back_from_the_cold_tier_as_they_were() -> None:
    cold = Tier(bytes=6 * ROW)
    cold.hot[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    assert cold.store([10, 11, 12], [0, 3, 7]).success
    assert cold.finds(10, 11, 12, 13) == "HIT HIT HIT MISS"
    cold.hot[:] = 0
    result = cold.load([12, 10], [1, 2])
    assert (result.success, result.transfer_bytes) == (True, 2 * ROW)
    assert cold.hot[:, 0].tolist() == [0, 8, 1, 0, 0, 0, 0, 0]
    assert (cold.hot == cold.hot[:, :1]).all()
    assert cold.tier.copy_seconds > 0
    assert cold.counted() == {"stored": 3, "loaded": 2, "evicted": 0, "damaged": 0, "refused": 0}
    cold.tier.shutdown()


def test_chunk_whose_memory_failed_is_dropped_and_the_others_are_found(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from cxl_offload.memory import survive_memory_errors
    from tests.memory.failures import lose

    cold = Tier(bytes=6 * ROW)
    cold.hot[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    cold.store([10, 11, 12], [0, 3, 7])
    page = cold.tier.memory.address // 4096 * 4096
    others = [number for at, number in enumerate((10, 11, 12)) if at * ROW >= 4096]
    with survive_memory_errors():  # and the scheduler is not interrupted
        lose(page)
        result = cold.load([10, 11, 12], [0, 1, 2])
        assert not result.success
        assert result.successful_keys is None
        assert cold.finds(10) == "MISS"
        assert all(cold.finds(number) == "HIT" for number in others)
        assert cold.counted()["damaged"] == 3 - len(others)
        assert "of the cold KV tier on node 0" in caplog.text
        cold.hot[:] = 9
        assert cold.store([10, 11, 12], [0, 1, 2]).success
        cold.hot[:] = 0
        assert cold.load([10], [5]).success
        assert (cold.hot[5] == 9).all()
    cold.tier.shutdown()


def test_full_cold_tier_evicts_the_oldest_and_says_so() -> None:
    cold = Tier(bytes=4 * ROW)
    for number in range(4):
        cold.store([number], [number])
    cold.tier.touch(keys_of(0), cold.context)
    cold.store([4, 5], [4, 5])
    assert cold.finds(0, 1, 2, 3, 4, 5) == "HIT MISS MISS HIT HIT HIT"
    assert cold.counted() == {"stored": 6, "loaded": 0, "evicted": 2, "damaged": 0, "refused": 0}
    # More than the tier holds: the beginning of the prefix is kept.
    assert cold.store([20, 21, 22, 23, 24, 25], [0, 1, 2, 3, 4, 5]).success
    assert cold.finds(20, 21, 22, 23, 24, 25) == "HIT HIT HIT HIT MISS MISS"
    assert cold.counted()["refused"] == 2
    cold.tier.shutdown()


def test_chunk_evicted_since_its_lookup_is_reported_as_not_loaded() -> None:
    cold = Tier(bytes=2 * ROW)
    cold.store([1, 2], [0, 1])
    cold.store([3], [2])
    assert cold.finds(1, 2, 3).count("MISS") == 1
    gone, kept = (1, 2) if cold.finds(1) == "MISS" else (2, 1)
    result = cold.load([gone, kept], [4, 5])
    assert not result.success
    assert list(result.successful_keys) == keys_of(kept)
    assert not cold.load([gone], [4]).success
    cold.tier.shutdown()


def test_stores_beyond_the_pending_bytes_are_refused_without_waiting() -> None:
    cold = Tier(bytes=8 * ROW, pending_bytes=2 * ROW)
    import threading

    gate = threading.Event()
    queue = cold.tier._copies
    queue.submit(-1, lambda: gate.wait(20) and None)  # holds the thread; then fails
    cold.tier.submit_store(cold._job([1, 2, 3], [0, 1, 2], loads=False))
    cold.tier.submit_store(cold._job([4], [3], loads=False))
    assert cold.counted()["refused"] == 2
    assert cold.finds(1, 2, 3, 4) == "RETRY RETRY MISS MISS"
    (refused,) = cold.tier.get_finished_jobs()
    assert refused.success, "vLLM lets go of the chunks of the hot tier"
    gate.set()
    cold.tier.drain_jobs()
    finished = {each.id: each for each in queue.finished()}
    assert finished[-1].failure is not None
    assert finished[1].failure is None
    cold.tier.shutdown()


def test_failed_copy_leaves_no_chunk_that_could_be_read() -> None:
    cold = Tier(bytes=4 * ROW)
    good = cold.tier._slots
    cold.tier._slots = lambda ids: good(ids)[:0]
    result = cold.store([1, 2], [0, 1])
    assert not result.success
    assert cold.finds(1, 2) == "MISS MISS"
    cold.tier._slots = good
    assert cold.store([1, 2], [0, 1]).success
    cold.tier._chunks = lambda ids: good(ids)[:0]
    result = cold.load([1, 2], [0, 1])
    assert not result.success
    assert result.successful_keys is None
    cold.tier.forget()
    assert cold.finds(1, 2) == "MISS MISS"
    cold.tier.shutdown()


def test_region_of_ours_has_what_a_region_of_vllm_has() -> None:
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    from cxl_offload.integrations.vllm.kv_region import PlacedRegion
    from cxl_offload.memory import SharedRegion

    sizes = {"num_chunks": 4, "rank": 1, "kv_bytes_per_chunk": ROW, "cpu_page_size": PAGE}
    stock = SharedOffloadRegion(f"cxl-test-{uuid4().hex}", **sizes)
    ours = PlacedRegion(SharedRegion(f"test-{uuid4().hex}", 4 * ROW, "bind:0"), **sizes)
    try:
        assert set(vars(stock)) == set(vars(ours)) - {"region"}
        for region in (stock, ours):
            first = region.create_next_worker_view(PAGE // 4)
            second = region.create_next_worker_view(PAGE * 3 // 4)
            assert first.stride() == second.stride() == (ROW, 1)
            assert first.data_ptr() - region._base.data_ptr() == PAGE
            assert second.data_ptr() - first.data_ptr() == PAGE // 4
            with pytest.raises(AssertionError, match="exceeds worker area"):
                region.create_next_worker_view(1)
            view = region.create_kv_memoryview()
            assert view.shape == (4, ROW)
            view.release()
            del first, second
    finally:
        stock.cleanup()
        path = ours.region.path
        ours.cleanup()
    assert not path.exists()
    assert ours.region.file == -1
