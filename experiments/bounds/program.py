"""A linear program whose value is a bound, however roughly it was solved."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Inequalities:
    """A sparse matrix of rows `coefficients @ x <= limit`."""

    columns: list[NDArray[np.int64]] = field(default_factory=list)
    values: list[NDArray[np.float64]] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    def add(
        self,
        columns: NDArray[np.int64] | list[int],
        values: NDArray[np.float64] | list[float],
        limit: float,
    ) -> None:
        """Add one row."""
        self.columns.append(np.asarray(columns, dtype=np.int64))
        self.values.append(np.asarray(values, dtype=np.float64))
        self.limits.append(limit)


def solve(rows: Inequalities, upper: NDArray[np.float64], count: int) -> int:
    """Most requests served, rounded down.

    Args:
        rows: constraints.
        upper: upper limit of each variable, shape (variable,); the lower limits are zero.
        count: number of variables, from the first on, that count requests served.

    Raises:
        RuntimeError: the solver gave up, and says why.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    if not rows.limits:
        return int(upper[:count].sum())
    starts = np.concatenate(([0], np.cumsum([len(columns) for columns in rows.columns])))
    matrix = csr_array(
        (np.concatenate(rows.values), np.concatenate(rows.columns), starts),
        shape=(len(rows.limits), len(upper)),
    )
    limits = np.array(rows.limits)
    gain = (np.arange(len(upper)) < count).astype(float)
    solution = linprog(
        -gain,
        A_ub=matrix,
        b_ub=limits,
        bounds=np.column_stack((np.zeros(len(upper)), upper)),
        method="highs-ipm",
    )
    if solution.status != 0:
        raise RuntimeError(f"bound of {count} requests: {solution.message}")
    prices = np.maximum(-solution.ineqlin.marginals, 0.0)
    # Weak duality: for any prices >= 0, no x within its limits and rows gains more than this.
    surplus = np.maximum(gain - matrix.T @ prices, 0.0)
    value = float(prices @ limits + surplus @ upper)
    # The sums above are exact to some 1e-12 of their size.
    return math.floor(value * (1 + 1e-9) + 1e-6)
