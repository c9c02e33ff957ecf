"""The benchmark of a Ray cluster: the rows of its table, and what is drawn of them. The cluster itself is for `test-long`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clockwright.errors import ConfigError
from clockwright.v1 import control_pb2 as pb
from experiments.bench.ray import STUDY, DeployedOnRay, Setting, WorkersSeen, by_second
from experiments.bench.restart import Inquiry
from experiments.study.bench import Findings, bench


def seen(at_s: float, *, ready: int, wanted: int = 2) -> WorkersSeen:
    kinds = {"fast": 1, "slow": ready - 1}
    return WorkersSeen(at_s=at_s, names=frozenset(), ready=kinds, wanted=wanted, draining=0)


def asked(sent_s: float, end: str = "OK", took_s: float = 0.05, kind: str = "short") -> Inquiry:
    return Inquiry(kind, sent_s, end, sent_s + took_s, num_ends=1)


ASKED = [
    *(asked(50.0), asked(50.9, "LATE"), asked(51.2, took_s=0.15)),
    # Nothing was sent in the next second.
    *(asked(53.5, took_s=9.0, kind="long"), asked(53.6, "")),
]
SEEN = [
    seen(50.3, ready=2),
    seen(51.1, ready=1),
    seen(51.8, ready=1, wanted=3),
    seen(53.9, ready=2),
]
MARKS = [(51.05, "worker lost"), (51.95, "keeper lost")]
ROWS = by_second("faults", ASKED, SEEN, MARKS)


def test_a_row_has_what_a_second_brought_and_the_workers_at_its_end() -> None:
    columns = ("second", "asked", "goodput", "ready", "wanted", "what")
    assert [tuple(row[name] for name in columns) for row in ROWS] == [
        (0, 2, 1, 2, 2, ""),
        # The answer came after its SLO; and of several looks the last counts.
        (1, 1, 0, 1, 3, "worker lost, keeper lost"),
        # Nothing was seen: as before.
        (2, 0, 0, 1, 3, ""),
        (3, 2, 1, 2, 2, ""),
    ]


def test_a_worker_counts_once_it_serves_and_until_it_leaves() -> None:
    def away() -> None:
        raise ConfigError("no controller")

    states = {"a": "READY", "b": "READY", "c": "DRAINING", "d": "JOINING"}
    operator: Any = SimpleNamespace(
        workers=lambda: [
            pb.WorkerInfo(worker_id=name, state=state) for name, state in states.items()
        ],
        # `b` has no model yet.
        workers_wanted=lambda: [
            pb.KindWanted(gpu_kind="fast", wanted=3, ready=1, joining=2, draining=1)
        ],
    )
    cluster: Any = None
    there = DeployedOnRay(cluster, [], operator, 1.0)
    there.look()
    operator.workers = away
    there.look()
    (found,) = there.seen
    assert found.names == {"a", "b"}
    assert (found.ready, found.num_ready, found.wanted, found.draining) == ({"fast": 1}, 1, 3, 1)


@pytest.mark.parametrize("parts", [("faults", "scale"), ("scale",), ()])
def test_what_was_measured_is_drawn(tmp_path: Path, parts: tuple[str, ...]) -> None:
    rows = [{**row, "part": part} for part in parts for row in ROWS]
    study = bench(
        "bench-ray",
        Setting(),
        lambda _: Findings({}, rows=rows),
        title=STUDY.title,
        panels=STUDY.panels,
    )
    study.produce(directory=tmp_path)
    assert len(study.drawn(tmp_path)) == 2 * len(parts)
    # A sweep alone has no seconds.
    assert (tmp_path / "ray.png").exists() == bool(parts)
