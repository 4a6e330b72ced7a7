"""LLM tensor offloading over DRAM and CXL memory tiers.

``import cxl_offload`` loads neither torch nor the C++ core; the names below, and the rooms of the
package (``cxl_offload.plan``), load what they need when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxl_offload.lazy import lazy_names, refuse_core_in_subinterpreters
from cxl_offload.renamed import remember_gone_modules

if TYPE_CHECKING:
    from cxl_offload import integrations as integrations
    from cxl_offload import memory as memory
    from cxl_offload import metrics as metrics
    from cxl_offload import objects as objects
    from cxl_offload import ops as ops
    from cxl_offload import plan as plan
    from cxl_offload import profile as profile
    from cxl_offload import ranks as ranks
    from cxl_offload import sim as sim
    from cxl_offload import topology as topology
    from cxl_offload import transfer as transfer
    from cxl_offload import tune as tune
    from cxl_offload import validation as validation
    from cxl_offload.errors import ConfigError as ConfigError
    from cxl_offload.errors import CxlOffloadError as CxlOffloadError
    from cxl_offload.errors import MemoryLostError as MemoryLostError
    from cxl_offload.errors import PlacementError as PlacementError
    from cxl_offload.memory import Bind as Bind
    from cxl_offload.memory import Dax as Dax
    from cxl_offload.memory import FirstTouch as FirstTouch
    from cxl_offload.memory import Interleave as Interleave
    from cxl_offload.memory import Placement as Placement
    from cxl_offload.memory import Preferred as Preferred
    from cxl_offload.memory import Replicate as Replicate
    from cxl_offload.memory import Session as Session
    from cxl_offload.memory import SharedRegion as SharedRegion
    from cxl_offload.memory import Weighted as Weighted
    from cxl_offload.memory import current_session as current_session
    from cxl_offload.memory import survive_memory_errors as survive_memory_errors
    from cxl_offload.memory import use as use
    from cxl_offload.objects.module_placement import place as place
    from cxl_offload.objects.placing_scope import placing as placing
    from cxl_offload.objects.tensor_holders import memory_report as memory_report
    from cxl_offload.ops.activations import offload_activations as offload_activations
    from cxl_offload.ops.adagrad import CPUAdagrad as CPUAdagrad
    from cxl_offload.ops.adam import CPUAdam as CPUAdam
    from cxl_offload.ops.attention import decode_attention as decode_attention
    from cxl_offload.ops.lion import CPULion as CPULion
    from cxl_offload.ops.offload import offload_optimizer as offload_optimizer
    from cxl_offload.ops.shared_cpus import share_cpus as share_cpus
    from cxl_offload.tensor import empty as empty
    from cxl_offload.tensor import empty_like as empty_like
    from cxl_offload.tensor import from_tensor as from_tensor
    from cxl_offload.tensor import full as full
    from cxl_offload.tensor import move as move
    from cxl_offload.tensor import placement_of as placement_of
    from cxl_offload.tensor import record_stream as record_stream
    from cxl_offload.tensor import stats as stats
    from cxl_offload.tensor import zeros as zeros
    from cxl_offload.topology import discover as discover
    from cxl_offload.topology import load_machine as load_machine

__version__ = "0.1.0"

refuse_core_in_subinterpreters(__name__)
remember_gone_modules()
__getattr__, __dir__ = lazy_names(__name__)
