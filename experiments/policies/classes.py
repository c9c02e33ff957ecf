"""Who is shed first when requests have a priority or say that they are retries, and what that costs.

Copies of ResNet50 share one simulated GPU, whose capacity the loads are multiples of. `levels`: each request has one of
three levels of priority, at random, of which the middle one is the default. `retries`: half of them say that they were
tried before, of models without levels. The worths are those that fronts make of the two (`controller.front.oip.classes`),
and so is the part of the lowest level that counts as the default. The price is the goodput that the same arrivals have when
all are alike, less theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Annotated

from clockwright.v1 import inference_pb2 as pb
from controller.front.oip.classes import RISING, Levels, worth_of
from controller.telemetry.tables import OK, Telemetry
from experiments.policies.one_gpu import OneGpu
from experiments.simulator import run
from experiments.study.compared import POLICIES
from experiments.study.study import SHARE, Study, over

TITLE = "Under overload the lowest class is shed first, and a part of it is answered all the same (simulated)."

#: Requests of a class in the list that the simulator draws from.
_EACH = round(1 / RISING)


class Worth(float):
    """A worth that says whose it is: what rises is worth as much as another class."""

    of: str


def _worths(of: str, levels: Levels | None = None, **parameters: int) -> list[Worth]:
    """The worths of a class, as many of each as fronts make."""
    message = pb.ModelInferRequest()
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    worths = [Worth(worth_of(message, levels, 1.0)) for _ in range(_EACH)]
    if levels is not None:
        worths[0] = Worth(max(worths[0], 1.0))
    for each in worths:
        each.of = of
    return worths


#: By what is tried: its classes, the highest first, and what the simulator draws worths from.
CLASSES = {
    "alike": ("all",),
    "levels": ("level1", "level2", "level3"),
    "retries": ("first", "retry"),
}
_DRAWN = {
    "alike": _worths("all"),
    "levels": [w for n in (1, 2, 3) for w in _worths(f"level{n}", Levels(3, 2), priority=n)],
    "retries": [*_worths("first"), *_worths("retry", attempt=1)],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(OneGpu):
    """How much is simulated."""

    tried: tuple[str, ...] = ("levels", "retries")
    nums_models: tuple[int, ...] = (1, 4, 15)
    #: Offered loads, as multiples of what the GPU could answer in the best batches.
    loads: tuple[float, ...] = (1.0, 1.5, 2.0)
    seeds: tuple[int, ...] = (1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shed:
    """Classes under one load; all seeds together."""

    tried: str
    num_models: int
    load: float
    goodput: Annotated[float, SHARE]
    #: Points of goodput lost against the same arrivals without classes.
    price_points: float
    #: The part of its requests that is answered: of the highest class, the next, and the lowest.
    highest: Annotated[float, SHARE]
    middle: Annotated[float, SHARE]
    lowest: Annotated[float, SHARE]
    #: How much more is answered of a class than of the next, at least.
    order_points: float


@cache
def play(setting: Setting, tried: str, num_models: int, load: float) -> Mapping[str, float]:
    """Simulate all seeds. Returns by class, and for all together, the part that is answered."""
    asked, answered = Counter[str](), Counter[str]()
    for seed in setting.seeds:
        policy, weights = POLICIES["edf_mh"], tuple(_DRAWN[tried])
        case = setting.case(num_models, load, seed, scheduler=policy, weights=weights)
        telemetry = Telemetry(1 << 30)
        run(case, telemetry=telemetry)
        for each in telemetry.requests:
            if each.arrival_ns >= setting.warmup_ns:
                assert isinstance(each.weight, Worth)
                asked[each.weight.of] += 1
                answered[each.weight.of] += each.outcome == OK
    found = {name: answered[name] / asked[name] for name in asked}
    return found | {"all": answered.total() / asked.total()}


def measure(setting: Setting, tried: str, num_models: int, load: float) -> Shed:
    """Simulate one load with classes, and without."""
    found = play(setting, tried, num_models, load)
    alike = play(setting, "alike", num_models, load)["all"]
    shares = [found[name] for name in CLASSES[tried]]
    return Shed(
        tried=tried,
        num_models=num_models,
        load=load,
        goodput=found["all"],
        price_points=100 * (alike - found["all"]),
        highest=shares[0],
        middle=shares[len(shares) // 2],
        lowest=shares[-1],
        order_points=100 * min(a - b for a, b in pairwise(shares)),
    )


def figures(_setting: Setting, points: Sequence[Shed]) -> Mapping[str, float]:
    """Sum the points up: the worst of each kind, where more was asked than can be answered."""
    over_loaded = [point for point in points if point.load > 1] or list(points)
    return {
        f"{tried}_{name}": worst(
            getattr(point, field) for point in over_loaded if point.tried == tried
        )
        for tried in dict.fromkeys(point.tried for point in over_loaded)
        for name, field, worst in (
            ("price_points_max", "price_points", max),
            ("order_points_min", "order_points", min),
            ("lowest_share_min", "lowest", min),
        )
    }


STUDY = Study(
    name="classes",
    setting=Setting(),
    ask=over(measure, tried="tried", num_models="nums_models", load="loads"),
    key="{tried}_m{num_models}_x{load:g}",
    figures=figures,
    title=TITLE,
)
