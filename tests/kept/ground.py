"""What the tests of kept blocks share: blocks that their keys determine, and writers that die."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

from cxl_offload.kept import KeptBlocks, KeptLayout, KeptStore

LAYOUT = KeptLayout(block_bytes=1536, slots=8)
FACTS = {"model": "tiny", "dtype": "bfloat16"}
KEYS = 24


def key_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest() + number.to_bytes(4, "big")


def block_of(key: bytes, layout: KeptLayout = LAYOUT) -> bytes:
    """The one right block of a key."""
    return random.Random(key).randbytes(layout.block_bytes)


def keys_of(seed: int, count: int = 60) -> list[bytes]:
    """Keys in the order that a life writes them; some come again."""
    numbers = random.Random(f"keys {seed}")
    return [key_of(numbers.randrange(KEYS)) for _ in range(count)]


def after(there: Iterable[bytes], written: Iterable[bytes], slots: int) -> list[bytes]:
    """An independent model of the store: which keys it holds, the longest unused first."""
    model: OrderedDict[bytes, None] = OrderedDict.fromkeys(there)
    for key in written:
        model.pop(key, None)
        model[key] = None
        while len(model) > slots:
            model.popitem(last=False)
    return list(model)


class DyingStore(KeptStore):
    """Ends its process by SIGKILL in the middle of a seeded change of the file."""

    writes_left = 0
    numbers = random.Random(0)

    def _write(self, at: int, data: bytes | memoryview) -> None:
        if self.writes_left == 0:
            cut = self.numbers.randrange(len(data) + 1)
            # A copy may begin at either end.
            begin, end = (0, cut) if self.numbers.random() < 0.5 else (cut, len(data))
            super()._write(at + begin, data[begin:end])
            os.kill(os.getpid(), signal.SIGKILL)
        self.writes_left -= 1
        super()._write(at, data)


class TooEarly(KeptBlocks):
    """The protection taken out: entries are there before their blocks."""

    def put(self, key: bytes, data: bytes | memoryview) -> None:
        known = self._there.pop(key, None)
        if known is not None:
            slot = known.slot
        else:
            slot = self._free.pop() if self._free else self._there.popitem(last=False)[1].slot
        self._there[key] = self.store.commit(slot, key)
        self.store.write_block(slot, data)


def live_and_die(path: Path, seed: int, blocks: Callable[[KeptStore], KeptBlocks]) -> int:
    """Writes in a forked process until it is killed; how many writes it had finished."""
    numbers = random.Random(f"death {seed}")
    said, says = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(said)
            DyingStore.writes_left = numbers.randrange(150)
            DyingStore.numbers = numbers
            store = blocks(DyingStore(path, LAYOUT, FACTS))
            for key in keys_of(seed):
                store.put(key, block_of(key))
                os.write(says, b".")
        finally:
            os._exit(1)
    os.close(says)
    done = 0
    while some := os.read(said, 4096):
        done += len(some)
    os.close(said)
    os.waitpid(child, 0)
    return done


def wrong_blocks(store: KeptBlocks) -> list[str]:
    """Keys under which a store gives anything but their block."""
    known = {key_of(number) for number in range(KEYS)}
    faults = []
    for key in store.keys:
        data = store.get(key)
        if key not in known or (data is not None and data != block_of(key)):
            faults.append(key.hex())
    return faults
