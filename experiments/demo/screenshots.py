"""Pictures of clusters, a healthy one and three sick ones, as the dashboard and `clockwright top` show them.

Each stage is a controller with workers of modelled devices in processes of their own, and a load that makes it what its
name says. The pictures are for the documentation, and for whoever judges whether one sees what is wrong: they go to
`docs/pictures/`. It takes a Chromium and some five minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console

from clockwright import Client, Feedback, RefusedError
from clockwright.channel import Access
from clockwright.cli.top import Look, screen
from clockwright.operator import Operator
from experiments.live.local_server import LocalServer
from modelzoo.build import write_model

PICTURES: Final = Path(__file__).parents[2] / "docs" / "pictures"

_ARCHITECTURE: Final = "mlp-16-32-4"
_MODELS: Final = ("resnet50", "bert-base", "yolo-small", "whisper-tiny", "ranker", "fraud")
_MORE: Final = (*_MODELS, *("ocr", "segmenter", "translator", "reranker", "toxicity", "pose"))
#: How long EXECs take by batch size, in ms, and how large weights are, in pages of 16 MiB.
_EXEC_MS: Final = {1: 20, 2: 26, 4: 40, 8: 70}
_PAGES_EACH: Final = 6
_LOAD_MS: Final = 45
_SLO_MS: Final = 250
# The charts have something to show by then, and the estimates have settled.
_SECONDS_BEFORE: Final = 25
_SIZE: Final = {"width": 1280, "height": 860}
_COLOURS: Final = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A cluster to look at."""

    rate_rps: float
    models: Sequence[str] = _MODELS
    #: Each worker's EXECs take so many times what is usual.
    workers: Mapping[str, float] = field(default_factory=lambda: {"gpu-0": 1.0, "gpu-1": 1.0})
    pages: int = 64
    #: Fragments of the pages of which pictures are taken, besides the overview.
    views: Sequence[str] = ()


STAGES: Final[Mapping[str, Stage]] = {
    "well": Stage(rate_rps=30, views=("timeline", "pages", "models", "model/resnet50", "request")),
    "overload": Stage(rate_rps=260, views=("timeline", "request")),
    "slow-worker": Stage(
        rate_rps=45, workers={"gpu-0": 1.0, "gpu-1": 2.5, "gpu-2": 1.0}, views=("timeline",)
    ),
    "too-few-pages": Stage(rate_rps=85, models=_MORE, pages=14, views=("pages", "timeline")),
}


@contextmanager
def staged(stage: Stage, folder: Path) -> Iterator[LocalServer]:
    """Run a cluster under its load."""
    for name in stage.models:
        write_model(_ARCHITECTURE, folder / "models" / name / "1" / "model.onnx")
    with ExitStack() as stack:
        arguments = ["--models", str(folder / "models"), "--metrics-port", "0"]
        # A controller alone is ready when its workers are.
        server = LocalServer(arguments, command="controller")
        stack.callback(server.stop)
        server.wait_for("dashboard on ")
        for number, (name, slower) in enumerate(stage.workers.items()):
            profile = folder / f"{number}.json"
            profile.write_text(json.dumps(_profile(slower, seed=number)))
            command = ["worker", "--controller", server.address, "--id", name]
            command += ["--pages", str(stage.pages), "--device", f"modelled:{profile}"]
            _start(stack, *command, "--cache-dir", str(folder / "cache"))
        _wait_until_ready(server.address, len(stage.workers))
        # The busiest gets as much as the three behind it.
        weights = [f"{name}={1 / (rank + 1):.3f}" for rank, name in enumerate(stage.models)]
        command = ["load", "--server", server.address, "--rate", str(stage.rate_rps)]
        command += ["--slo-ms", str(_SLO_MS), "--seconds", "600", *weights]
        _start(stack, *command)
        yield server


@contextmanager
def choosing(folder: Path) -> Iterator[LocalServer]:
    """Run an application over three models, of which one is always right, one often and one never."""
    right = np.eye(4, dtype=np.float32)
    models = {"careful": right, "hasty": right + np.roll(right, 1, axis=0), "contrary": -right}
    for name, weights in models.items():
        _write_classifier(folder / "models" / name / "1" / "model.onnx", weights)
    arguments = ["--models", str(folder / "models"), "--metrics-port", "0", "--device", "cpu"]
    arguments += ["--cache-dir", str(folder / "cache")]
    with LocalServer(arguments) as server:
        where = ["--server", server.address]
        members = [word for name in models for word in ("--model", name)]
        command = [*_CLOCKWRIGHT, "app", "add", "digits", *members, *where, "--slo-ms", "200"]
        subprocess.run(command, check=True)
        rng = np.random.default_rng(7)
        with Client(server.address) as client:
            for _ in range(60):
                row = rng.normal(size=(1, 4)).astype(np.float32)
                with suppress(RefusedError):
                    answer = client.infer("digits", {"x": row})
                    client.feedback(Feedback(query_id=answer.query_id, label=int(row.argmax())))
        yield server


_CLOCKWRIGHT: Final = (sys.executable, "-m", "clockwright.cli")


def _write_classifier(path: Path, weights: NDArray[np.float32]) -> None:
    """Write a model whose label is where its row is largest once it was multiplied by the weights."""
    path.parent.mkdir(parents=True)
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "weights"], ["scores"]),
            helper.make_node("Softmax", ["scores"], ["probabilities"], axis=1),
            helper.make_node("ArgMax", ["scores"], ["label"], axis=1, keepdims=0),
        ],
        "classifier",
        [tensor("x", TensorProto.FLOAT, ["batch", 4])],
        [
            tensor("label", TensorProto.INT64, ["batch"]),
            tensor("probabilities", TensorProto.FLOAT, ["batch", 4]),
        ],
        [numpy_helper.from_array(weights, "weights")],
    )
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)


def _profile(slower: float, *, seed: int) -> dict[str, object]:
    row = {
        "name": "*",
        "weights_bytes": _PAGES_EACH * (16 << 20) - 1,
        "load_ns": _LOAD_MS * 1_000_000,
        "exec_ns": {str(size): int(slower * ms * 1e6) for size, ms in _EXEC_MS.items()},
        "input_bytes": 64,
        "output_bytes": 16,
    }
    noise = {"exec_sigma": 0.02, "load_sigma": 0.03}
    return {"name": "V100", "rows": [row], "noise": noise, "seed": seed}


def _start(stack: ExitStack, *command: str) -> None:
    process = subprocess.Popen([*_CLOCKWRIGHT, *command], stdout=subprocess.DEVNULL)

    def stop() -> None:
        process.terminate()
        process.wait()

    stack.callback(stop)


def _wait_until_ready(address: str, num_workers: int) -> None:
    with Operator(address, Access()) as operator:
        while True:
            status = operator.status()
            if status.ready and status.num_workers == num_workers:
                return
            time.sleep(0.2)


def take_pictures(browser: Browser, url: str, name: str, views: Sequence[str], where: Path) -> None:
    """Take a picture of each view of a running server, in light and dark.

    Args:
        browser: takes them.
        url: of the dashboard.
        name: of the stage, with which the files' names begin.
        views: fragments; `request` stands for the latest request that was refused, or answered where none was.
        where: folder of the files.
    """
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport=_SIZE, color_scheme=scheme)  # type: ignore[arg-type]
        page = context.new_page()
        for view in ("", *views):
            fragment = _some_request(page, url) if view == "request" else view
            page.goto(f"{url}#/{fragment}")
            page.wait_for_selector("main[aria-busy=false]")
            # To start a browser takes the machine for a second, which the figures of the next five show.
            page.wait_for_timeout(3500 if view else 8000)
            file = where / f"{name}-{(view or 'overview').replace('/', '-')}-{scheme}.png"
            page.screenshot(path=file)
            Image.open(file).convert("RGB").quantize(_COLOURS, Image.Quantize.MAXCOVERAGE).save(
                file, optimize=True
            )
        context.close()


def _some_request(page: Page, url: str) -> str:
    page.goto(f"{url}#/request")
    link = page.locator("tbody a").first
    link.wait_for()
    return (link.get_attribute("href") or "").removeprefix("#/")


def picture_of_top(address: str, name: str, where: Path) -> None:
    """Draw what `clockwright top` shows, as SVG."""
    looks = []
    with Operator(address, Access()) as operator:
        for _ in range(2):
            status, workers, models = operator.status(), operator.workers(), operator.models()
            looks.append(Look(at_s=time.monotonic(), status=status, workers=workers, models=models))
            time.sleep(2)
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=100, file=nowhere, force_terminal=True)
        console.print(screen(*looks, lines=30, address="127.0.0.1:8001"))
        console.save_svg(str(where / f"{name}-top.svg"), title="clockwright top")


def main() -> None:
    """Take all pictures, or those of some stages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("stages", nargs="*", choices=[*STAGES, "applications", []])
    parser.add_argument("--directory", type=Path, default=PICTURES)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for name in options.stages or (*STAGES, "applications"):
            with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
                folder = Path(scratch)
                views: Sequence[str] = ("applications",)
                if name in STAGES:
                    server = stack.enter_context(staged(STAGES[name], folder))
                    views = STAGES[name].views
                    time.sleep(_SECONDS_BEFORE)
                    picture_of_top(server.address, name, options.directory)
                else:
                    server = stack.enter_context(choosing(folder))
                url = server.metrics.removesuffix("metrics")
                take_pictures(browser, url, name, views, options.directory)
        browser.close()


if __name__ == "__main__":
    main()
