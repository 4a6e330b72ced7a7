"""200 random requests and what ``cxl-offload plan`` answered to each of them.

The fixture keeps of every answer the numbers that make a plan what it is, compared to nine digits,
and a digest, which says whether a change was kept to the byte. Write it again, only together with a
deliberate change of plans, by ``python -m tests.plan.same_plans --write``; compare all of them by
``python -m tests.plan.same_plans``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cxl_offload.cli.main import main as command_line

FIXTURE = Path(__file__).parents[1] / "fixtures" / "same_plans.json"
COUNT = 200

CONFIGS = Path(__file__).parents[2] / "configs"
WITH_GPU = ("epyc9354-cxl-a", "gh200", "spr3-h100", "zen4-2-mi300a")
PLANNED = ("epyc9354-cxl-a", "spr3-h100")
LARGE_MODELS = ("galactica-30b", "llama-3-70b", "llama-65b", "mixtral-8x7b", "opt-175b", "opt-66b")


def names(folder: str) -> list[str]:
    """Machine or model files that were there when the fixture was first written."""
    return sorted(path.stem for path in (CONFIGS / folder).glob("*.yaml"))


def requests(machines: Sequence[str], models: Sequence[str]) -> list[list[str]]:
    """Arguments of ``cxl-offload plan``; most are for machines that have a GPU."""
    draw = random.Random(13)
    return [_request(draw, machines, models) for _ in range(COUNT)]


def _request(draw: random.Random, machines: Sequence[str], models: Sequence[str]) -> list[str]:
    kind = draw.choices(("flexgen", "vllm", "auto", "training"), (4, 3, 1, 3))[0]
    machine = draw.choice(PLANNED if draw.random() < 0.85 else WITH_GPU + tuple(machines))
    model = draw.choice(models)
    if kind == "training" and draw.random() < 0.8:
        machine = PLANNED[0]
        model = draw.choice([name for name in models if name not in LARGE_MODELS])
    elif "bert" in model and draw.random() < 0.8:
        model = "opt-30b"
    made = ["training" if kind == "training" else "inference", "--machine", machine]
    made += ["--model", model]
    if kind == "training":
        made += _training(draw)
    else:
        made += _inference(draw, kind)
    if draw.random() < 0.3:
        tiers = ["ldram", "ldram,cxl", "cxl", "ldram,rdram,cxl"]
        tiers += ["ldram,nvme"] if kind == "flexgen" and machine == PLANNED[0] else []
        made += ["--tiers", draw.choice(tiers)]
    elif draw.random() < 0.5:
        tier = draw.choice(("ldram", "rdram", "cxl", "nvme"))
        tier = tier if tier != "nvme" or machine == PLANNED[0] else "cxl"
        made += ["--limit", f"{tier}={draw.choice((1, 4, 16, 48, 100, 128))}GiB"]
    if draw.random() < 0.2:
        made += ["--cxl-margin", str(draw.choice((0, 0.01, 0.1)))]
    if draw.random() < 0.2:
        made += ["--host-usable", str(draw.choice((0.5, 0.8, 1)))]
    if draw.random() < 0.2:
        made += ["--gpu-usable", str(draw.choice((0.5, 0.7, 0.95)))]
    return [*made, "--json"]


def _training(draw: random.Random) -> list[str]:
    made = ["--batch", str(draw.choice((1, 4, 12, 16, 64)))]
    made += ["--seq-len", str(draw.choice((128, 512, 1024, 2048)))]
    if draw.random() < 0.4:
        made += ["--stage", str(draw.choice((2, 3)))]
    if draw.random() < 0.3:
        made += ["--optimizer-gb-s", str(draw.choice((20, 100)))]
    return made


def _inference(draw: random.Random, kind: str) -> list[str]:
    made = ["--executor", kind, "--prompt-len", str(draw.choice((32, 256, 512, 1024, 1536)))]
    made += ["--gen-len", str(draw.choice((2, 8, 32, 128, 400)))]
    if kind == "vllm" and draw.random() < 0.4:
        made += ["--kv-host", f"{draw.choice((1, 16, 64))}GiB"]
    if kind != "vllm" and draw.random() < 0.3:
        made += ["--max-batches", str(draw.choice((1, 3, 8)))]
    if kind != "vllm" and draw.random() < 0.2:
        wish = draw.choice(("always", "never"))
        made += ["--interleave", f"{draw.choice(('weights', 'kv'))}={wish}"]
    return made


def answer(arguments: Sequence[str]) -> str:
    """What the command prints, on stdout or else on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.suppress(SystemExit),
    ):
        command_line(["plan", *arguments])
    return out.getvalue() or err.getvalue()


def summary(text: str) -> dict[str, Any]:
    """The digest of an answer, and what to read of it when the digest has changed."""
    short: dict[str, Any] = {"digest": hashlib.sha256(text.encode()).hexdigest()[:16]}
    if not text.startswith("{"):
        return {**short, "error": text[:200]}
    plan = json.loads(text)
    batch = plan["batch"]
    return {
        **short,
        "tokens_per_s": plan["tokens_per_s"],
        "batch": f"{batch['size']} x {batch['count']}",
        "homes": " ".join(f"{h['kind']}:{h['where']}={h['bytes']}" for h in plan["homes"]),
        "phases": [phase["seconds"] for phase in plan["phases"]],
        "cxl": [plan["cxl"]["used"], plan["cxl"]["gain"]],
        "prices": [price["gain_tokens_per_s"] for price in plan["prices"]],
        "notes": len(plan["notes"]),
    }


def differences(entries: Sequence[dict[str, Any]]) -> list[str]:
    """A line for every request that is answered otherwise than when the entry was written."""
    made = []
    for entry in entries:
        was, now = entry["answer"], summary(answer(entry["arguments"]))
        changed = [
            f"{key}: {was.get(key)} -> {now.get(key)}"
            for key in dict.fromkeys([*was, *now])
            if key != "digest" and rounded(was.get(key)) != rounded(now.get(key))
        ]
        if changed:
            made.append(f"plan {' '.join(entry['arguments'])}: {'; '.join(changed)}")
    return made


def rounded(value: Any) -> Any:
    """Without the digits that another order of a sum, or another CPU, may change."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.9g}") if isinstance(value, float) and abs(value) > 1e-6 else value or 0


def read() -> list[dict[str, Any]]:
    """The entries of the fixture."""
    entries: list[dict[str, Any]] = json.loads(FIXTURE.read_text(encoding="utf-8"))
    return entries


def _write() -> None:
    if FIXTURE.exists():
        asked = [entry["arguments"] for entry in read()]
    else:
        asked = requests(names("machines"), names("models"))
    entries = []
    for arguments in asked:
        started = time.monotonic()
        entries.append({"arguments": arguments, "answer": summary(answer(arguments))})
        sys.stderr.write(f"{time.monotonic() - started:5.1f} s  {' '.join(arguments)}\n")
    text = ",\n".join(json.dumps(entry) for entry in entries)
    FIXTURE.write_text(f"[\n{text}\n]\n", encoding="utf-8")


def _compare(most: int | None) -> int:
    found = differences(read()[:most])
    found.append(f"{len(found)} of {len(read()[:most])} answers differ")
    sys.stdout.write("\n".join(found) + "\n")
    return int(len(found) > 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compares plans with those of the fixture.")
    parser.add_argument("--write", action="store_true", help="Write the fixture.")
    parser.add_argument("--most", type=int, help="Compare so many of them.")
    options = parser.parse_args()
    if options.write:
        _write()
        sys.exit(0)
    sys.exit(_compare(options.most))
