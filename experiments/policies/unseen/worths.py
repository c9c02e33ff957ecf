"""Requests that are unlike: in rows, in weight, and in the work that their pipelines still need.

* `rows`: requests of one row together with those of 5 to 16. Rows are compared; requests are reported as everywhere.
* `weights`: a fifth of the requests is worth five times as much. What the answers are worth is compared.
* `cascades`: each answer of a model is the request to the next, of three. Only the last answer counts. In `untold` the
  policy is not told what work is ahead.

ResNet50 answers 361 rows/s one by one and 1,117 rows/s in batches of 16 on one GPU of Table 1.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from experiments.policies.load import RESNET, Group, Load, case_of, hosted, mixture, poisson
from experiments.simulator import Case

_SECONDS = 4.0


def _steady(
    name: str, count: int, rate_rps: float, *, group: str, gpus: int = 1, **fields: object
) -> Load:
    """ResNet50s that are asked at random for 100 ms."""
    asked = Group(RESNET, count, ((0.0, _SECONDS, rate_rps),), 100)
    return mixture(name, asked, group=group, gpus=gpus, compared="worth", bound="", fields=fields)


def _cascade(
    seed: int, *, count: int, rate_rps: float, slo_ms: float, gpus: int, tells: bool
) -> Case:
    models = tuple(hosted(f"{stage}-{n}", RESNET) for stage in "abc" for n in range(count))
    case = case_of(
        models, [poisson(range(count), rate_rps, slo_ms, _SECONDS, seed)], seed, _SECONDS, gpus=gpus
    )
    ids = [model.model_id for model in models]
    pipelines = tuple(tuple(ids[n::count]) for n in range(count))
    return replace(case, pipelines=pipelines, tells_work_ahead=tells)


_ROWS = (1,) * 12 + tuple(range(5, 17))
_WEIGHTS = (1.0,) * 4 + (5.0,)
_CASCADES = {
    "one": {"count": 1, "rate_rps": 500, "slo_ms": 200, "gpus": 1},
    "five": {"count": 5, "rate_rps": 500, "slo_ms": 200, "gpus": 1},
    "gpus": {"count": 5, "rate_rps": 1800, "slo_ms": 120, "gpus": 4},
}

FAMILIES: tuple[Load, ...] = (
    _steady("rows_fit", 4, 140, group="rows", rows=_ROWS),
    _steady("rows_over", 4, 260, group="rows", rows=_ROWS),
    _steady("rows_many", 15, 260, group="rows", rows=_ROWS),
    _steady("rows_gpus", 8, 900, group="rows", gpus=4, rows=_ROWS),
    _steady("weights_one", 1, 1700, group="weights", weights=_WEIGHTS),
    _steady("weights_15", 15, 1500, group="weights", weights=_WEIGHTS),
    _steady("weights_fit", 15, 850, group="weights", weights=_WEIGHTS),
    _steady("weights_rows", 8, 350, group="weights", rows=_ROWS, weights=_WEIGHTS),
    *(
        Load(f"cascade_{name}{told}", "cascades", partial(_cascade, **of, tells=not told), 500_000_000, bound="")
        for name, of in _CASCADES.items()
        for told in ("", "_untold")
    ),
)  # fmt: skip
