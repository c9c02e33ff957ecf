"""Write `experiments/results/README.md`: all that was measured, compared with what the papers say, from the records.

The words are in `results_page.md`, next to this file; every number there is a field that names a record and a
key, `{fig5[edf_mh_slo25_goodput_rps]:.0f}`, and a record that lacks the key is an error. Fields without a
format are whole tables, which this module makes. A paragraph below `<!-- with RECORD -->` or `<!-- with RECORD[KEY] -->`
is left out until that was measured. `make bench NAME=results_page` writes the page again after a record
has changed; a test compares what is committed with what would be written.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from typing_extensions import override

from experiments.__main__ import called, declared
from experiments.results_file import RESULTS
from experiments.study.aims import AIMS, MISSED, judged, limit_of

TEMPLATE = Path(__file__).with_suffix(".md")
PAGE = RESULTS / "README.md"

#: Families of `unseen` in which a refused client asks again, so that its answers count as a part of the bound.
IN_LOOPS = ("small_clients", "small_clients_few", "think")


class Figure(float):
    """A number of a record, with two formats more.

    `p1` gives a share in percent with one digit. `most2` rounds up to two significant digits, for a sentence
    that says "at most".
    """

    @override
    def __format__(self, spec: str) -> str:
        if spec.startswith("p"):
            return f"{100 * self:.{spec[1:]}f}"
        if spec.startswith("most"):
            digits = int(spec[4:])
            unit = 10 ** (math.floor(math.log10(self)) + 1 - digits)
            return f"{math.ceil(round(self / unit, 9)) * unit:.{digits}g}"
        return super().__format__(spec)


class Record:
    """One `NAME.json`: `record[key]` is a figure, `record.word` anything else in it, or a table of it."""

    def __init__(self, path: Path) -> None:
        self._content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        #: Next to the page.
        self.file = str(path.relative_to(RESULTS))

    def __getitem__(self, key: str) -> Figure:
        return Figure(self._content["figures"][key])

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        try:
            return self._content[name]
        except KeyError as error:
            raise AttributeError(f"{self.file} has no {name!r}") from error

    @property
    def beside_paper(self) -> str:
        """The numbers that the paper's text has too, ours, and why they differ."""
        reasons = list(
            dict.fromkeys(entry["reason"] for entry in self.comparison if entry["reason"])
        )
        rows = []
        for entry in self.comparison:
            gap = f"{entry['gap_pct']:+.1f}"
            if reason := entry["reason"]:
                gap += f" ({reasons.index(reason) + 1})"
            rows.append(
                (f"`{entry['figure']}`", _short(entry["paper"]), _short(entry["ours"]), gap)
            )
        notes = "".join(f"\n{place}. {reason}." for place, reason in enumerate(reasons, start=1))
        return _table(("", "paper", "ours", "gap, %"), rows) + (f"\n{notes}" if notes else "")

    @property
    def beside_live(self) -> str:
        """Figures of a live run compared with the simulated ones of the same case."""
        return _table(
            ("case", "", "live", "simulated", "gap, %", "aim, %", "reason"),
            (
                (
                    entry["case"],
                    f"`{entry['metric']}`",
                    *(_short(entry[key]) for key in ("live", "simulated")),
                    "" if entry["gap_pct"] is None else f"{entry['gap_pct']:+.1f}",
                    _short(entry["aim_pct"]),
                    entry["reason"],
                )
                for entry in self.comparison
            ),
        )

    @property
    def aims(self) -> dict[str, str]:
        """What each figure that has an aim is aimed at, in words."""
        return {aim.key: aim.words for aim in AIMS[self._name]}

    @property
    def _name(self) -> str:
        return Path(self.file).with_suffix("").as_posix()

    @property
    def aims_table(self) -> str:
        """Aims, measured figures, and the reasons of any misses."""
        rows = []
        for aim in AIMS[self._name]:
            figure = aim.measured(self.figures)
            outcome = aim.outcome(figure)
            why = f": {aim.obstacle}" if outcome == MISSED else ""
            rows.append((f"`{aim.key}`", aim.words, aim.shown(figure), outcome + why))
        return _table(("", "aim", "measured", ""), rows)


def records() -> dict[str, Record]:
    """Read all records, by name; one in a folder is named FOLDER_NAME."""
    return {
        "_".join(path.relative_to(RESULTS).with_suffix("").parts): Record(path)
        for path in sorted(RESULTS.rglob("*.json"))
    }


def _front_rows(record: Record) -> str:
    """Shares of goodput where the server's own process is the limit: a row per server, connections and SLO."""
    rows = []
    for key in record.figures:
        if found := re.fullmatch(r"(\w+)_c(\d+)_slo(\d+)_share_x0.9", key):
            server, connections, slo_ms = found.groups()
            shares = (
                record[f"{server}_c{connections}_slo{slo_ms}_share_x{x}"]
                for x in ("0.9", "1.5", "2", "3")
            )
            cells = " | ".join(f"{share:.2f}" for share in shares)
            rows.append(f"| {server}, {connections} connections, SLO {slo_ms} ms | {cells} |")
    return "\n".join(rows)


def page() -> str:
    """Give the page.

    Raises:
        KeyError: a record, or a number in one, that the page names is missing.
    """
    found = records()
    text = measured_only(TEMPLATE.read_text(encoding="utf-8"), found).format(
        **found,
        origins=_origins(found),
        other_servers=_csv_table(RESULTS / "other_servers.csv"),
        sim_gap_aim=limit_of("fig8_live", "gpus6_sim_gap_pct"),
        aims=_all_aims(),
        pictures=_pictures(),
        live_aims=found["live"].aims_table,
        front_rows=_front_rows(found["front"]),
        edf_mh_shares=_shares(found["edf_mh"]),
        pieces_worth=_pieces(found["ablation"]),
        num_edf_mh_loads=len(_between(found["edf_mh"], "edf_mh_", "_goodput_pct")),
        num_largest_batches=_num_largest_batches(found["clipper_fig4"]),
        isolation_curve=_isolation_curve(found["unseen"]),
        behind={policy: _behind(policy) for policy in ("edf_mh", "edf_mh_isolation_0")},
        of_bound={
            family: of_bound
            for (family, policy), (_, of_bound) in _unseen().items()
            if policy == "edf_mh"
        },
        edf_mh_worst=found["edf_mh"].worst_scenario["clockwork"],
        starts_over=_hours_over_clairvoyant(RESULTS / "autoscale_minutes.csv", "starts"),
    )
    return "\n\n".join(_filled(block) for block in text.split("\n\n") if block)


def measured_only(template: str, found: Mapping[str, Record]) -> str:
    """Leave out the paragraphs about what was not measured yet."""
    blocks = []
    for block in template.split("\n\n"):
        if condition := re.match(r"<!-- with (\w+)(?:\[(\S+)\])? -->\n", block):
            name, key = condition.groups()
            if name not in found or (key and key not in found[name].figures):
                continue
            block = block[condition.end() :]
        blocks.append(block)
    return "\n\n".join(blocks)


def _hours_over_clairvoyant(path: Path, load: str) -> Sequence[float]:
    """Workers of the forecast over the clairvoyant's in each hour of a load, from the table of `autoscale`."""
    workers: dict[tuple[str, int], float] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["load"] == load:
                place = row["scaler"], int(row["minute"]) // 60
                workers[place] = workers.get(place, 0.0) + float(row["workers"])
    hours = [hour for scaler, hour in workers if scaler == "clairvoyant"]
    return [workers["forecast", hour] / workers["clairvoyant", hour] for hour in hours]


def _filled(block: str) -> str:
    """Break the lines of a paragraph again: fields and numbers differ in length."""
    if block[0] in "|#!" or block[0].isdigit():
        return block
    filled = textwrap.fill(block, 110, break_long_words=False, break_on_hyphens=False)
    return filled + "\n" * block.endswith("\n")


def _pictures() -> str:
    """What each picture shows, which is what stands over it."""
    seen = {
        (Path(study.folder) / f"{study.name}.png").as_posix(): study.title
        for study in declared()
        if study.title
    }
    there = sorted(file for file in seen if (RESULTS / file).exists())
    return _table(
        ("picture", "what is seen"), ((f"[{file}]({file})", seen[file]) for file in there)
    )


def _origins(found: dict[str, Record]) -> str:
    return _table(
        ("record", "made by", "at commit", "on"),
        (
            (
                f"[{name}]({record.file})",
                f"`{repeated_by(record.command)}`",
                record.commit,
                record.when[:10],
            )
            for name, record in found.items()
        ),
    )


def repeated_by(command: str) -> str:
    """Give the command that repeats a record today; the record may name a module that has moved since.

    Args:
        command: as the record names it.
    """
    start = "python -m experiments."
    if command.startswith("make "):
        # Targets of the Makefile, one for each study, took variables for options.
        target, *variables = command.split()[1:]
        words = [word for each in variables for word in f"--{each.lower()}".split("=")]
        return " ".join((start[:-1], called(target) or target, *words))
    if not command.startswith(start):
        return command
    module, space, options = command.removeprefix(start).partition(" ")
    words = module.split(".")
    name = called("_".join(words), words[-1], f"bench_{words[-1]}") or module
    return f"{start[:-1]} {name}{space}{options}"


def _all_aims() -> str:
    return _table(
        ("record", "figure", "aim", "measured", ""),
        (
            (
                row.record,
                f"`{row.aim.key}`",
                row.aim.words,
                row.aim.shown(row.measured),
                f"**{MISSED}**: {row.aim.obstacle}" if row.outcome == MISSED else row.outcome,
            )
            for row in judged()
        ),
    )


def _csv_table(path: Path) -> str:
    with path.open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    return _table(head, rows)


def _shares(record: Record) -> str:
    """Goodput as a share of the bound, by load and policy; the loads that the page explains."""
    loads = {
        "fig5_slo10": "Fig 5, SLO 10 ms",
        "fig7_left_n12_r2400_x3.38": "Fig 7, 12 models at 2,400 r/s, SLO 3.4 times the execution",
        "fig7_right_m12c16_x3.38": "Fig 7, the same SLO with batch clients",
        "azure_x2_noisy": "Fig 8's replay at twice its rate, noise of Fig 9",
        "overload_n48_r5514_slo25": "overload, 48 models on 6 GPUs, SLO 25 ms, 5,514 r/s",
        "overload_zoo48_r3000_slo50": "overload, 48 models of all kinds on 6 GPUs, SLO 50 ms",
        "zoo_zoo600_slo100": "more models than memory: 600 of all kinds on a GPU, SLO 100 ms",
    }
    policies = ("clockwork", "clockwork1ms", "edf_mh")
    return _table(
        ("", "`clockwork`", "the same, look-ahead 1 ms", "`edf_mh`"),
        (
            (words, *(f"{record[f'{policy}_{load}_bound_share']:p1}" for policy in policies))
            for load, words in loads.items()
        ),
    )


def _isolation_curve(record: Record) -> str:
    """Answered requests by setting of isolation: of all, and of those whom the family compares, if not all."""
    loads = {
        "arrivals_popular": ("400 functions, of which one is popular", ""),
        "small_think": ("thinking clients", ""),
        "small_small_clients": (
            "200 clients in a closed loop next to 30 small ones",
            "of the small",
        ),
        "flood_flood_model": ("one model's flood", "of the innocent"),
    }
    curves = record.isolation_curve
    rows = []
    for load, (words, compared) in loads.items():
        points = curves[load].values()
        rows.append((words, *(f"{of_all:.2f}" for of_all, _ in points)))
        if compared:
            rows.append((f"the same, {compared}", *(f"{some:.2f}" for _, some in points)))
    return _table(("answered, %", *curves["small_think"]), rows)


def _unseen() -> dict[tuple[str, str], tuple[float, float]]:
    """By family and policy of `unseen`, answers as a part of what was asked and of the bound (0: none is known)."""
    found = defaultdict(list)
    with (RESULTS / "unseen.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["fault"] == "yes":
                of_bound = int(row["answered"]) / int(row["bound"]) if row["bound"] else 0.0
                found[row["family"], row["policy"]].append((float(row["share"]), of_bound))
    return {
        key: (mean(share for share, _ in seeds), mean(of_bound for _, of_bound in seeds))
        for key, seeds in found.items()
    }


def _behind(judged: str) -> str:
    """How many points of all answers `edf_mh` is behind the best other policy at most, and in which family."""
    shares = {key: both[key[0] in IN_LOOPS] for key, both in _unseen().items()}
    best: dict[str, float] = {}
    for (family, policy), share in shares.items():
        if not policy.startswith("edf_mh"):
            best[family] = max(share, best.get(family, 0.0))
    least, family = min((shares[family, judged] - best[family], family) for family in best)
    return f"{100 * least:.1f} (`{family}`)"


def _pieces(record: Record) -> str:
    """By piece of `edf_mh`: its largest and its smallest worth in points, and the loads that gave them."""
    loads = _between(record, "all_", "_goodput_pct")
    found: dict[str, list[tuple[float, str]]] = {}
    for key, points in record.figures.items():
        for load in loads:
            if key.endswith(end := f"_{load}_worth_points"):
                piece = key.removesuffix(end)
                # Rounded here, so that no difference is written as -0.0.
                found.setdefault(piece, []).append((round(points, 1) + 0.0, load))
    rows = []
    for piece, pairs in sorted(found.items()):
        most, least = (f"{points:+.1f} (`{load}`)" for points, load in (max(pairs), min(pairs)))
        rows.append((f"`{piece}`", len(pairs), most, least))
    return _table(("", "loads", "most", "least"), rows)


def _between(record: Record, start: str, end: str) -> list[str]:
    """The middles of the keys that begin and end so."""
    keys = (key for key in record.figures if key.startswith(start) and key.endswith(end))
    return [key[len(start) : -len(end)] for key in keys]


def _num_largest_batches(fig4: Record) -> int:
    largest = max(fig4.setting["batch_sizes"])
    return sum(fig4[f"native_{kind}_aimd_mean_batch"] == largest for kind in fig4.setting["kinds"])


def _short(number: float | None) -> str:
    if number is None:
        return ""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
