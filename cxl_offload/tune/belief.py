"""What measured windows say of a family of curves, and so of shares that were not tried.

Every curve gets a weight by how well it fits the logarithms of the measured step times. Their
common scale is not known, so it is fitted too. No curve is exact: the time of a share may differ
from it by :data:`MISFIT`. Where a share was measured, the measurement corrects the curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cxl_offload.arrays import Floats
from cxl_offload.tune.curves import Family
from cxl_offload.tune.window import Window

MISFIT = 0.02
"""Standard deviation of a share's true time from the best curve of the family. If it is larger, a
curve says little of shares that were not tried; if it is smaller, a wrong family is believed for
too long."""

_NEGLIGIBLE = 1e-6
"""A curve whose likelihood is below this part of the best curve's is left out, to save time."""


_MOST_ERROR = 1e6
"""Relative error of a step time that says nothing; the square of a larger one may be no number."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of one share: the weighted mean of the logarithms of its step times."""

    log_s: float
    variance: float

    @classmethod
    def of(cls, window: Window) -> Measured:
        return cls(math.log(window.mean_s), min(max(window.error, 1e-4), _MOST_ERROR) ** 2)

    def and_then(self, other: Measured) -> Measured:
        """Both measurements together."""
        precision = 1.0 / self.variance + 1.0 / other.variance
        log_s = (self.log_s / self.variance + other.log_s / other.variance) / precision
        return Measured(log_s, 1.0 / precision)


@dataclass(frozen=True, slots=True)
class Belief:
    """Log step times of every share: means and covariance, and what the curves say of the step.

    Attributes
    ----------
    log_s
        float64 ``(shares,)``: mean of the logarithm of the step time in seconds.
    covariance
        float64 ``(shares, shares)``: of these logarithms.
    memory_part, pressure
        Weighted means over the curves, see :class:`cxl_offload.tune.curves.Family`.
    """

    log_s: Floats
    covariance: Floats
    memory_part: float
    pressure: float

    @classmethod
    def from_measurements(cls, family: Family, measured: dict[int, Measured]) -> Belief:
        """Belief after ``measured``: index of a share to what was measured there.

        Raises
        ------
        ValueError
            Nothing was measured.
        """
        if not measured:
            raise ValueError("a belief needs at least one measured share")
        at = np.fromiter(measured, dtype=np.intp)
        seen = np.array([measured[int(index)].log_s for index in at])
        noise = np.array([measured[int(index)].variance for index in at])
        weight = 1.0 / (noise + MISFIT**2)
        off = seen[None, :] - family.log_time[:, at]
        scale = (off * weight).sum(axis=1) / weight.sum()
        unfit = ((off - scale[:, None]) ** 2 * weight).sum(axis=1)
        likelihood = np.exp(-0.5 * (unfit - unfit.min()))
        kept = np.flatnonzero(likelihood > _NEGLIGIBLE)
        likelihood = likelihood[kept] / likelihood[kept].sum()
        curves = family.log_time[kept] + scale[kept, None]
        mean = likelihood @ curves
        spread = curves - mean
        prior = (spread * likelihood[:, None]).T @ spread + MISFIT**2 * np.eye(curves.shape[1])
        # Measured shares correct the curves (a Gaussian update with the noise of the windows).
        gain = np.linalg.solve(prior[np.ix_(at, at)] + np.diag(noise), prior[at]).T
        mean = mean + gain @ (seen - mean[at])
        covariance = prior - gain @ prior[at]
        return cls(
            mean, covariance, float(likelihood @ family.memory_part[kept]),
            float(np.exp(likelihood @ np.log(family.pressure[kept]))),
        )  # fmt: skip

    @classmethod
    def of_sum(cls, parts: Sequence[tuple[Belief, float]]) -> Belief:
        """Belief about a sum of times. Each belief comes with its part of the sum.

        To first order, the logarithm of the sum changes by the weighted changes of the parts.
        """
        zero = np.zeros_like(parts[0][0].log_s)
        log_s = sum((weight * one.log_s for one, weight in parts), zero)
        own = (weight**2 * one.covariance for one, weight in parts)
        covariance = sum(own, np.outer(zero, zero))
        memory_part = sum(weight * one.memory_part for one, weight in parts)
        pressure = sum(weight * one.pressure for one, weight in parts)
        return cls(log_s, covariance, memory_part, pressure)

    def deviation_against(self, index: int) -> Floats:
        """Standard deviation of the log ratio of every share's time to that of share ``index``."""
        own = np.diag(self.covariance)
        variance = own + own[index] - 2.0 * self.covariance[index]
        result: Floats = np.sqrt(np.maximum(variance, 0.0))
        return result
