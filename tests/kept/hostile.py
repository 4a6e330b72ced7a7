"""Files as strangers write them: dropped or refused in one line, or read without a wrong block.

:func:`check_file` takes bytes for decisions: how a sound file is spoilt, and whether its checksums
are made right again afterwards, as only somebody who means harm does. Such a file belongs to the
user who opens it (another's is refused), so it may hold blocks that nobody wrote; it may not hang,
crash, or take a lie about its own size for the truth.
"""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path

import pytest

from cxl_offload.kept import (
    KeptBlocks,
    KeptLayout,
    KeptReader,
    KeptStore,
    drop_kept,
    find_kept,
    kept_path,
    look_at,
    verify_kept,
)
from cxl_offload.kept import layout as form
from tests.kept.devices import bytes_of, fill_device, stand_in

LAYOUT = KeptLayout(block_bytes=100, slots=4)
FACTS = {"model": "tiny"}
_INTERESTING = (0, 1, 2, 127, 255, 1 << 16, (1 << 32) - 1, 1 << 62, (1 << 64) - 1)


def sound_file(path: Path) -> None:
    store = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
    for number in range(3):
        store.put(bytes([number + 1]) * 36, bytes([number]) * LAYOUT.block_bytes)
    store.close()


def spoil(raw: bytearray, data: bytes) -> bytearray:
    """Changes a few places, chosen by the bytes given."""
    numbers = random.Random(data)
    for _ in range(numbers.randint(1, 4)):
        part = numbers.choice(("head", "facts", "entry", "block", "size"))
        at = {
            "head": numbers.randrange(48),
            "facts": 48 + numbers.randrange(64),
            "entry": form.HEADER_BYTES + numbers.randrange(4 * form.ENTRY_BYTES),
            "block": LAYOUT.data_at + numbers.randrange(400),
            "size": 0,
        }[part]
        if part == "size":
            del raw[numbers.randrange(len(raw)) :]
            raw += bytes(numbers.choice((0, 0, 1, 65536)))
        elif numbers.random() < 0.5:
            word = numbers.choice(_INTERESTING).to_bytes(8, "little")
            raw[at : at + 8] = word
        else:
            raw[at : at + 1] = numbers.randbytes(1)
    return raw


def forge(raw: bytearray, numbers: random.Random) -> None:
    """Makes the checksums of the header and of the entries right again."""
    if len(raw) < form.HEADER_BYTES:
        return
    facts = numbers.choice((b"[]", b"[" * 60000, b'{"a": NaN}', b"\xff", b'{"model": "tiny"}', b""))
    if numbers.random() < 0.5:
        raw[12:16] = len(facts).to_bytes(4, "little")
        raw[64 : 64 + len(facts)] = facts
    length = int.from_bytes(raw[12:16], "little")
    raw[48:64] = form.digest(bytes(raw[:48]) + bytes(raw[64 : 64 + length]))
    for slot in range(LAYOUT.slots):
        at = LAYOUT.entry_at(slot)
        body = bytes(raw[at : at + 104])
        if len(body) == 104:
            own = form.digest(bytes(raw[32:48]) + slot.to_bytes(8, "little") + body)
            raw[at + 104 : at + 120] = own


def check_file(data: bytes) -> None:
    """Opens a spoilt file in every way there is."""
    numbers = random.Random(data)
    with tempfile.TemporaryDirectory() as folder:
        path = kept_path("fuzzed", folder)
        sound_file(path)
        raw = spoil(bytearray(path.read_bytes()), data)
        forged = numbers.random() < 0.5
        if forged:
            forge(raw, numbers)
        path.write_bytes(raw)
        assert find_kept(folder) == (look_at(path),)
        _open_everywhere(path, forged, is_store=True)


def check_device(data: bytes) -> None:
    """Opens a spoilt device: as a file, but what has lost its mark is somebody else's."""
    numbers = random.Random(data)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        root = Path(folder)
        path = stand_in(patched, root, size=4 << 20)
        sound_file(path)
        raw = bytearray(bytes_of(root, LAYOUT.file_bytes))
        spoilt = spoil(bytearray(raw), data)[: len(raw)]
        raw[: len(spoilt)] = spoilt
        forged = numbers.random() < 0.5
        if forged:
            forge(raw, numbers)
        fill_device(root, raw)
        _open_everywhere(path, forged, is_store=raw.startswith((form.STORE_MARK, form.FREE_MARK)))
        if not raw.startswith(form.STORE_MARK):
            assert bytes_of(root, len(raw)) == raw or raw.startswith(form.FREE_MARK)


def _open_everywhere(path: Path, forged: bool, *, is_store: bool) -> None:
    found = look_at(path)
    assert "\n" not in found.problem
    if found.problem:
        for look in (verify_kept, functools.partial(KeptReader, facts=None)):
            with pytest.raises((ValueError, OSError), match=r"\A[^\n]+\Z"):
                look(path)
    else:
        verify_kept(path)
        reader = KeptReader(path, None)
        for key in reader.keys:
            _check(key, reader.read(key), forged)
        reader.close()
    if not is_store:
        with pytest.raises(FileExistsError, match="no store"):
            KeptStore(path, LAYOUT, FACTS)
        return
    store = KeptBlocks(KeptStore(path, LAYOUT, FACTS))
    for key in store.keys:
        _check(key, store.get(key), forged)
    store.put(b"new" * 12, bytes(LAYOUT.block_bytes))
    assert store.get(b"new" * 12) == bytes(LAYOUT.block_bytes)
    store.close()
    drop_kept(path)


def _check(key: bytes, data: bytes | None, forged: bool) -> None:
    if forged or data is None:
        return
    assert data == bytes([key[0] - 1]) * LAYOUT.block_bytes, key.hex()
