"""The monkey patch that puts weights into tiers: vLLM has no registry of offloaders.

Names of vLLM are rebound: ``model_executor.offloader.uva.UVAOffloader``, which
``create_offloader`` looks up when the model runner is made; ``EngineArgs.create_engine_config``,
so that wrong options are refused before an engine starts; and of the model runners ``load_model``,
to settle and report once weights are loaded, and ``execute_model``, to time steps. It is done on
the versions that it was tested with, and only where the names look as expected; elsewhere
``weight_*`` options are refused.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from cxl_offload.errors import ConfigError
from cxl_offload.integrations.vllm.one_line import one_line_under_the_command
from cxl_offload.integrations.vllm.weight_options import SECTION, read_weight_options
from cxl_offload.topology import discover

TESTED_VERSIONS = ("0.32.0",)
"""Of vLLM, without what follows a ``+``."""

_UVA = "vllm.model_executor.offloader.uva"
_ARGS = "vllm.engine.arg_utils"
_RUNNERS = {
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner",
    "vllm.v1.worker.gpu.model_runner": "GPUModelRunner",
    "vllm.v1.worker.cpu_model_runner": "CPUModelRunner",
    "vllm.v1.worker.cpu.model_runner": "CPUModelRunner",
}
_DONE = "_cxl_offload_patched"

EXPECTED: Mapping[tuple[str, str], tuple[str, ...]] = {
    (_UVA, "UVAOffloader.__init__"): ("self", "cpu_offload_max_bytes", "cpu_offload_params"),
    (_UVA, "UVAOffloader.wrap_modules"): ("self", "modules_generator", "prefix"),
    (_UVA, "UVAOffloader._maybe_offload_to_cpu"): ("self", "module", "prefix"),
    (_UVA, "get_accelerator_view_from_cpu_tensor"): ("cpu_tensor",),
    (_UVA, "gpu_sync_allowed"): ("first_only",),
    ("vllm.model_executor.offloader.base", "create_offloader"): ("offload_config",),
    ("vllm.model_executor.offloader.base", "get_offloader"): (),
    ("vllm.config", "get_current_vllm_config_or_none"): (),
}
"""Module and name to the parameters that the patch relies on."""


def broken_expectations() -> list[str]:
    """What vLLM's names no longer look like; empty: as tested."""
    found = []
    for (where, name), parameters in EXPECTED.items():
        try:
            target: Any = importlib.import_module(where)
            for part in name.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError):
            found.append(f"{where}.{name} is gone")
            continue
        given = tuple(inspect.signature(target).parameters)
        if given != parameters:
            found.append(f"{where}.{name} takes {', '.join(given) or 'nothing'}")
    return found


def _unfit() -> str:
    """Why this vLLM is not patched; empty: it is."""
    import vllm

    version = str(vllm.__version__).partition("+")[0]
    if version not in TESTED_VERSIONS:
        return f"vLLM {version} is not tested, {', '.join(TESTED_VERSIONS)} is"
    broken = broken_expectations()
    return f"vLLM {version} is not as tested: {'; '.join(broken)}" if broken else ""


def install_weights() -> bool:
    """Rebinds vLLM's names; in every process of vLLM, any number of times.

    Returns
    -------
    bool
        Whether weights can be placed; False: options for them will be refused.
    """
    why_not = _unfit()
    # Imported where it is not yet: plugins are loaded once, whenever a program asks for them.
    arguments = importlib.import_module(_ARGS)
    _wrap(arguments, "EngineArgs", "create_engine_config", _checked(why_not))
    if why_not:
        return False
    uva: Any = importlib.import_module(_UVA)
    if not getattr(uva.UVAOffloader, _DONE, False):
        from cxl_offload.integrations.vllm.weight_offloader import PlacedUVAOffloader

        class UVAOffloader(PlacedUVAOffloader):
            """Made when the model runner is: by then its module is there to be wrapped."""

            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                for module, name in _RUNNERS.items():
                    _wrap(sys.modules.get(module), name, "load_model", _settled)
                    _wrap(sys.modules.get(module), name, "execute_model", _timed)

        setattr(UVAOffloader, _DONE, True)
        uva.UVAOffloader = UVAOffloader
    return True


def _wrap(
    module: ModuleType | None,
    owner_name: str,
    name: str,
    wrapped: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replaces a method that the class defines itself, once."""
    owner = getattr(module, owner_name, None)
    method = None if owner is None else vars(owner).get(name)
    if method is None or getattr(method, _DONE, False):
        return
    made = functools.wraps(method)(wrapped(method))
    setattr(made, _DONE, True)
    setattr(owner, name, made)


def _settled(load_model: Callable[..., Any]) -> Callable[..., Any]:
    def load_and_settle(runner: Any, *args: Any, **options: Any) -> Any:
        result = load_model(runner, *args, **options)
        from vllm.model_executor.offloader.base import get_offloader

        finish = getattr(get_offloader(), "finish", None)
        if finish is not None:
            finish(runner.get_model() if hasattr(runner, "get_model") else runner.model)
        return result

    return load_and_settle


def _timed(execute_model: Callable[..., Any]) -> Callable[..., Any]:
    def tell_and_execute(runner: Any, planned: Any, *args: Any, **options: Any) -> Any:
        from vllm.model_executor.offloader.base import get_offloader

        step_begins = getattr(get_offloader(), "step_begins", None)
        if step_begins is not None:
            step_begins(planned)
        return execute_model(runner, planned, *args, **options)

    return tell_and_execute


def _checked(why_not: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrapped(create_engine_config: Callable[..., Any]) -> Callable[..., Any]:
        def check_and_create(arguments: Any, *args: Any, **options: Any) -> Any:
            with one_line_under_the_command():
                check_arguments(arguments, why_not)
            return create_engine_config(arguments, *args, **options)

        return check_and_create

    return wrapped


def check_arguments(arguments: Any, why_not: str = "") -> None:
    """Refuses options of weights that are wrong, or that would do nothing.

    Parameters
    ----------
    arguments
        vLLM's ``EngineArgs``.
    why_not
        Why this vLLM cannot be patched, if so.

    Raises
    ------
    ConfigError
        One line.
    """
    given = getattr(arguments, "additional_config", None)
    if not isinstance(given, dict) or not given.get(SECTION):
        return
    if read_weight_options(given, discover()) is None:
        return
    where = f'--additional-config "{SECTION}"'
    if why_not:
        raise ConfigError(f"{where}: weights cannot be placed: {why_not}; leave weight_* out")
    if not arguments.cpu_offload_gb > 0:
        raise ConfigError(
            f"{where}: weight_* options do nothing without --cpu-offload-gb; give it a size in GiB"
        )
    prefetch = arguments.offload_backend == "auto" and arguments.offload_group_size > 0
    if prefetch or arguments.offload_backend == "prefetch":
        raise ConfigError(
            f"{where}: only the uva backend of --cpu-offload-gb places weights; leave out "
            "--offload-backend prefetch and --offload-group-size"
        )
