"""A study is a declaration: what varies, what is counted, what the paper says, what is drawn.

A file of a study ends with `STUDY = Study(...)`, and `python -m experiments NAME` runs it: it asks, prints a line for each
answer, and leaves `NAME.json` (the numbers, ours and the paper's), `NAME.csv` (a row for each answer) and `NAME.png` in
`experiments/results/`. The same setting gives the same table, bit for bit, wherever nothing is timed.

Its answers, *points*, are dataclasses, and their fields are the columns: each is spelt once, there, with its unit. A number
of a point is a column of the table, and a figure of the record under the point's key. Where a field is more or less
than that, its type is `Annotated` with a `Column`; one that is a dataclass itself has a column for each of its fields.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args, get_type_hints

from clockwright.errors import ConfigError
from experiments.results_file import RESULTS, add_results, write_results
from experiments.study.pictures import Panel, draw
from experiments.study.pool import on_cluster
from experiments.study.report import write_csv

# A gap to the paper beyond this share needs a reason.
_NOTABLE_GAP = 0.10

SettingT = TypeVar("SettingT")
PointT = TypeVar("PointT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """How a field of a point is written, where its name and its number do not say so."""

    #: The figure's key, of the point's `key`, the field's `name` and other fields; empty: no figure. `part` is the
    #: name inside a field that is a dataclass itself; its `name` is that of both, FIELD_PART.
    figure: str = "{key}_{name}"
    #: A figure is so many times the table's number.
    factor: float = 1.0
    in_table: bool = True


#: A share in the table, percent in the record.
SHARE = Column(figure="{key}_{name}_pct", factor=100.0)
ONLY_TABLE = Column(figure="")
ONLY_RECORD = Column(in_table=False)
NO_COLUMN = Column(figure="", in_table=False)


@dataclass(frozen=True, slots=True)
class Paper:
    """A number that the paper states in its text, and ours."""

    #: Key of the paper's number; `paper_` is set before it.
    key: str
    number: float
    #: Why ours may differ; printed where they are more than a tenth apart.
    why: str = ""
    #: Keys of our numbers, where they are not those of all policies: `{policy}_KEY`.
    ours: tuple[str, ...] = ("{policy}_{key}",)


#: A row of a table: its cells, by column.
Row = Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """What a study left in a folder."""

    #: By what follows the study's name in a table's, its rows.
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    #: All of `NAME.json`.
    record: Mapping[str, Any]

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Rows of the table that is called as the study."""
        return self.tables[""]

    @property
    def figures(self) -> Mapping[str, float]:
        """Every number, by its key; the paper's begin with `paper_`."""
        found: Mapping[str, float] = self.record["figures"]
        return found


def own_rows(_setting: object, points: Sequence[object]) -> Iterator[Row]:
    """The points themselves are a table's rows, a column for each field that has one."""
    for point in points:
        cells = cells_of(point).items()
        yield {name: value for name, (column, value) in cells if column.in_table}


@dataclass(frozen=True, slots=True, kw_only=True)
class Study(Generic[SettingT, PointT]):
    """One question to the system, and all that is kept of the answers."""

    #: Name of all files, and of the command.
    name: str
    #: How much is asked where the command line does not say; every plain field is an option of it.
    setting: SettingT
    #: Asks, one point after the other.
    ask: Callable[[SettingT], Iterable[PointT]]
    #: How the names of a point's figures begin, of its fields: `{policy}_slo{slo_ms}`. Empty: it has none of its own,
    #: and what is printed of it is what it says of itself.
    key: str
    #: Figures that are not a point's own.
    figures: Callable[[SettingT, Sequence[PointT]], Mapping[str, float]] = lambda *_: {}
    #: By what follows the study's name in a table's: its rows, of which all have the same columns.
    tables: Mapping[str, Callable[[SettingT, Sequence[PointT]], Iterable[Row]]] = field(
        default_factory=lambda: {"": own_rows}
    )
    paper: tuple[Paper, ...] = ()
    #: Over the picture: what is seen, one sentence.
    title: str = ""
    #: What is drawn, row by row, of nothing but the record.
    panels: Callable[[SettingT, StudyRecord], Sequence[Sequence[Panel]]] | None = None
    #: Draws, into a PNG, what no panels can show of it.
    picture: Callable[[Path, SettingT, StudyRecord], None] | None = None
    #: Anything else worth keeping, by key of the record.
    extra: Callable[[SettingT, Sequence[PointT]], Mapping[str, Any]] = lambda *_: {}
    #: The command's name, where it is another.
    command: str = ""
    #: The part that it is of a record that others share.
    part: str = ""
    #: What the answers say is broken; the command ends with it, after all is recorded.
    fault: Callable[[Sequence[PointT]], str] = lambda _: ""
    #: One line about a point, of `key` and the point.
    say: Callable[[str, PointT], str] = lambda key, point: said(key, point)
    #: The folder of the results in which the files are.
    folder: str = ""

    def produce(
        self,
        setting: SettingT | None = None,
        directory: Path | None = None,
        *,
        options: str = "",
        add: bool = False,
    ) -> list[PointT]:
        """Ask, print, write and draw.

        Args:
            setting: how much is asked; None: as declared.
            directory: where the files go; None: to the results.
            options: what the command line had, for the record.
            add: keep what is recorded of other points.

        Returns:
            Every point.

        Raises:
            ConfigError: there is no record to add to, or its rows do not say which points they are.
        """
        setting = self.setting if setting is None else setting
        directory = directory or RESULTS / self.folder
        if add:
            self._check_addable(directory)
        points = []
        for point in self.ask(setting):
            points.append(point)
            print(self.say(self.key, point), flush=True)
        for ending, rows in self.tables.items():
            table = list(rows(setting, points))
            target = directory / f"{self.name}{ending}.csv"
            kept = _others(target, table, axes_of(self.key)) if add else []
            columns = list(table[0]) if table else []
            # What was written before may have had other columns.
            cells = ([row.get(name, "") for name in columns] for row in [*kept, *table])
            write_csv(target, columns, cells)
        figures = self.figures_of(setting, points)
        compared = beside_paper(self.paper, figures, getattr(setting, "policies", ("",)))
        _show(compared)
        words = (self.command or self.name, options, "--add" * add)
        command = f"python -m experiments {' '.join(filter(None, words))}"
        about = {
            "comparison": compared,
            "setting": asdict(setting) | _said_otherwise(setting),  # type: ignore[call-overload]
            **self.extra(setting, points),
        }
        if add or self.part:
            part = self.part or ", ".join(key_of(self.key, point) for point in points) or options
            add_results(
                self.name, figures, part=part, command=command, extra=about, directory=directory
            )
        else:
            seeds = getattr(setting, "seeds", None) or [getattr(setting, "seed", None)]
            write_results(
                self.name,
                figures,
                command=command,
                seeds=[seed for seed in seeds if seed is not None],
                extra=about,
                directory=directory,
            )
        if self.panels is not None or self.picture is not None:
            self.redraw(directory, setting)
        return points

    def _check_addable(self, directory: Path) -> None:
        """Refuse to add to what is not there, or to rows that cannot be told apart, before anything is asked."""
        for name in (f"{self.name}.json", *(f"{self.name}{ending}.csv" for ending in self.tables)):
            if not (path := directory / name).exists():
                raise ConfigError(f"--add: found no {path} to add to, expected one")
            if path.suffix != ".csv":
                continue
            with path.open(newline="", encoding="utf-8") as file:
                missing = axes_of(self.key) - set(next(csv.reader(file), ()))
            if missing or not self.key:
                words = ", ".join(sorted(missing)) or "that tells points apart"
                raise ConfigError(f"--add: found no column {words} in {name}, expected it")

    def figures_of(self, setting: SettingT, points: Sequence[PointT]) -> dict[str, float]:
        """Name every number, the paper's too."""
        figures: dict[str, float] = {}
        for point in points if self.key else ():
            figures |= point_figures(self.key, point)
        figures |= self.figures(setting, points)
        return figures | {f"paper_{paper.key}": paper.number for paper in self.paper}

    def redraw(self, directory: Path | None = None, setting: SettingT | None = None) -> None:
        """Draw what is recorded, without asking again.

        Args:
            directory: where the record and its tables are.
            setting: how much was asked; None: as declared.

        Raises:
            ConfigError: nothing is recorded, or it lacks what is drawn.
        """
        if self.panels is None and self.picture is None:
            raise ConfigError(f"--draw: found no panels in {self.name}, expected some")
        directory = directory or RESULTS / self.folder
        target = directory / f"{self.name}.png"
        try:
            setting = self.setting if setting is None else setting
            if self.picture is not None:
                self.picture(target, setting, read_recorded(directory, self.name, self.tables))
            else:
                draw(target, self.title, self.drawn(directory, setting))
        except (OSError, KeyError) as error:
            raise ConfigError(
                f"--draw: found no {error} in the record of {self.name}; run it instead"
            ) from error

    def drawn(
        self, directory: Path = RESULTS, setting: SettingT | None = None
    ) -> Sequence[Sequence[Panel]]:
        """Panels of what a folder's record has; without any, none.

        Raises:
            OSError, KeyError: the record lacks what is drawn.
        """
        if self.panels is None:
            return []
        return self.panels(
            self.setting if setting is None else setting,
            read_recorded(directory, self.name, self.tables),
        )

    def main(self, arguments: Sequence[str]) -> str:
        """Produce it as a command line asks.

        Returns:
            What the answers say is broken; empty: nothing.

        Raises:
            ConfigError: the setting cannot be as it is asked to be.
        """
        frame = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
        frame.add_argument("--add", action="store_true", help="keep what is recorded of others")
        frame.add_argument("--draw", action="store_true", help="only the picture, of the tables")
        frame.add_argument("--directory", type=Path, help="where all files go")
        frame.add_argument(
            "--ray", default="", help="HOST:PORT of a Ray cluster that runs the calls"
        )
        asked, others = frame.parse_known_args(arguments)
        if asked.draw:
            self.redraw(asked.directory)
            return ""
        more = frame.format_help()
        name = self.command or self.name
        setting, options = from_command_line(name, self.setting, others, more=more)
        if asked.ray and not hasattr(setting, "processes"):
            raise ConfigError(f"--ray: {name} runs in one process, expected one with --processes")
        with on_cluster(asked.ray):
            points = self.produce(setting, asked.directory, options=options, add=asked.add)
        return self.fault(points)


def read_recorded(directory: Path, name: str, endings: Iterable[str]) -> StudyRecord:
    """Read what a study left: its record, and the tables whose names end so."""
    record = json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
    tables = {ending: read_table(directory / f"{name}{ending}.csv") for ending in endings}
    return StudyRecord(tables=tables, record=record)


def read_table(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a table; what looks like a number is one."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: _cell(cell) for name, cell in row.items()} for row in csv.DictReader(file)]


def _cell(text: str) -> float | int | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# --- points ---------------------------------------------------------------------------------------


def over(measure: Callable[..., PointT], **axes: str) -> Callable[[SettingT], Iterator[PointT]]:
    """Ask for every combination of some axes, the last of them fastest.

    Args:
        measure: answers for a setting and a value of each axis.
        axes: by parameter of `measure`, the field of the setting that has its values.
    """

    def ask(setting: SettingT) -> Iterator[PointT]:
        for values in product(*(getattr(setting, name) for name in axes.values())):
            yield measure(setting, **dict(zip(axes, values, strict=True)))

    return ask


def cells_of(point: object) -> dict[str, tuple[Column, Any]]:
    """How each field of a point is written, and its value; fields that are no number or word are not, unless they say so."""
    hints = get_type_hints(type(point), include_extras=True)
    found: dict[str, tuple[Column, Any]] = {}
    for entry in fields(point):  # type: ignore[arg-type]
        hint, value = hints[entry.name], getattr(point, entry.name)
        column = next((c for c in getattr(hint, "__metadata__", ()) if isinstance(c, Column)), None)
        if column is None:
            if hint in (int, float, str, bool):
                found[entry.name] = ONLY_TABLE if hint is str else Column(), value
            continue
        kinds = (hint.__origin__, *get_args(hint.__origin__))
        whole = next((kind for kind in kinds if is_dataclass(kind)), None)
        if whole is None or column == NO_COLUMN:
            found[entry.name] = column, value
            continue
        for part in fields(whole):
            figure = column.figure.replace("{part}", part.name)
            cell = getattr(value, part.name, None)
            found[f"{entry.name}_{part.name}"] = replace(column, figure=figure), cell
    return found


def axes_of(key: str) -> set[str]:
    """The fields that tell a study's points apart."""
    names = (name for _, name, _, _ in string.Formatter().parse(key) if name)
    return {name.partition(".")[0] for name in names}


def key_of(key: str, point: object) -> str:
    """Name a point by its axes."""
    return key.format(**{name: getattr(point, name) for name in axes_of(key)})


def _others(target: Path, table: Sequence[Row], axes: set[str]) -> list[Row]:
    """Rows of a table that was written before which no row of this one replaces."""

    def place(row: Row) -> tuple[str, ...]:
        return tuple(str(cell) for name, cell in row.items() if name in axes)

    again = {place(row) for row in table}
    with target.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if place(row) not in again]


def point_figures(key: str, point: object) -> dict[str, float]:
    """A point's own figures, under its key."""
    cells = cells_of(point)
    values = {name: value for name, (_, value) in cells.items()}
    axes = axes_of(key)
    values["key"] = key_of(key, point)
    return {
        column.figure.format(**values, name=name): (
            value * column.factor if column.factor != 1.0 else value
        )
        for name, (column, value) in cells.items()
        if column.figure and name not in axes and value is not None
    }


def said(key: str, point: object) -> str:
    """One line about a point: its key, and its numbers."""
    if not key:
        return str(point)
    numbers = (
        f"{name} {value:.4g}"
        for name, (_, value) in cells_of(point).items()
        if isinstance(value, int | float) and f"{{{name}" not in key
    )
    return f"{key_of(key, point)}: {', '.join(numbers)}"


def beside_paper(
    papers: Iterable[Paper], figures: Mapping[str, float], policies: Iterable[str]
) -> list[dict[str, float | str]]:
    """Compare our numbers with the paper's, with the reason if they differ by more than 10 %.

    Args:
        papers: the paper's numbers.
        figures: ours, by key; those that are missing are left out.
        policies: stand for `{policy}` in the keys of ours.
    """
    table: list[dict[str, float | str]] = []
    policies = tuple(policies)
    for paper in papers:
        patterns = [form.replace("{key}", paper.key) for form in paper.ours]
        keys = dict.fromkeys(
            form.replace("{policy}", policy) for policy in policies for form in patterns
        )
        for key in keys:
            if key not in figures or not paper.number:
                continue
            gap = figures[key] / paper.number - 1
            table.append(
                {
                    "figure": key,
                    "ours": figures[key],
                    "paper": paper.number,
                    "gap_pct": 100 * gap,
                    "reason": paper.why if abs(gap) > _NOTABLE_GAP else "",
                }
            )
    return table


def _show(table: Iterable[Mapping[str, float | str]]) -> None:
    """Print the comparison with the paper; a reason that several numbers share, once."""
    before = ""
    for row in table:
        reason = str(row["reason"])
        print(f"{row['figure']}: {row['ours']:.4g}, paper {row['paper']:.4g}", end="")
        print(f" ({row['gap_pct']:+.0f} %) {reason if reason != before else ''}".rstrip())
        before = reason or before


def chosen(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check what a setting's row of words names.

    Raises:
        ConfigError: a word is none of the known.
    """
    known = tuple(known)
    for word in given:
        if word not in known:
            raise ConfigError(f"{what} is {word!r}, expected some of {', '.join(known)}")


# --- the command line -----------------------------------------------------------------------------


def _said_otherwise(setting: object) -> dict[str, Any]:
    """Fields that differ from machine to machine: a record says another word of them (`metadata`), or nothing."""
    return {
        entry.name: entry.metadata["said"]
        for entry in fields(setting)  # type: ignore[arg-type]
        if "said" in entry.metadata and getattr(setting, entry.name)
    }


def from_command_line(
    name: str, setting: SettingT, arguments: Sequence[str], *, more: str = ""
) -> tuple[SettingT, str]:
    """Change a setting as the command line asks: each number, word, and row of either is an option.

    Args:
        name: the study, for `--help`.
        setting: the setting that holds where nothing is asked.
        arguments: the command line.
        more: ends the help.

    Returns:
        The setting, and the options that repeat it: the seed, and all that was changed.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments {name}",
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plain: dict[str, Any] = {}
    for entry in fields(setting):  # type: ignore[arg-type]
        value = getattr(setting, entry.name)
        option = f"--{entry.name.replace('_', '-')}"
        values = value if isinstance(value, tuple) else (value,)
        kinds = {type(one) for one in values}
        if value is False:
            plain[entry.name] = value
            parser.add_argument(option, action="store_true")
        elif len(kinds) == 1 and kinds <= {int, float, str}:
            plain[entry.name] = value
            parser.add_argument(
                option,
                type=kinds.pop(),
                nargs="+" if isinstance(value, tuple) else None,
                default=value,
            )
    chosen = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in vars(parser.parse_args(arguments)).items()
    }
    changed = {key: value for key, value in chosen.items() if key == "seed" or value != plain[key]}
    words = []
    for key, value in (changed | _said_otherwise(replace(setting, **changed))).items():  # type: ignore[type-var]
        words.append(f"--{key.replace('_', '-')}")
        if value is not True:
            words += map(str, value) if isinstance(value, tuple) else [str(value)]
    return replace(setting, **changed), shlex.join(words)  # type: ignore[type-var]
