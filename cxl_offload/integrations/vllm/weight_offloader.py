"""vLLM's offloader of weights, its host memory placed by kind of weight.

vLLM has no registry of offloaders: :mod:`~cxl_offload.integrations.vllm.weight_patch` puts this
class in the place of ``UVAOffloader``. Without ``weight_*`` options it does what that class does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import vllm.model_executor.offloader.uva as uva
from torch.func import functional_call
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.vllm.weight_memory import WeightMemory
from cxl_offload.integrations.vllm.weight_options import WeightOptions, read_weight_options
from cxl_offload.integrations.vllm.weight_report import WeightReport
from cxl_offload.memory import current_session
from cxl_offload.objects.weight_kinds import kind_of
from cxl_offload.tune import NewRegions, StepWatch

logger = init_logger("vllm.cxl_offload")

_MARK = "_vllm_is_uva_offloaded"
"""Set by vLLM on parameters that are views of host memory."""


@dataclass(slots=True)
class _Offloaded:
    """One parameter in our memory: who owns it, what it was called there, and where it was put."""

    module: torch.nn.Module
    name: str
    policy: str
    address: int
    nbytes: int
    host: torch.Tensor

    def parameter(self) -> torch.nn.Parameter | None:
        """As the module has it now; None: vLLM deleted it."""
        owner: Any = self.module
        for part in self.name.split("."):
            owner = getattr(owner, part, None)
        return owner  # type: ignore[no-any-return]


class PlacedUVAOffloader(uva.UVAOffloader):  # type: ignore[misc]
    """``UVAOffloader`` with memory of this package, by ``--additional-config``.

    Parameters
    ----------
    cpu_offload_max_bytes, cpu_offload_params
        As vLLM's.

    Raises
    ------
    ConfigError
        One line, before the model is loaded: the options are wrong for this machine.
    """

    def __init__(
        self, cpu_offload_max_bytes: int, cpu_offload_params: set[str] | None = None
    ) -> None:
        super().__init__(cpu_offload_max_bytes, cpu_offload_params)
        self.report: WeightReport | None = None
        self._watch: StepWatch | None = None
        self._planned: Any = None
        self._session = current_session()
        config = get_current_vllm_config_or_none()
        given = getattr(config, "additional_config", None)
        self.options: WeightOptions | None = read_weight_options(
            given if isinstance(given, dict) else None, self._session.machine
        )
        if self.options is None:
            return
        if self.options.names_outside_layers() and not self._may_take_outside():
            raise ConfigError(
                "weight_kinds: embedding and head can only leave the GPU with UVA; unset "
                "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA or leave them out"
            )
        self._room = WeightMemory(
            self._session,
            self.options,
            asked_bytes=cpu_offload_max_bytes,
            pin=self.pin_memory,
        )
        self._taken: dict[str, _Offloaded] = {}
        self._left_bytes = 0

    def _on_cpu(self) -> bool:
        """Whether the model computes on the CPU, so that weights are host memory anyway."""
        from vllm.platforms import current_platform

        return bool(current_platform.is_cpu())

    def _may_take_outside(self) -> bool:
        return self._on_cpu() or self.uva_offloading

    def _maybe_offload_to_cpu(self, module: torch.nn.Module, prefix: str = "") -> torch.nn.Module:
        if self.options is None:
            return super()._maybe_offload_to_cpu(module, prefix)  # type: ignore[no-any-return]
        took = False
        device = next((each.device for each in module.parameters()), None)
        for name, parameter in module.named_parameters():
            policy = self._wanted(prefix, name, parameter)
            if policy is not None:
                took |= self._offload(module, prefix, name, parameter, policy)
        if took and not self.uva_offloading and not self._on_cpu():
            _forward_with_copies(module, device, self.pin_memory)
        return module

    def _wanted(self, prefix: str, name: str, parameter: torch.nn.Parameter) -> str | None:
        """Where a parameter is to go; None: it stays."""
        assert self.options is not None
        already = getattr(parameter, _MARK, False) or getattr(parameter, "_cxl_placed", False)
        off_gpu = parameter.device.type == "cpu" and not self._on_cpu()
        if already or off_gpu or parameter.is_meta:
            return None
        whole = f"{prefix}{name}"
        if self.cpu_offload_params and not any(
            f".{part}." in f".{whole}." for part in self.cpu_offload_params
        ):
            return None
        return self.options.policy_of(whole)

    def _offload(
        self,
        module: torch.nn.Module,
        prefix: str,
        name: str,
        parameter: torch.nn.Parameter,
        policy: str,
    ) -> bool:
        """Moves one parameter; False: it would hold more than was asked for."""
        key = f"{len(self._taken)}:{prefix}{name}"
        host = self._room.place(key, parameter.data, policy)
        if host is None:
            self._left_bytes += parameter.data.numel() * parameter.data.element_size()
            return False
        host.copy_(parameter.data)
        self._taken[key] = _Offloaded(
            module, name, policy, self._show(parameter, host), host.nbytes, host
        )
        self.cpu_offload_bytes += host.nbytes
        return True

    def _show(self, parameter: torch.nn.Parameter, host: torch.Tensor) -> int:
        """Makes ``host`` the data of a parameter; the address at which it is then seen."""
        if self._on_cpu() or not self.uva_offloading:
            parameter.data = host
            parameter._cxl_placed = True  # type: ignore[attr-defined]
        else:
            parameter.data = uva.get_accelerator_view_from_cpu_tensor(host)
            setattr(parameter, _MARK, True)
        return parameter.data.data_ptr()

    def finish(self, model: torch.nn.Module) -> WeightReport | None:
        """After loading: brings back what vLLM moved meanwhile, and says what is held.

        While it loads, vLLM gives weights to its kernels, which may put them elsewhere: into
        torch's own pinned memory, or into packed copies.
        """
        if self.options is None:
            return None
        repacked = sum(self._settle(key, taken) for key, taken in list(self._taken.items()))
        if self.options.names_outside_layers():
            self._take_outside(model)
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)
        if self.pin_memory and empty_host_cache is not None:
            empty_host_cache()  # torch's pinned copies of what was brought back
        self._session.trim()
        kinds: dict[str, int] = {}
        for key, taken in self._taken.items():
            kind = kind_of(key.partition(":")[2])
            kinds[kind] = kinds.get(kind, 0) + taken.nbytes
        self.cpu_offload_bytes = sum(kinds.values())
        self.report = WeightReport(
            asked_bytes=self.cpu_offload_max_bytes,
            held_bytes=self._room.held_bytes,
            kinds=kinds,
            nodes=self._room.bytes_per_node(),
            pages=self.options.pages,
            pinned=self.pin_memory,
            repacked_bytes=repacked,
            left_bytes=self._left_bytes,
            simulated=self._session.is_simulated,
        )
        for line in self.report.lines():
            logger.info("%s", line)
        self._begin_tuning(self.report)
        return self.report

    def _begin_tuning(self, report: WeightReport) -> None:
        """From here on steps are timed, where there are weights to learn of."""
        assert self.options is not None
        nodes: Counter[int] = Counter()
        for held in report.nodes.values():
            nodes.update(held)
        if self.options.tune_state is None:
            return
        if not nodes:
            logger.warning("tune: no weight is in memory of this package; nothing to tune")
            return
        if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
            return  # ranks hold like shares of every weight: the first decides for all
        regions = NewRegions(
            self._session.machine,
            state=self.options.tune_state,
            places=self.options.tuned_policy,
            framework="vllm",
            logger=logger,
        )
        regions.placed(sum(nodes[node] for node in regions.far) / sum(nodes.values()))
        self._watch = StepWatch(regions)

    def step_begins(self, planned: Any) -> None:
        """The model runner is given a step, vLLM's ``SchedulerOutput``."""
        if self._watch is not None and planned is not self._planned:
            self._planned = planned  # a runner may call that of its base class
            sequences = len(planned.num_scheduled_tokens)
            self._watch.begins(sequences, planned.total_num_scheduled_tokens)

    def placed(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and host memory of every weight that is offloaded now."""
        for key, taken in self._taken.items():
            yield key.partition(":")[2], taken.host

    def _settle(self, key: str, taken: _Offloaded) -> int:
        """Brings one parameter back into our memory; bytes that are gone for good."""
        parameter = taken.parameter()
        if parameter is not None and parameter.numel() and parameter.data_ptr() == taken.address:
            return 0
        del self._taken[key]
        self._room.drop(key)
        if parameter is None or parameter.numel() == 0:
            return taken.nbytes
        host = self._room.place(key, parameter.data, taken.policy)
        if host is None:
            self._left_bytes += parameter.data.numel() * parameter.data.element_size()
            return 0
        host.copy_(parameter.data)
        taken.address, taken.nbytes, taken.host = self._show(parameter, host), host.nbytes, host
        self._taken[key] = taken
        return 0

    def _take_outside(self, model: torch.nn.Module) -> None:
        """Embeddings, the head and whatever else ``weight_kinds`` names outside the layers."""
        assert self.options is not None
        for name, parameter in model.named_parameters():
            # layers, which have numbers, had their turn before loading
            in_layer = any(part.isdecimal() for part in name.split("."))
            if in_layer or parameter.numel() == 0 or not self.options.is_named(name):
                continue
            policy = self._wanted("", name, parameter)
            if policy is not None:
                self._offload(model, "", name, parameter, policy)


def _forward_with_copies(
    module: torch.nn.Module, device: torch.device | None, pinned: bool
) -> None:
    """As vLLM without UVA: every forward copies the module's state to the GPU and drops it."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        module.forward = original
        with nullcontext() if pinned else uva.gpu_sync_allowed():
            state = {
                name: value.to(device, non_blocking=True)
                for name, value in module.state_dict().items()
            }
        result = functional_call(module, state, args=args, kwargs=kwargs, tie_weights=False)
        module.forward = forward
        return result

    module.forward = forward
