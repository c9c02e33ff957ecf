"""Priority and attempt: what they make a request worth, and that no class is forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from clockwright import Client
from clockwright.errors import BadRequestError, ModelError
from clockwright.units import WEIGHT_MAX, WEIGHT_MIN
from clockwright.v1 import inference_pb2 as pb
from controller.core.quotas import Quota
from controller.front.oip.classes import Levels, worth_of
from controller.models.model_folder import read_versions
from tests.kit.catalogue_bench import make_folder
from tests.kit.double import INFER, request
from tests.kit.front_end import serving

Parameter = pb.InferParameter


def worth(levels: Levels | None, weight: float = 1.0, **parameters: int) -> float:
    message = pb.ModelInferRequest()
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    return worth_of(message, levels, weight)


def test_a_level_is_worth_more_than_the_next_and_the_default_as_much_as_any_request() -> None:
    levels = Levels(3, 2)
    assert [worth(levels, priority=level) for level in (1, 2, 3)] == [4, 1, 0.25]
    # What there is not, and 0, is the default, as at Triton.
    assert [worth(levels, priority=level) for level in (0, 4, 1 << 40)] == [1, 1, 1]
    assert worth(levels) == worth(None, priority=1) == 1
    assert worth(levels, weight=3.0, priority=1) == 12


@pytest.mark.parametrize("levels", [Levels(100, 1), Levels(100, 100), Levels(7, 3), Levels(1, 1)])
def test_any_number_of_levels_has_an_order(levels: Levels) -> None:
    worths = [worth(levels, priority=level) for level in range(1, levels.number + 1)]
    assert worths == sorted(set(worths), reverse=True)
    assert worths[levels.default - 1] == 1
    assert worths[-1] * 1.0001 >= WEIGHT_MIN
    assert worths[0] * 0.9999 <= WEIGHT_MAX


def test_a_retry_is_worth_less_than_a_first_attempt_and_more_than_the_next_level() -> None:
    assert worth(None, attempt=0) == 1
    assert worth(None, attempt=1) == 0.5
    assert worth(None, attempt=9) == worth(None, attempt=2)
    levels = Levels(2, 1)
    assert worth(levels, attempt=9) > worth(levels, priority=2)
    assert worth(levels, priority=2, attempt=1) == 0.125


def test_a_class_is_a_whole_number() -> None:
    for value in (Parameter(double_param=1.5), Parameter(string_param="1"), Parameter()):
        for name in ("priority", "attempt"):
            message = pb.ModelInferRequest(parameters={name: value})
            with pytest.raises(BadRequestError, match=f"parameter {name}: found"):
                worth_of(message, Levels(2, 1), 1.0)
    with pytest.raises(BadRequestError, match="attempt: found -1, expected 0 or more"):
        worth(None, attempt=-1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[priority]\nlevels = 3", "priority is {'levels': 3}, expected a table of levels and"),
        ("[priority]\nlevels = 0\ndefault = 0", "priority.levels is 0, expected a whole number"),
        ("[priority]\nlevels = 2\ndefault = 3", "priority.default is 3, expected a whole number"),
        ("[priority]\nlevels = 2\ndefault = true", "priority.default is True"),
    ],
)
def test_levels_that_cannot_be_are_named(tmp_path: Path, config: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_versions(make_folder(tmp_path, config=config))[-1]


def test_tritons_configuration_has_levels_too(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    text = "dynamic_batching { priority_levels: 3 default_priority_level: 2 }"
    (folder / "config.pbtxt").write_text(text)
    assert read_versions(folder)[-1].settings.priority == (3, 2)


@pytest.mark.parametrize("front", ["here", "apart"])
async def test_levels_reach_the_scheduler_and_those_above_the_default_need_a_quota(
    tmp_path: Path, front: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path, "double", config="[priority]\nlevels = 3\ndefault = 2\n")
    monkeypatch.setattr("controller.front.services.inference.RISING", 0.0)
    async with serving(tmp_path, front=front) as front_end:
        aio: Any = grpc.aio

        async def ask(tenant: str = "", **parameters: int) -> float:
            message = pb.ModelInferRequest.FromString(request(1))
            message.parameters["tenant"].string_param = tenant
            for name, value in parameters.items():
                message.parameters[name].int64_param = value
            async with aio.insecure_channel(front_end.address) as channel:
                await channel.unary_unary(INFER)(message.SerializeToString())
            return front_end.runtime.telemetry.requests[-1].weight

        # The second of two equal requests is known by its template.
        assert [await ask(priority=3) for _ in range(2)] == [0.25] * 2
        assert [await ask(priority=3, attempt=1) for _ in range(2)] == [0.125] * 2
        assert [await ask(), await ask(priority=2), await ask(attempt=1)] == [1, 1, 0.5]
        with pytest.raises(aio.AioRpcError, match="request_weight_max 1 at most, found 4"):
            await ask(priority=1)
        await front_end.quotas.set("gold", Quota(request_weight_max=4))
        assert await ask("gold", priority=1) == 4
        monkeypatch.setattr("controller.front.services.inference.RISING", 1.0)
        assert [await ask(priority=3) for _ in range(2)] == [1, 1]
        assert [await ask("gold", priority=1), await ask(attempt=1)] == [4, 1]


def test_our_client_takes_whole_numbers_for_classes() -> None:
    client = Client("127.0.0.1:1")
    for name in ("priority", "attempt"):
        with pytest.raises(
            BadRequestError, match=rf"{name}: found '1' \(str\), expected a whole number"
        ):
            client.infer("m", {}, **{name: "1"})  # type: ignore[arg-type]
