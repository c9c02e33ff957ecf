"""Benchmarks are studies of one answer: numbers that are named as they are measured.

A file of a benchmark ends with `STUDY = bench("bench-NAME", Setting(), measure)`, and `python -m experiments bench-NAME`
runs it. What the setting has is an option, what was measured is printed, and `NAME.json` is left, or a part of a record
that several benchmarks share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from typing_extensions import override

from clockwright.errors import ConfigError
from experiments.study.pictures import Panel
from experiments.study.study import Row, Study, StudyRecord

SettingT = TypeVar("SettingT")


@dataclass(frozen=True, slots=True)
class Findings:
    """All that one run of a benchmark has found."""

    #: Numbers by key; units are in the key.
    figures: Mapping[str, float]
    #: Anything else worth keeping, by key of the record.
    extra: Mapping[str, Any] = field(default_factory=dict)
    #: What is broken; empty: nothing was found.
    fault: str = ""
    #: Rows of its table, if it has one.
    rows: Sequence[Row] = ()

    @override
    def __str__(self) -> str:
        return "\n".join(f"{key:45} {figure:14,.3f}" for key, figure in self.figures.items())


def bench(
    name: str,
    setting: SettingT,
    measure: Callable[[SettingT], Findings | Mapping[str, float]],
    *,
    record: str = "",
    part: str = "",
    folder: str = "",
    title: str = "",
    panels: Callable[[SettingT, StudyRecord], Sequence[Sequence[Panel]]] | None = None,
) -> Study[SettingT, Findings]:
    """Declare a benchmark.

    Args:
        name: the command's.
        setting: how much is measured where the command line does not say.
        measure: measures, for minutes maybe.
        record: the record's name; empty: the command's without its beginning.
        part: of that record, where others leave theirs in it, too.
        folder: of the results, in which the record is.
        title: over the picture.
        panels: what is drawn, of the table of `Findings.rows` too.
    """

    def ask(setting: SettingT) -> Sequence[Findings]:
        measured = measure(setting)
        return [measured if isinstance(measured, Findings) else Findings(measured)]

    return Study(
        name=record or name.removeprefix("bench-"),
        command=name,
        part=part,
        folder=folder,
        setting=setting,
        ask=ask,
        key="",
        figures=lambda _, found: found[0].figures,
        tables={} if panels is None else {"": lambda _, found: found[0].rows},
        extra=lambda _, found: found[0].extra,
        fault=lambda found: found[0].fault,
        title=title,
        panels=panels,
    )


def need_cores(number: int) -> None:
    """Refuse to measure on fewer cores than processes that would disturb each other.

    Raises:
        ConfigError: there are fewer.
    """
    found = len(os.sched_getaffinity(0))
    if found < number:
        raise ConfigError(
            f"found {found} core, expected {number}: servers and clients disturb each other"
        )
