"""What a user sees first: names at the top, and errors of arguments that mean nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cxl_offload
from cxl_offload import Session, load_machine

TOP = (
    "CPUAdam",
    "ConfigError",
    "PlacementError",
    "SharedRegion",
    "decode_attention",
    "plan",
    "integrations",
)


def test_names_at_the_top_load_nothing_before_they_are_used() -> None:
    script = (
        "import sys, cxl_offload\n"
        "assert not {'torch', 'numpy', 'cxl_offload._C', 'cxl_offload.plan'} & set(sys.modules)\n"
        f"assert set({TOP!r}) <= set(dir(cxl_offload)) & set(cxl_offload.__all__)\n"
        "cxl_offload.plan, cxl_offload.integrations, cxl_offload.ConfigError\n"
        "assert 'torch' not in sys.modules\n"
        "assert issubclass(cxl_offload.CPUAdam, sys.modules['torch'].optim.Optimizer)\n"
        "assert cxl_offload.decode_attention and cxl_offload.SharedRegion\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda: cxl_offload.zeros(3, dtype="float16"), "dtype 'float16' is no torch.dtype"),
        (lambda: cxl_offload.from_tensor([1, 2]), "a list is no tensor; .* torch.as_tensor"),
        (lambda: cxl_offload.placement_of([1, 2]), "a list is no tensor"),
        (lambda: cxl_offload.zeros(3, placment="bind:0"), "unexpected keyword .*'placment'"),
        (lambda: Session.simulated("gh200"), "'gh200' is no machine; .*load_machine"),
        (lambda: cxl_offload.use(load_machine("gh200")).__enter__(), "use Machine: give a session"),
        (
            lambda: cxl_offload.offload_optimizer(torch.nn.Linear(2, 2), "ldram"),
            "offload_optimizer of a Linear: give a torch.optim.Optimizer",
        ),
    ],
)
def test_argument_of_the_wrong_kind_is_refused_with_a_remedy(
    call: Callable[[], object], remedy: str
) -> None:
    with pytest.raises(TypeError, match=remedy):
        call()


def test_session_says_in_one_line_what_it_holds() -> None:
    session = Session.simulated(load_machine("epyc9354-cxl-a"))
    assert repr(session) == "<Session of simulated epyc9354-cxl-a, holds nothing>"
    kept = cxl_offload.zeros(5 << 20, dtype=torch.uint8, policy="cxl", session=session)
    assert kept.nbytes == 5 << 20
    assert "holds node 2: " in repr(session)


def lazy_packages() -> list[str]:
    """Every room that hands names on without loading them."""
    root = Path(cxl_offload.__file__).parent
    return [
        ".".join(("cxl_offload", *path.parent.relative_to(root).parts))
        for path in sorted(root.rglob("__init__.py"))
        if "lazy_names(__name__)" in path.read_text()
    ]


@pytest.mark.parametrize("package", lazy_packages())
def test_every_public_name_of_a_lazy_room_is_there(package: str) -> None:
    room = importlib.import_module(package)
    assert room.__all__
    assert set(room.__all__) <= set(dir(room))
    if package == "cxl_offload.integrations.deepspeed":
        pytest.importorskip("deepspeed")
    missing = [name for name in room.__all__ if not hasattr(room, name)]
    assert not missing, missing


def test_room_of_plans_plans_saves_loads_and_compares(tmp_path: Path) -> None:
    room = cxl_offload.plan
    model, machine = room.load_model("opt-6.7b"), load_machine("epyc9354-cxl-a")
    asked = {"model": model, "machine": machine, "model_name": "opt-6.7b"}
    lengths = {"prompt": 128, "generated": 16}
    made = [
        room.plan_inference(room.InferenceRequest(**asked, **lengths)),
        room.plan_vllm(room.VllmRequest(**asked, **lengths)),
        room.plan_training(
            room.TrainingRequest(
                model=room.load_model("gpt2-xl"), machine=machine, batch=16, tokens=256
            )
        ),
    ]
    assert [plan.executor for plan in made] == ["flexgen", "vllm", "deepspeed"]
    room.save_plan(made[1], tmp_path / "plan.yaml")
    assert room.load_plan(tmp_path / "plan.yaml") == made[1]
    bigger = room.with_memory(machine, "cxl=128GiB:38.4GB/s:250ns")
    with_card = room.plan_vllm(room.VllmRequest(**{**asked, "machine": bigger}, **lengths))
    assert (room.compare_plans(made[1], with_card).gain or 0) >= 0
    assert room.compare_plans(*made[:2]).notes, "two executors"
