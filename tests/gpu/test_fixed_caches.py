"""Fixed caches in a tier under a decoder that computes on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cxl_offload.memory import Session

pytest.importorskip("transformers")

from cxl_offload.integrations.transformers import offload

from .test_streamed_weights import LAYERS, generate, make, near

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, "int4"], ids=str)
@pytest.mark.parametrize("way", ["moved", "streamed"])
def test_fixed_cache_gives_the_tokens_of_one_that_grows(
    way: str, kv_dtype: Any, session: Session
) -> None:
    """generate() must not compile: stock's fixed caches make it do so on a GPU."""
    model = make()
    policies = {"kv": near(session)}
    options: dict[str, Any] = {"kv_dtype": kv_dtype, "session": session}
    if way == "moved":
        model.cuda()
    else:
        policies["weights"] = near(session)
        options["accelerator"] = "cuda"
    with offload(model, policies, **options) as done:
        growing = generate(model, str(model.device))
        model.generation_config.cache_implementation = "static"
        fixed = generate(model, str(model.device))
        assert done.calls.kernel == 2 * 11 * LAYERS
    assert torch.equal(fixed, growing)
