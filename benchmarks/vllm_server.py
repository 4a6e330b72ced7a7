"""A real ``vllm serve`` on loopback, and the model that it serves, for bench_vllm_kv.py."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

START_S = 300
ROOT = Path(__file__).resolve().parents[1]

PLUGIN = "cxl_offload.integrations.vllm.plugin:register"


def make_model(folder: Path, *, layers: int, hidden: int) -> None:
    """A random Llama with a tokenizer of bytes; weights spread, so that tokens depend on KV."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    names += [f"<x{number}>" for number in range(len(names), 512)]
    words = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)
    model.to(torch.bfloat16).save_pretrained(folder)


def plugin_folder(folder: Path) -> Path:
    """This checkout as if installed: vLLM finds plugins by the metadata of a distribution."""
    made = folder / "cxl_offload-0.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: cxl_offload\nVersion: 0\n")
    (made / "entry_points.txt").write_text(f"[vllm.general_plugins]\ncxl_offload = {PLUGIN}\n")
    return folder


def model_cpus() -> list[int]:
    """All but the last: with fewer, vLLM chooses by whether KV is offloaded, which is no equal
    measure, and a model on all CPUs is stalled whenever the HTTP server or a copy runs."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[:-1] or allowed


class Server:
    """``vllm serve`` in a process group of its own, until the ``with`` block ends.

    Parameters
    ----------
    model
        Its folder.
    flags
        Beside model, host and port.
    log
        Where its output goes.
    plugin
        A folder of :func:`plugin_folder`.
    """

    def __init__(self, model: Path, flags: Sequence[str], *, log: Path, plugin: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._log = log
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
        command += ["--served-model-name", "bench", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), *flags]
        environment = dict(
            os.environ,
            PYTHONPATH=os.pathsep.join([str(ROOT), str(plugin)]),
            HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND=",".join(str(cpu) for cpu in model_cpus()),
        )
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_until_up(self) -> None:
        """Raises RuntimeError, with the end of its output, when it ends or takes too long."""
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.5)
        tail = self._log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"vllm serve did not come up within {START_S} s:\n{tail}")

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def metrics(self) -> str:
        """The text of its Prometheus endpoint."""
        return self.get("/metrics")[1]

    def stop(self) -> None:
        """Ends it and its children."""
        if self._process.poll() is None:
            self._process.terminate()  # it ends its children itself
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(30)
