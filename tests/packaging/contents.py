"""What the libraries in a wheel need from outside of it, read from their ELF tables."""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

from elftools.elf.elffile import ELFFile

_OF_EVERY_LINUX = re.compile(
    r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+"
)
_UNVERSIONED = ("VER_NDX_LOCAL", "VER_NDX_GLOBAL")


def libraries(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as held:
        return {name: held.read(name) for name in held.namelist() if name.endswith(".so")}


def processor(library: bytes) -> str:
    """As ELF calls it: ``EM_X86_64``, ``EM_AARCH64``."""
    machine: str = ELFFile(io.BytesIO(library))["e_machine"]
    return machine


def needed_from_others(library: bytes) -> list[str]:
    """Libraries and symbols that neither C, C++ nor Python gives.

    The C and C++ libraries give each of their symbols a version, and Python starts its own with
    ``Py``. What is left would have to come from a library that is there by chance, as torch's are
    in a process that has imported torch.
    """
    elf = ELFFile(io.BytesIO(library))
    named = [tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]
    found = [name for name in named if not _OF_EVERY_LINUX.fullmatch(name)]
    versions = elf.get_section_by_name(".gnu.version")
    for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
        undefined = symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] == "STB_GLOBAL"
        if not undefined or symbol.name.startswith(("Py", "_Py")):
            continue
        if versions is None or versions.get_symbol(index)["ndx"] in _UNVERSIONED:
            found.append(symbol.name)
    return found
