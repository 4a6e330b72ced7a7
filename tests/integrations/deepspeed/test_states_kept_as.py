"""States that are there are converted to the type of a plan, with what they stand for."""

from __future__ import annotations

import pytest
import torch

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.deepspeed.states import keep_states_as
from cxl_offload.ops.adagrad import CPUAdagrad
from cxl_offload.ops.adam import CPUAdam
from cxl_offload.ops.state_codes import float_state_dict


def stepped(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> None:
    param.grad = torch.linspace(-1, 1, param.numel())
    optimizer.step()


def test_states_of_a_checkpoint_keep_their_values() -> None:
    param = torch.nn.Parameter(torch.ones(300))
    optimizer = CPUAdam([param])
    stepped(optimizer, param)
    before = {name: value.clone() for name, value in optimizer.state[param].items()}
    assert keep_states_as(optimizer, "uint8")
    assert optimizer.state[param]["exp_avg_codes"].dtype is torch.uint8
    after = float_state_dict(optimizer.state_dict())["state"][0]
    assert after["step"] == before["step"] == 1
    torch.testing.assert_close(after["exp_avg"], before["exp_avg"], rtol=0.07, atol=1e-4)
    torch.testing.assert_close(after["exp_avg_sq"], before["exp_avg_sq"], rtol=0.07, atol=1e-6)
    assert not torch.equal(after["exp_avg"], before["exp_avg"])  # the control: 8 bits hold less
    assert not keep_states_as(optimizer, "uint8")
    assert not keep_states_as(optimizer, "")


def test_what_cannot_be_kept_so_stays_as_it_was() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = CPUAdagrad([param])
    stepped(optimizer, param)
    before = optimizer.state[param]["sum"].clone()
    with pytest.raises(ConfigError, match="the plan counts on optimizer states in uint8"):
        keep_states_as(optimizer, "uint8")
    assert torch.equal(optimizer.state[param]["sum"], before)
    with pytest.raises(ConfigError, match="which AdamW does not have: give"):
        keep_states_as(torch.optim.AdamW([param]), "bfloat16")
