"""The input of a bound: arrivals, costs, and the GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from experiments.bounds.noise import extreme, work_ns

Times = NDArray[np.int64]

#: More than any time, and far from overflow when added to one.
NEVER_NS = 1 << 61


@dataclass(frozen=True, slots=True)
class Cost:
    """Least cost of a model, on the best of the GPUs."""

    #: Duration of one EXEC by compiled batch size.
    exec_ns: Mapping[int, int]
    #: Duration of one LOAD; then the pages that the weights take in a GPU's weights cache.
    load_ns: int = 0
    num_pages: int = 0

    def __post_init__(self) -> None:
        if not self.exec_ns or min(self.exec_ns) < 1 or min(self.exec_ns.values()) < 1:
            raise ValueError(f"exec_ns is {dict(self.exec_ns)}, expected positive sizes and times")
        if self.load_ns < 0 or self.num_pages < 0:
            raise ValueError(f"load_ns {self.load_ns}, num_pages {self.num_pages}: negative")

    def exec_of(self, *, padding: bool) -> list[int]:
        """Duration of the EXEC that answers k requests, at index k - 1; `NEVER_NS` where none does.

        With padding, a batch may hold fewer requests than its compiled size.
        """
        largest = max(self.exec_ns)
        if not padding:
            return [self.exec_ns.get(size, NEVER_NS) for size in range(1, largest + 1)]
        return [
            min(ns for size, ns in self.exec_ns.items() if size >= count)
            for count in range(1, largest + 1)
        ]


@dataclass(frozen=True, slots=True)
class Wires:
    """One direction of all links together."""

    bytes_per_s: float
    #: What a request to each model takes, shape (model,).
    request_bytes: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoundProblem:
    """Requests and the GPUs that serve them."""

    #: Arrivals, ascending, shape (request,), ns.
    arrival_ns: Times
    #: Model of each request, an index into `costs`, shape (request,).
    model: NDArray[np.int64]
    #: SLO of each request, shape (request,); an answer at arrival + SLO still counts.
    slo_ns: Times
    costs: Sequence[Cost]
    num_gpus: int = 1
    #: Pages of one GPU's weights cache. Bounds without memory ignore them.
    pages_per_gpu: int = 0
    #: Time before which nothing begins: no EXEC, no LOAD, no arrival.
    start_ns: int = 0
    #: True: any models that fit may be resident at `start_ns`. False: none is.
    warm: bool = False
    #: A batch may hold fewer requests than its compiled size, or some whose answers are too late.
    #: Without it the bounds are a little tighter, and hold only for policies that fill every batch
    #: with requests that it answers in time.
    padding: bool = True
    #: Noise of the durations (`Noise`), with which a bound holds but for a chance of one in a thousand million.
    exec_sigma: float = 0.0
    load_sigma: float = 0.0
    #: What has to be carried for a request before its deadline, where that takes time. Lengths of links are no
    #: matter of theirs: who has them takes them off the SLOs.
    wires: Sequence[Wires] = ()
    #: `arrival_ns + slo_ns`, and the latest that an EXEC may begin.
    deadline_ns: Times = field(init=False)
    latest_ns: Times = field(init=False)

    def __post_init__(self) -> None:
        for name in ("arrival_ns", "model", "slo_ns"):
            array = np.asarray(getattr(self, name), dtype=np.int64)
            if array.ndim != 1 or len(array) != len(self.arrival_ns):
                raise ValueError(f"{name} has shape {array.shape}, expected one per request")
            object.__setattr__(self, name, array)
        if len(self.arrival_ns):
            if np.any(np.diff(self.arrival_ns) < 0):
                raise ValueError("arrival_ns is not ascending")
            if self.arrival_ns[0] < self.start_ns:
                raise ValueError(f"arrival at {self.arrival_ns[0]} before start {self.start_ns}")
            if self.model.min() < 0 or self.model.max() >= len(self.costs):
                raise ValueError(f"model index beyond the {len(self.costs)} costs")
        if self.num_gpus < 1:
            raise ValueError(f"num_gpus is {self.num_gpus}, expected 1 or more")
        shortest = np.array(
            [min(cost.exec_of(padding=self.padding)) for cost in self.costs], dtype=np.int64
        )
        deadline_ns = self.arrival_ns + self.slo_ns
        object.__setattr__(self, "deadline_ns", deadline_ns)
        shortest = np.floor(shortest * self._extremes(self.exec_sigma)[0]).astype(np.int64)
        object.__setattr__(self, "latest_ns", deadline_ns - shortest[self.model])

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @property
    def span_ns(self) -> int:
        """Time from the start to the last deadline: all GPU time that could be of use, per GPU."""
        return int(self.deadline_ns.max()) - self.start_ns if len(self) else 0

    def shortest_exec_ns(self, exec_ns: int) -> int:
        """The least that an EXEC takes, by luck, that should take so long."""
        return int(exec_ns * self._extremes(self.exec_sigma)[0])

    @property
    def load_factors(self) -> tuple[float, float]:
        """What the shortest and the longest LOAD take, by luck, as a multiple of what they should."""
        return self._extremes(self.load_sigma)

    def exec_work_ns(self, time_ns: float, sums: int = 1) -> float:
        """The most EXEC time, by the costs, that is run in some time of all GPUs; one of so many sums."""
        longest_ns = max(max(cost.exec_ns.values()) for cost in self.costs)
        return self._work_ns(time_ns, self.exec_sigma, longest_ns, sums)

    def load_work_ns(self, time_ns: float, sums: int = 1) -> float:
        """The same for LOADs."""
        return self._work_ns(
            time_ns, self.load_sigma, max(cost.load_ns for cost in self.costs), sums
        )

    def _work_ns(self, time_ns: float, sigma: float, longest_ns: int, sums: int) -> float:
        return work_ns(
            time_ns, sigma, longest_ns, num_gpus=self.num_gpus, number=len(self), sums=sums
        )

    def _extremes(self, sigma: float) -> tuple[float, float]:
        if not sigma:
            return 1.0, 1.0
        away = sigma * extreme(len(self))
        return math.exp(-away), math.exp(away)

    def by_model(self) -> Iterator[tuple[Cost, NDArray[np.int64]]]:
        """Each model that has requests, and their ascending indices."""
        order = np.argsort(self.model, kind="stable")
        models, counts = np.unique(self.model, return_counts=True)
        end = 0
        for model, count in zip(models.tolist(), counts.tolist(), strict=True):
            begin, end = end, end + count
            yield self.costs[model], order[begin:end]

    def by_cost(self) -> Iterator[tuple[tuple[int, ...], list[NDArray[np.int64]]]]:
        """Durations of batches as in `exec_of`, and the requests of each model that has these: they count together."""
        found: dict[tuple[int, ...], list[NDArray[np.int64]]] = {}
        for cost, places in self.by_model():
            found.setdefault(tuple(cost.exec_of(padding=self.padding)), []).append(places)
        yield from found.items()

    def window(self, begin_ns: int, end_ns: int) -> BoundProblem:
        """The requests that arrive in [begin, end), with anything resident at the begin.

        The bounds of windows that cut a run into pieces sum to a bound of the run, because each
        gives its requests the GPUs as if there were no others. Long runs are bounded in this way.
        A batch that reaches over the cut is padded on either side, so windows allow padding.
        """
        first, end = np.searchsorted(self.arrival_ns, [begin_ns, end_ns])
        return replace(
            self.only(slice(first, end)),
            start_ns=max(begin_ns, self.start_ns),
            warm=self.warm or begin_ns > self.start_ns,
            padding=True,
        )

    def only(self, places: slice | NDArray[np.bool_]) -> BoundProblem:
        """The case without the other requests."""
        return replace(
            self,
            arrival_ns=self.arrival_ns[places],
            model=self.model[places],
            slo_ns=self.slo_ns[places],
        )
