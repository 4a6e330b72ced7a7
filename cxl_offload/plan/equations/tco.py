"""Does CXL memory pay? Servers needed and cost saved, by a latency-based model.

Wu et al., Performance Study of CXL Memory Topology, 3.4 and Table 3: a working set W is served
partly from main memory, partly from CXL, the rest from SSD (latency 1 a byte). With D bytes of
main memory a server, C = main memory / CXL memory, and relative latencies RL_d and RL_c::

    T_baseline = N_b*D*RL_d + (W - N_b*D)
    T_cxl      = N_c*D*RL_d + N_c*D*C*RL_c/k + (W - N_c*D - N_c*D/C)          as printed
    N_c / N_b  = (RL_d - 1) / (RL_d + C*RL_c/k - 1 - 1/C)          from equal times
    saving     = 1 - R_t * N_c/N_b

The printed form holds two slips: CXL memory of a server is D/C (as in its own SSD term), not D*C,
and k = min(N_congest, N_threads) divides the CXL time, so that congestion speeds CXL up. The
corrected form uses D/C and multiplies the CXL time by ``max(1, N_threads / N_congest)``, or by 1.

Valid while some of the working set stays on SSD, W >= N_c*D*(1 + 1/C), and 0 < RL_d < 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cxl_offload.renamed import old_names

TcoForm = Literal["printed", "corrected"]
Congestion = Literal["none", "multiply"]


@dataclass(frozen=True, slots=True)
class TcoInputs:
    """Parameters of the model; latencies relative to SSD (1), ``r_t`` relative server cost.

    ``n_congest`` and ``n_threads`` are needed by the printed form and by ``congestion =
    "multiply"``. ``congestion`` concerns the corrected form only.
    """

    rl_d: float
    rl_c: float
    c: float
    r_t: float
    form: TcoForm
    n_congest: float | None = None
    n_threads: float | None = None
    congestion: Congestion = "none"

    def __post_init__(self) -> None:
        for name, value in (("c", self.c), ("r_t", self.r_t)):
            if value <= 0:
                raise ValueError(f"tco: {name} = {value}, need a number above 0")
        for name, value in (("rl_d", self.rl_d), ("rl_c", self.rl_c)):
            if value < 0:
                raise ValueError(f"tco: {name} = {value}, need a number >= 0")
        if self.form == "printed" or self.congestion == "multiply":
            self.threads_and_knee()

    def threads_and_knee(self) -> tuple[float, float]:
        """``(n_threads, n_congest)``, both above 0, or the reason why not."""
        if self.n_threads is None or self.n_congest is None:
            raise ValueError("tco: this form needs n_congest and n_threads")
        if self.n_threads <= 0 or self.n_congest <= 0:
            raise ValueError(
                f"tco: n_congest = {self.n_congest}, n_threads = {self.n_threads}: both above 0"
            )
        return self.n_threads, self.n_congest


def _cxl_latency_per_server(inputs: TcoInputs) -> float:
    """Time of a server's CXL bytes over D: ``C*RL_c/k`` as printed, ``RL_c*m/C`` corrected."""
    if inputs.form == "printed":
        return inputs.c * inputs.rl_c / min(inputs.threads_and_knee())
    lengthened = 1.0
    if inputs.congestion == "multiply":
        threads, knee = inputs.threads_and_knee()
        lengthened = max(1.0, threads / knee)
    return inputs.rl_c * lengthened / inputs.c


def server_ratio(inputs: TcoInputs) -> float:
    """``N_cxl / N_baseline`` of equal time.

    Raises
    ------
    ValueError
        A server with CXL is no faster than the SSD it replaces: no number of servers is equal.
    """
    gain = inputs.rl_d + _cxl_latency_per_server(inputs) - 1 - 1 / inputs.c
    if gain == 0 or (inputs.rl_d - 1) / gain < 0:
        raise ValueError(
            f"tco: rl_d = {inputs.rl_d}, rl_c = {inputs.rl_c}, c = {inputs.c}: memory that is not "
            "faster than SSD replaces no server; lower rl_d or rl_c"
        )
    return (inputs.rl_d - 1) / gain


def saving(inputs: TcoInputs) -> float:
    """Fraction of the cost saved, ``1 - R_t * N_cxl/N_baseline``; negative when CXL costs more."""
    return 1 - inputs.r_t * server_ratio(inputs)


def break_even_server_cost(inputs: TcoInputs) -> float:
    """Relative cost of a server with CXL at which nothing is saved, ``N_baseline / N_cxl``.

    Raises
    ------
    ValueError
        ``rl_d`` is 1: memory as slow as SSD, no servers are needed for the difference.
    """
    ratio = server_ratio(inputs)
    if ratio == 0:
        raise ValueError("tco: rl_d = 1, memory as slow as SSD; there is no break-even cost")
    return 1 / ratio


def times(inputs: TcoInputs, *, d: float, w: float, n_baseline: float) -> tuple[float, float]:
    """``(T_baseline, T_cxl)`` with ``N_cxl = ratio * n_baseline``; ``d`` and ``w`` in one unit."""
    n_cxl = server_ratio(inputs) * n_baseline
    baseline = n_baseline * d * inputs.rl_d + (w - n_baseline * d)
    on_ssd = w - n_cxl * d - n_cxl * d / inputs.c
    cxl = n_cxl * d * inputs.rl_d + n_cxl * d * _cxl_latency_per_server(inputs) + on_ssd
    return baseline, cxl


@dataclass(frozen=True, slots=True)
class ServerCost:
    """Servers and what they cost, without and with CXL; costs in the unit of ``server_cost``."""

    n_baseline: float
    n_cxl: float
    baseline_cost: float
    cxl_cost: float


def cost_of_servers(inputs: TcoInputs, *, n_baseline: float, server_cost: float) -> ServerCost:
    """Cost of ``n_baseline`` servers at ``server_cost`` each, and of the CXL servers instead."""
    n_cxl = server_ratio(inputs) * n_baseline
    return ServerCost(
        n_baseline=n_baseline,
        n_cxl=n_cxl,
        baseline_cost=n_baseline * server_cost,
        cxl_cost=n_cxl * server_cost * inputs.r_t,
    )


def check(inputs: TcoInputs, *, d: float | None, w: float | None, n_baseline: float) -> None:
    """Refuses what the model says nothing about: no time or saving of it would mean anything.

    Raises
    ------
    ValueError
        Main memory as slow as SSD or slower, CXL memory slower than SSD, a working set that the
        servers hold in memory.
    """
    if not 0 < inputs.rl_d < 1 or not 0 < inputs.rl_c < 1:
        raise ValueError(
            f"tco: rl_d = {inputs.rl_d}, rl_c = {inputs.rl_c}: latencies relative to SSD are above "
            "0 and below 1"
        )
    if d is not None and w is not None and w < n_baseline * d:
        raise ValueError(
            f"tco: w = {w:.6g} is less than the {n_baseline * d:.6g} of main memory in "
            "the servers: nothing is on SSD; give fewer servers or a larger working set"
        )


def warnings(
    inputs: TcoInputs, *, d: float | None = None, w: float | None = None, n_baseline: float = 0.0
) -> tuple[str, ...]:
    """What of the model's range of validity the inputs leave, one sentence each."""
    found = []
    if not 0 < inputs.rl_d < 1:
        found.append(f"rl_d = {inputs.rl_d}: the model holds for 0 < rl_d < 1 (SSD is 1)")
    if inputs.rl_c < inputs.rl_d:
        found.append(f"rl_c = {inputs.rl_c} below rl_d = {inputs.rl_d}: CXL faster than DRAM")
    if inputs.form == "printed":
        found.append("printed form: CXL capacity is C times main memory, congestion speeds CXL up")
    if d is not None and w is not None:
        needed = server_ratio(inputs) * n_baseline * d * (1 + 1 / inputs.c)
        if w < needed:
            found.append(
                f"w = {w:.6g} below {needed:.6g}: nothing is left on SSD, the ratio is off"
            )
    return tuple(found)


__getattr__ = old_names(__name__)
