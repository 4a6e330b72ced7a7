"""Activation checkpointing that a plan counts on, switched on in models of transformers."""

from __future__ import annotations

from typing import Any

_REMEDY = "switch it on in the script, or the micro-batch of the plan may not fit"


def compute_again(model: Any) -> str | None:
    """Has a model keep one tensor a layer for its backward; why it cannot, or None.

    Models of transformers, and wrappers that pass on their attributes, have a method for it; one
    that does so already is left as it is. Parameters may be frozen: nothing depends on the inputs'
    gradients.
    """
    if getattr(model, "is_gradient_checkpointing", False):
        return None
    enable = getattr(model, "gradient_checkpointing_enable", None)
    name = type(model).__name__
    if not callable(enable):
        return f"{name} has no gradient_checkpointing_enable(): {_REMEDY}"
    try:
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except (TypeError, ValueError) as error:
        return f"{name}.gradient_checkpointing_enable(): {error}; {_REMEDY}"
    return None
