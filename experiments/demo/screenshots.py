"""The documentation's pictures of the dashboard: an overload, and a slow worker.

Each stage is a controller with workers of modelled devices in processes of their own, and a load that makes it what its
name says. The pictures go to `docs/pictures/`. It takes a Chromium and two minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from clockwright.client.channel import Access
from clockwright.client.operator import Operator
from experiments.live.local_server import LocalServer
from modelzoo.build import write_model

PICTURES: Final = Path(__file__).parents[2] / "docs" / "pictures"

_ARCHITECTURE: Final = "mlp-16-32-4"
_MODELS: Final = ("resnet50", "bert-base", "yolo-small", "whisper-tiny", "ranker", "fraud")
#: How long EXECs take by batch size, in ms, and how large weights are, in pages of 16 MiB.
_EXEC_MS: Final = {1: 20, 2: 26, 4: 40, 8: 70}
_PAGES_EACH: Final = 6
_PAGES: Final = 64
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
    #: Each worker's EXECs take so many times what is usual.
    workers: Mapping[str, float] = field(default_factory=lambda: {"gpu-0": 1.0, "gpu-1": 1.0})
    #: Fragment of the page of which a picture is taken; empty: the overview.
    view: str = ""
    scheme: str = "light"


STAGES: Final[Mapping[str, Stage]] = {
    "overload": Stage(rate_rps=260),
    "slow-worker": Stage(
        rate_rps=45,
        workers={"gpu-0": 1.0, "gpu-1": 2.5, "gpu-2": 1.0},
        view="timeline",
        scheme="dark",
    ),
}


@contextmanager
def staged(stage: Stage, folder: Path) -> Iterator[LocalServer]:
    """Run a cluster under its load."""
    for name in _MODELS:
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
            command += ["--pages", str(_PAGES), "--device", f"modelled:{profile}"]
            _start(stack, *command, "--cache-dir", str(folder / "cache"))
        _wait_until_ready(server.address, len(stage.workers))
        # The busiest gets as much as the three behind it.
        weights = [f"{name}={1 / (rank + 1):.3f}" for rank, name in enumerate(_MODELS)]
        command = ["load", "--server", server.address, "--rate", str(stage.rate_rps)]
        command += ["--slo-ms", str(_SLO_MS), "--seconds", "600", *weights]
        _start(stack, *command)
        yield server


_CLOCKWRIGHT: Final = (sys.executable, "-m", "clockwright.cli")


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


def take_picture(browser: Browser, url: str, name: str, where: Path) -> None:
    """Take a picture of a stage's page of the dashboard that `url` names."""
    stage = STAGES[name]
    context = browser.new_context(viewport=_SIZE, color_scheme=stage.scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(f"{url}#/{stage.view}")
    page.wait_for_selector("main[aria-busy=false]")
    # To start a browser takes the machine for a second, which the figures of the next five show.
    page.wait_for_timeout(8000)
    file = where / f"{name}-{stage.view or 'overview'}-{stage.scheme}.png"
    page.screenshot(path=file)
    Image.open(file).convert("RGB").quantize(_COLOURS, Image.Quantize.MAXCOVERAGE).save(
        file, optimize=True
    )
    context.close()


def main() -> None:
    """Take all pictures, or those of some stages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("stages", nargs="*", choices=[*STAGES, []])
    parser.add_argument("--directory", type=Path, default=PICTURES)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for name in options.stages or STAGES:
            with (
                tempfile.TemporaryDirectory() as scratch,
                staged(STAGES[name], Path(scratch)) as server,
            ):
                time.sleep(_SECONDS_BEFORE)
                take_picture(
                    browser, server.metrics.removesuffix("metrics"), name, options.directory
                )
        browser.close()


if __name__ == "__main__":
    main()
