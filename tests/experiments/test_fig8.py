"""Figure 8 in small: its workload, its files, its bound; and what is compiled for its long runs."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import inspect
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from clockwright.errors import ConfigError
from clockwright.wire import actions
from controller.core import SchedulerConfig, events, state
from controller.telemetry.tables import OK, Telemetry
from experiments import native
from experiments.clockwork_paper import azure_replay, fig8
from experiments.clockwork_paper.azure_replay import NS_PER_MINUTE
from experiments.policies import floors
from experiments.policies.floors import FORMS, QUICK8, write_trace
from experiments.simulator import Case, Progress, Run, run
from experiments.study.study import from_command_line

# CPython's `Py_TPFLAGS_HEAPTYPE`, which classes made in Python have.
_HEAP_TYPE = 1 << 9

Produced = tuple[dict[tuple[str, str], fig8.ReplayOutcome], Path]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Produced:
    directory = tmp_path_factory.mktemp("fig8")
    outcomes: list[fig8.ReplayOutcome] = FORMS["fig8"](directory)
    return {(outcome.policy, outcome.source): outcome for outcome in outcomes}, directory


def rows(directory: Path) -> list[dict[str, str]]:
    with (directory / "fig8.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_minute_has_a_row_and_every_source_its_numbers_and_the_picture(
    quick: Produced,
) -> None:
    outcomes, directory = quick
    figures = json.loads((directory / "fig8.json").read_text())["figures"]
    table = rows(directory)
    assert [(row["source"], row["policy"], row["minute"]) for row in table] == [
        (source, policy, str(minute))
        for source in ("trace", "generator")
        for policy in ("clockwork", "edf_mh")
        for minute in range(2)
    ]
    for (policy, source), outcome in outcomes.items():
        key = f"{policy}_{source}"
        assert figures[f"{key}_goodput_rps"] == outcome.numbers["goodput_rps"] > 0
        assert figures[f"{key}_requests"] == outcome.numbers["requests"]
        assert figures[f"{key}_p50_ms"] <= figures[f"{key}_p99_ms"] <= figures[f"{key}_max_ms"]
        assert figures[f"{key}_max_ms"] <= 100
        assert 1 <= figures[f"{key}_mean_batch_size"] <= 16
        assert 0 < figures[f"{key}_active_models_per_min"] <= 122
    assert (directory / "fig8.png").stat().st_size > 10_000


def test_the_short_form_of_figure_8_is_as_recorded(quick: Produced) -> None:
    assert floors.faults("fig8", quick[1]) == []


def test_no_minute_of_figure_8_beats_its_bound(quick: Produced) -> None:
    for outcome in quick[0].values():
        # A batch is counted where it ends, the bound where its requests arrive.
        crossing = 16 * QUICK8.replay.num_workers / 60
        most_rps = outcome.bound["goodput_rps"] + crossing
        assert 0 < outcome.numbers["bounded_goodput_rps"] <= most_rps
        assert 0 < outcome.bound["gpu_load_pct"] < 100


def test_a_source_comes_at_its_rate(quick: Produced) -> None:
    for outcome in quick[0].values():
        expected = 120 * QUICK8.replay.rate_rps
        assert outcome.numbers["requests"] == pytest.approx(expected, abs=6 * expected**0.5)


def test_cold_models_and_batches_are_those_of_the_telemetry_rows(quick: Produced) -> None:
    trace = azure_replay.generated(QUICK8.replay)
    telemetry = Telemetry()
    run(azure_replay.case_of(QUICK8.replay, trace, SchedulerConfig()), telemetry=telemetry)
    for minute in quick[0]["clockwork", "generator"].rows:
        cold = {
            row.model_id
            for row in telemetry.requests
            if row.cold
            and row.outcome == OK
            and row.departure_ns // NS_PER_MINUTE == minute["minute"]
        }
        sizes = [
            row.batch_size
            for row in telemetry.actions
            if row.type == "Infer"
            and row.error == "NONE"
            and row.result_ns // NS_PER_MINUTE == minute["minute"]
        ]
        assert minute["cold_models"] == len(cold) > 0
        assert minute["mean_batch_size"] == pytest.approx(np.mean(sizes))
        by_request = np.average(sizes, weights=sizes)
        assert minute["mean_batch_size_by_request"] == pytest.approx(by_request)


def test_a_run_can_be_added_to_those_that_are_recorded(tmp_path: Path) -> None:
    replay = dataclasses.replace(QUICK8.replay, num_minutes=1, rate_rps=4.0)
    setting = dataclasses.replace(QUICK8, minutes=1, generator_minutes=1, replay=replay)

    def produce(policy: str, *, add: bool, rate: float = 1.0) -> None:
        asked = dataclasses.replace(setting, policies=(policy,), rate=rate)
        fig8.STUDY.produce(asked, tmp_path, options=f"--policies {policy}", add=add)

    with pytest.raises(ConfigError, match=r"found no .*fig8.json to add to"):
        produce("clockwork", add=True)
    produce("clockwork", add=False)
    first = json.loads((tmp_path / "fig8.json").read_text())
    first_rows = rows(tmp_path)
    produce("edf_mh", add=True)
    produce("edf_mh", add=True, rate=2.0)
    # What is repeated replaces what it repeats.
    produce("edf_mh", add=True)
    record = json.loads((tmp_path / "fig8.json").read_text())
    assert record["figures"].items() >= first["figures"].items()
    assert record["comparison"] == first["comparison"]
    twice = record["edf_mh_generator_x2"]
    assert twice["command"] == "python -m experiments fig8 --policies edf_mh --add"
    assert twice["setting"]["rate"] == 2.0
    assert twice["comparison"] == []
    assert [row["figure"] for row in record["edf_mh_generator"]["comparison"]]
    assert record["figures"]["edf_mh_generator_x2_late_per_million"] == 0
    table = rows(tmp_path)
    assert [row for row in table if row["policy"] == "clockwork"] == first_rows
    assert Counter((row["policy"], row["source"]) for row in table) == {
        ("clockwork", "generator"): 1,
        ("edf_mh", "generator_x2"): 1,
        ("edf_mh", "generator"): 1,
    }


def test_a_run_that_is_interrupted_leaves_the_minutes_it_finished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replay = dataclasses.replace(QUICK8.replay, num_minutes=4, rate_rps=10.0)
    case = azure_replay.case_of(replay, azure_replay.generated(replay), SchedulerConfig())

    def run_until_the_first_row(
        case: Case,
        on_progress: Callable[[Progress], None],
        **more: Any,  # noqa: ANN401
    ) -> Run:
        def impatient(progress: Progress) -> None:
            on_progress(progress)
            if progress.simulated_ns >= 2 * NS_PER_MINUTE:
                raise KeyboardInterrupt

        return run(case, on_progress=impatient, **more)

    monkeypatch.setattr(fig8, "run", run_until_the_first_row)
    outcome = fig8.measure("clockwork", "generator", case)
    # One row behind the run: what ends in this minute may have begun in the last.
    assert [row["minute"] for row in outcome.rows] == [0]
    assert outcome.numbers["minutes"] == 1
    assert outcome.numbers["goodput_rps"] == outcome.rows[0]["goodput_rps"]


def test_sources_are_named_by_their_rate() -> None:
    asked, words = from_command_line("fig8", QUICK8, ["--rate", "1.5"])
    assert words == "--seed 8 --rate 1.5"
    ((name, _),) = fig8.replays(asked)
    assert name == "generator_x1.5"


def test_a_record_does_not_say_where_a_trace_lay() -> None:
    _, words = from_command_line("fig8", QUICK8, ["--trace", "/somewhere"])
    assert words == "--seed 8 --trace DIR"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "0"], "rate is 0, expected 0.01 to 100"),
        (["--minutes", "3"], "minutes is 3, expected 1 to 2"),
        (["--source", "trace"], "source is 'trace', expected trace, with one, or generator"),
    ],
)
def test_what_cannot_be_replayed_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_command_line("fig8", QUICK8, words)


def test_a_small_trace_stands_for_the_whole_population(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.csv", num_functions=40, num_minutes=3)
    trace = azure_replay.recorded(QUICK8.replay, path)
    assert len(trace.functions) == 120
    assert (trace.num_minutes, trace.first_minute) == (2, 479)
    assert trace.totals[:40].tolist() == trace.totals[80:].tolist()
    workload = azure_replay.case_of(QUICK8.replay, trace, SchedulerConfig()).workload
    assert workload.expected_requests() == pytest.approx(120 * QUICK8.replay.rate_rps)


def test_the_most_popular_functions_ask_the_first_models_by_name(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.csv", num_functions=120, num_minutes=2)
    case = azure_replay.case_of(
        QUICK8.replay, azure_replay.recorded(QUICK8.replay, path), SchedulerConfig(), num_minutes=1
    )
    names = [model.model_id for model in case.cluster.models]
    assert len(names) == 122
    assert names == sorted(names)
    assert not {name.rpartition("-")[0] for name in names} & set(azure_replay.LEFT_OUT)
    (source,) = case.workload.sources
    assert list(source.models) == sorted(source.models)
    assert case.duration_ns == NS_PER_MINUTE


@pytest.mark.parametrize(
    "names", [(), ("azure2019_a_invocations.csv", "azure2019_b_invocations.csv")]
)
def test_a_folder_without_a_single_trace_is_refused_by_what_was_found(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    for name in names:
        write_trace(tmp_path / name, 2, 2)
    with pytest.raises(ConfigError, match=f"found {', '.join(names) or 'none'}, expected one file"):
        azure_replay.recorded(QUICK8.replay, tmp_path)


def test_a_trace_that_is_too_short_is_refused(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.csv", num_functions=2, num_minutes=1)
    with pytest.raises(ConfigError, match="found 1 minutes, expected 2 or more"):
        azure_replay.recorded(QUICK8.replay, path)


@pytest.mark.parametrize("module", [actions, events, state], ids=lambda module: module.__name__)
def test_a_spelled_out_constructor_is_the_one_that_the_decorator_makes(module: ModuleType) -> None:
    assert module.__file__ is not None
    text = native.spell_out(Path(module.__file__).read_text(encoding="utf-8"))
    assert text.count("def __init__") > 3
    namespace: dict[str, type] = {"__name__": module.__name__}  # type: ignore[dict-item]
    exec(text, namespace)
    for name, original in vars(module).items():
        if dataclasses.is_dataclass(original) and original.__module__ == module.__name__:
            assert parameters(namespace[name]) == parameters(getattr(module, name))


def parameters(record: type) -> list[tuple[str, object, bool]]:
    """Name, kind, and whether there is a default, of each."""
    signature = inspect.signature(record)
    return [(p.name, p.kind, p.default is p.empty) for p in signature.parameters.values()]


def test_a_spelled_out_dataclass_is_equal_to_the_original() -> None:
    source = """
from dataclasses import dataclass, field
@dataclass(slots=True, kw_only=True)
class Plain:
    number: int
    names: list[str] = field(default_factory=list)
    size: int = 4
@dataclass(frozen=True)
class Frozen:
    number: int
@dataclass(slots=True)
class Derived(Plain):
    more: int = 0
"""
    spelled: dict[str, type] = {}
    text = native.spell_out(source)
    exec(text, spelled)
    assert text.count("def __init__") == 1
    one, other = spelled["Plain"](number=1), spelled["Plain"](number=1, names=[], size=4)
    assert one == other
    assert one.names is not other.names
    assert repr(one) == "Plain(number=1, names=[], size=4)"
    assert spelled["Derived"](number=2, more=3).more == 3
    with pytest.raises(TypeError):
        spelled["Plain"](1)


def test_no_class_that_is_compiled_lies_on_the_memory_of_a_foreign_type() -> None:
    # mypyc lays a class out as if it began with `object`, but for exceptions, enums, and tuples with names. Derived from
    # `weakref.ref`, a class wrote its fields over the base's own: no reference ever reported its end, and no slab came back.
    laid_out_right = (object, int, tuple, Exception, BaseException)
    found = []
    for file in native.COMPILED:
        module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__:
                foreign = {base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE}
                found += [(file, name, base) for base in foreign.difference(laid_out_right)]
    assert not found
