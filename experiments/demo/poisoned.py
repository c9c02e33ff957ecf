"""`make poisoned`: the best model of an application goes bad, live, and is repaired.

A real `clockwright up` serves digit classifiers, and an application of them with the default policy. An
ordinary tritonclient asks it, and every answer gets the true label as feedback. After a while a version
of the best model that was trained on wrong labels takes its place by `clockwright models add --replace`,
and later the good version comes back. What `clockwright app show` prints meanwhile is kept as it is, beside
the weights that the reply to each feedback says.

Queries come one after the other and everything goes by their number: as long as no model misses the SLO,
the result is the same on any machine.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

from clockwright import Client, Feedback
from experiments.demo.models import DemoModel, taught_and_asked, write_digit_model
from experiments.digits.images import Array, Digits
from experiments.digits.models import five_kinds
from experiments.live.local_server import LocalServer
from experiments.study.pictures import COLOURS, LINES, Curve, Panel
from experiments.study.study import Row, Study, StudyRecord

APPLICATION = "read-digits"
PHASES = ("before", "poisoned", "repaired")

# Queries per row of the table, and rows per mean in the picture.
_ROW = 20
_WINDOW = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Numbers of the experiment, which tests make smaller."""

    #: The ensemble's members, by their names in `five_kinds`.
    kinds: tuple[str, ...] = ("naive Bayes", "tree", "logistic", "forest", "SVM")
    #: Number of queries in each phase.
    num_queries: tuple[int, int, int] = (1000, 1000, 2000)
    #: Queries between two looks at the command line; the begin and end of a phase are looked at too.
    look_every: int = 250
    slo_ms: float = 1000.0
    #: The selection policy's options, as `app add --option` takes them.
    options: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class PoisonedQuery:
    """One query."""

    phase: str
    #: True label of the image.
    label: int
    answer: int
    num_missing: int
    #: Weight of each model after the feedback.
    weights: tuple[float, ...]
    #: Label that each model gives when it is asked alone.
    alone: tuple[int, ...]

    @property
    def right(self) -> bool:
        """Whether the application gave the true label."""
        return self.answer == self.label


@dataclass(frozen=True, slots=True)
class PoisonedRun:
    """A whole run: every query and what the command line showed."""

    models: tuple[str, ...]
    #: Index of the poisoned model in `models`.
    poisoned: int
    steps: list[PoisonedQuery]
    #: The typed commands and their output.
    transcript: str

    def of(self, phase: str) -> list[PoisonedQuery]:
        """The queries of a phase."""
        return [step for step in self.steps if step.phase == phase]

    def heaviest(self, step: PoisonedQuery) -> bool:
        """Whether the poisoned model has the most weight."""
        return step.weights[self.poisoned] == max(step.weights)


class _CommandLine:
    """The `clockwright` command as an operator runs it."""

    def __init__(self, address: str, directory: Path) -> None:
        self._address = address
        self.directory = directory
        self.transcript: list[str] = []

    def say(self, text: str) -> None:
        """Enter a remark, or what was printed."""
        self.transcript.append(text)
        print(text, flush=True)

    def run(self, *arguments: str) -> None:
        """Run one command against the server; the transcript leaves out its address and the files' folders.

        Raises:
            RuntimeError: the command failed.
        """
        done = subprocess.run(
            [sys.executable, "-m", "clockwright.cli", *arguments, "--server", self._address],
            capture_output=True,
            text=True,
            check=False,
        )
        typed = f"$ clockwright {shlex.join(arguments)}\n{done.stdout}"
        self.say(typed.replace(f"{self.directory}/", ""))
        if done.returncode:
            raise RuntimeError(f"clockwright {shlex.join(arguments)}: {done.stderr}")


def run(setting: Setting) -> Iterator[PoisonedRun]:
    """Serve, ask, poison and repair.

    Raises:
        RuntimeError: the server did not start, or a command failed.
    """
    taught, asked = taught_and_asked()
    # Every digit is taught as the next one.
    wrong = Digits(taught.images, (taught.labels + 1) % 10, taught.forms)
    kinds = five_kinds(setting.seed)
    names = {kind.lower().replace(" ", "-"): kind for kind in setting.kinds}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        good = {
            name: write_digit_model(directory / "good" / name, kinds[kind], taught, asked)
            for name, kind in names.items()
        }
        best = max(good, key=lambda name: int((_says(good[name]) == asked.labels).sum()))
        bad = write_digit_model(directory / "bad" / best, kinds[names[best]], wrong, asked)
        arguments = ["--models", f"{directory}/good", "--cache-dir", f"{directory}/cache"]
        with LocalServer(arguments, start_limit_s=300) as server:
            commands = _CommandLine(server.address, directory)
            steps = list(_ask(setting, server.address, commands, good, bad, asked))
    models = tuple(good)
    yield PoisonedRun(models, models.index(best), steps, "\n".join(commands.transcript))


def _says(model: DemoModel) -> Array:
    """The model's label for each digit that is asked about, computed by plain onnxruntime."""
    return model.answers["label"]


def _ask(
    setting: Setting,
    address: str,
    commands: _CommandLine,
    good: dict[str, DemoModel],
    bad: DemoModel,
    asked: Digits,
) -> Iterator[PoisonedQuery]:
    """Ask all queries, and meanwhile exchange versions at the command line."""
    candidates = [text for name in good for text in ("--model", name)]
    options = [text for option in setting.options for text in ("--option", option)]
    slo = ("--slo-ms", f"{setting.slo_ms:g}")
    commands.run("app", "add", APPLICATION, *candidates, *slo, *options)
    drawn = iter(np.random.default_rng(setting.seed).integers(0, len(asked.labels), 1 << 20))
    serving, number = dict(good), 0
    with triton.InferenceServerClient(address) as client, Client(address) as teacher:
        for phase, num_queries in zip(PHASES, setting.num_queries, strict=True):
            if phase != PHASES[0]:
                version, serving[bad.name] = (
                    ("bad", bad) if phase == "poisoned" else ("good", good[bad.name])
                )
                commands.say(f"# after {number} queries\n")
                commands.run(
                    "models", "add", f"{commands.directory}/{version}/{bad.name}", "--replace"
                )
            for _ in range(num_queries):
                index = int(next(drawn))
                label = int(asked.labels[index])
                answer, query_id, num_missing = _infer(client, asked.images[index : index + 1])
                (outcome,) = teacher.feedback(Feedback(query_id, label=label))
                if outcome.status != "APPLIED":
                    raise RuntimeError(f"feedback for {query_id} is {outcome.status}")
                yield PoisonedQuery(
                    phase,
                    label,
                    answer,
                    num_missing,
                    tuple(outcome.weights[name] for name in good),
                    tuple(int(_says(model)[index]) for model in serving.values()),
                )
                number += 1
                if number % setting.look_every == 0 and number < sum(setting.num_queries):
                    _look(commands, number)
        _look(commands, number)


def _look(commands: _CommandLine, number: int) -> None:
    commands.say(f"# after {number} queries\n")
    commands.run("app", "show", APPLICATION)


def _infer(client: triton.InferenceServerClient, image: Array) -> tuple[int, str, int]:
    """Label, query id and number of members missing."""
    tensor = triton.InferInput("X", list(image.shape), "FP32")
    tensor.set_data_from_numpy(image)
    result = client.infer(APPLICATION, [tensor])
    parameters = result.get_response().parameters
    missing = parameters["missing"].string_param
    return (
        int(result.as_numpy("label").item()),
        parameters["query_id"].string_param,
        len(missing.split(",")) if missing else 0,
    )


def _figures(_setting: Setting, runs: Sequence[PoisonedRun]) -> dict[str, float]:
    """The numbers that are quoted."""
    (run,) = runs
    figures = {
        "num_queries": float(len(run.steps)),
        "members_missing": float(sum(step.num_missing for step in run.steps)),
    }
    for phase in PHASES:
        steps = run.of(phase)
        alone = np.mean([[said == step.label for said in step.alone] for step in steps], axis=0)
        figures[f"{phase}_accuracy"] = float(np.mean([step.right for step in steps]))
        figures[f"{phase}_best_alone_accuracy"] = float(alone.max())
        figures[f"{phase}_poisoned_model_accuracy"] = float(alone[run.poisoned])
        figures[f"{phase}_poisoned_model_weight"] = steps[-1].weights[run.poisoned]
    # The query at which the model is no longer the heaviest, and the one at which it is again.
    for phase, heaviest in (("poisoned", False), ("repaired", True)):
        turned = [n for n, step in enumerate(run.of(phase), 1) if run.heaviest(step) is heaviest]
        if turned:
            figures[f"{phase}_queries_to_turn"] = float(turned[0])
    return figures


def _rows(_setting: Setting, runs: Sequence[PoisonedRun]) -> Iterator[Row]:
    """A row for so many queries each, but for a last one that may have fewer."""
    (run,) = runs
    for start in range(0, len(run.steps), _ROW):
        steps = run.steps[start : start + _ROW]
        last = steps[-1]
        yield {
            "queries": start + len(steps),
            "phase": last.phase,
            "right": sum(step.right for step in steps),
            **dict(zip(map("weight of {}".format, run.models), last.weights, strict=True)),
        }


def _panels(_setting: Setting, recorded: StudyRecord) -> list[list[Panel]]:
    """Weights above; below, the accuracy of late queries: all that is recorded."""
    rows = recorded.rows
    queries = np.array([0, *(row["queries"] for row in rows)])
    right = np.cumsum([0, *(row["right"] for row in rows)])
    weights = [
        Curve(
            x=queries[1:].tolist(),
            y=[row[column] for row in rows],
            label=column.removeprefix("weight of "),
            colour=colour,
            line=line,
        )
        for column, colour, line in zip(list(rows[0])[3:], COLOURS, LINES, strict=False)
    ]
    late = 100 * (right[_WINDOW:] - right[:-_WINDOW]) / (queries[_WINDOW:] - queries[:-_WINDOW])
    weight = Panel(
        title=f"Weights: {recorded.record['poisoned']} loses its own once it is poisoned, and gets it back",
        x="number of queries since the start, each with feedback",
        y="share of all weight",
        curves=weights,
        marks={
            max((row["queries"] for row in rows if row["phase"] == phase), default=0): words
            for phase, words in (("before", "poisoned from here on"), ("poisoned", "repaired"))
        },
        y_range=(0, 1),
    )
    answers = replace(
        weight,
        title="Answers of the application meanwhile",
        y=f"right of the last {_WINDOW * _ROW}, %",
        curves=[Curve(x=queries[_WINDOW:].tolist(), y=late.tolist(), label="the application")],
        y_range=(0, 100),
    )
    return [[weight], [answers]]


STUDY = Study(
    name="poisoned",
    setting=Setting(),
    ask=run,
    key="",
    say=lambda _, run: "\n".join(
        f"{key}: {figure:.4g}" for key, figure in _figures(Setting(), [run]).items()
    ),
    figures=_figures,
    tables={"": _rows},
    text=lambda runs: runs[0].transcript,
    title="When its best model is poisoned, an application goes on with the others, and comes back.",
    panels=_panels,
    extra=lambda _, runs: {
        "data": "scikit-learn digits, 8 x 8, split by form",
        "poisoned": runs[0].models[runs[0].poisoned],
    },
)
