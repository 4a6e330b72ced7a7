"""Activation checkpointing that a plan counts on, switched on in models of transformers.

Where the plan has a place for the checkpoints, they lie there between forward and backward.
"""

from __future__ import annotations

from typing import Any

from cxl_offload.ops.activations import OffloadedActivations

_FUNCTION = "_gradient_checkpointing_func"
"""What the layers of transformers call for a checkpoint; its modules have it as an attribute."""

_REMEDY = "switch it on in the script, or the micro-batch of the plan may not fit"
_LEAVE_REMEDY = (
    "use cxl_offload.offload_activations in the script, or the micro-batch of the plan may not fit"
)


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


class _Offloading:
    """Calls what makes a checkpoint, and has the tensors that it keeps go to a tier.

    Only the inputs of the layer are kept in the context: what autograd saves inside of the layer is
    the checkpoint's own, and what the model does around its layers is outside of it.
    """

    def __init__(self, checkpoint: Any, offload: OffloadedActivations) -> None:
        self._checkpoint, self._offload = checkpoint, offload

    def __call__(self, *args: Any, **options: Any) -> Any:
        with self._offload:
            return self._checkpoint(*args, **options)


def leave_for(model: Any, offload: OffloadedActivations) -> str | None:
    """Has a model's checkpoints go to a tier; why it cannot, or None.

    To be called after :func:`compute_again`. A model whose checkpoints go somewhere already is left
    as it is.
    """
    makers = [each for each in model.modules() if callable(getattr(each, _FUNCTION, None))]
    if not makers:
        return f"{type(model).__name__} has no {_FUNCTION} in its layers: {_LEAVE_REMEDY}"
    for each in makers:
        checkpoint = getattr(each, _FUNCTION)
        if not isinstance(checkpoint, _Offloading):
            setattr(each, _FUNCTION, _Offloading(checkpoint, offload))
    return None
