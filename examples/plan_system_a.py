"""LLaMA-65B on a published CXL server: which batch, what where, and what one more card brings.

Every figure is predicted from the server's published numbers. The same from the command line:

    cxl-offload plan inference --model llama-65b --machine epyc9354-cxl-a --executor flexgen
    cxl-offload plan inference ... --add cxl=128GiB:38.4GB/s:250ns
"""

from __future__ import annotations

from cxl_offload import load_machine
from cxl_offload.plan import InferenceRequest, Plan, load_model, plan_inference, with_memory
from cxl_offload.topology import Machine
from cxl_offload.units import format_bytes

ONE_MORE_CARD = "cxl=128GiB:38.4GB/s:250ns"


def planned(machine: Machine) -> Plan:
    """The plan with the most tokens a second."""
    return plan_inference(
        InferenceRequest(
            model=load_model("llama-65b"),
            model_name="llama-65b",
            machine=machine,
            prompt=512,
            generated=32,
        )
    )


def main() -> None:
    machine = load_machine("epyc9354-cxl-a")
    for title, there in (
        ("as published", machine),
        ("with one more card", with_memory(machine, ONE_MORE_CARD)),
    ):
        plan = planned(there)
        batch = plan.batch.size * plan.batch.count
        print(f"{title}: {plan.tokens_per_s:.2f} tokens/s predicted, {batch} sequences at once")
        for home in plan.homes:
            print(
                f"  {home.kind} in {home.where}: {format_bytes(home.bytes)}, {home.percent:.0f} %"
            )
        print(f"  CXL {'used' if plan.cxl.used else 'left alone'}: {plan.cxl.reason}")


if __name__ == "__main__":
    main()
