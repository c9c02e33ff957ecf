"""The environment of `make gpu`: where its packages come from, and what it says where they cannot come from anywhere."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from experiments.gpu import environment
from experiments.gpu.environment import (
    CannotError,
    Plan,
    complaint,
    fetch,
    lacking,
    make,
    plan,
    reason,
    unfit,
)

ROOT = Path(__file__).resolve().parents[2]


def wheel(path: Path, name: str, files: Mapping[str, str], needs: str = "") -> str:
    """Make a wheel of a package; returns the file's name."""
    about = f"{name}-1.dist-info"
    texts = {
        **files,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{needs}",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(path / f"{name}-1-py3-none-any.whl", "w") as archive:
        for file, text in texts.items():
            archive.writestr(file, text)
    return f"{name}-1-py3-none-any.whl"


# Builds the project of the test below with nothing installed; `wheel` is written below it.
BACKEND = """
import zipfile
from pathlib import Path

import small

assert small.ONE == 1, "an old small builds the project"

def build_editable(folder, *_):
    needs = "".join(f"Requires-Dist: {name}\\nProvides-Extra: gpu\\n" for name in ("small", "numpy"))
    return wheel(Path(folder), "project", {"project.pth": str(Path.cwd())}, needs)
"""


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with a wheel."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "small", {"small.py": "ONE = 1\n"})
    return folder


def test_a_system_s_torch_is_taken_with_wheels_where_there_are_any(wheels: Path) -> None:
    def system(wanted: str, *, onnxruntime: bool, folder: Path) -> Plan:
        return plan(wanted, "", onnxruntime=onnxruntime, card=False, wheels=folder)

    for wanted in ("", "1"):
        found = system(wanted, onnxruntime=True, folder=wheels)
        assert found == Plan(True, ("gpu", "measure"), wheels)
        assert all({"--no-index", str(wheels)} <= set(words) for words in found.installs())
    # One kind of onnxruntime is needed, and beside the other it must not be.
    found = system("", onnxruntime=False, folder=wheels / "none")
    assert found == Plan(True, ("gpu", "gpu-ort", "measure"), None)
    assert not any("--no-index" in words for words in found.installs())
    # Wheels bring the small one, if nothing else was put there.
    assert system("", onnxruntime=False, folder=wheels).extras == ("gpu", "cpu", "measure")
    wheel(wheels, "onnxruntime_gpu", {})
    assert system("", onnxruntime=False, folder=wheels).extras == ("gpu", "gpu-ort", "measure")


def test_without_it_torch_is_installed_if_there_is_a_driver(wheels: Path) -> None:
    own = Plan(False, ("gpu", "gpu-ort", "tools"), None)
    assert plan("", "no torch", onnxruntime=True, card=True, wheels=wheels) == own
    assert plan("0", "", onnxruntime=True, card=True, wheels=wheels) == own
    with pytest.raises(
        CannotError, match=r"^nothing was run: no NVIDIA driver .*found no torch in .*, expected"
    ):
        plan("", "no torch", onnxruntime=True, card=False, wheels=wheels)
    with pytest.raises(CannotError, match=r"driver on this machine .*, and SYSTEM_TORCH=0$"):
        plan("0", "", onnxruntime=True, card=False, wheels=wheels)
    with pytest.raises(CannotError, match=r"^SYSTEM_TORCH=1: found torch 2\.9 for CUDA 12\.8 in "):
        plan("1", "torch 2.9 for CUDA 12.8", onnxruntime=True, card=True, wheels=wheels)
    with pytest.raises(CannotError, match=r"^SYSTEM_TORCH is 'yes', expected 1 "):
        plan("yes", "", onnxruntime=True, card=True, wheels=wheels)


@pytest.mark.parametrize(
    ("version", "cuda", "words"),
    [
        ("2.11.0+cu130", "13.0", ""),
        ("3.0.0a0+git1", "13.2", ""),
        ("2.9.1", "13.0", "torch 2.9.1 for CUDA 13.0"),
        ("2.13.0+cu129", "12.9", "torch 2.13.0+cu129 for CUDA 12.9"),
        ("2.13.0+cpu", None, "torch 2.13.0+cpu without CUDA"),
    ],
)
def test_a_system_s_torch_is_new_enough_and_for_the_right_cuda(
    version: str, cuda: str | None, words: str
) -> None:
    assert unfit(version, cuda) == words


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            Plan(True, ("gpu",), Path("/w")),
            r"cannot install from /w: hpack>=4\.1 is missing; .* HAS ",
        ),
        (Plan(True, ("gpu",), None), r"from the package registry: hpack>=4\.1 is missing; run "),
        (Plan(False, ("gpu",), None), r"missing; without a registry, name a Python that has torch"),
    ],
)
def test_what_is_missing_is_named_with_what_helps(plan: Plan, words: str) -> None:
    said = (
        "ERROR: Could not find a version that satisfies the requirement hpack>=4.1 (from versions: none)\n"
        "ERROR: No matching distribution found for hpack>=4.1 (from clockwright[gpu])\n"
    )
    found = complaint(plan, said)
    assert re.search(words, found)
    assert f"`make gpu-wheels TARGET_PYTHON={sys.version_info[0]}.{sys.version_info[1]}`" in found
    assert "no space left" in complaint(plan, "ERROR: no space left\n")


def test_the_reason_of_a_failed_build_is_the_build_s_own_error() -> None:
    said = (
        "  error: subprocess-exited-with-error\n"
        "  \u2570\u2500> [9 lines of output]\n"
        "      Traceback (most recent call last):\n"
        "      setuptools.errors.InvalidConfigError: `project.license` must be one of\n"
        "      [end of output]\n"
        "  note: This error originates from a subprocess, and is likely not a problem with pip.\n"
        "ERROR: Failed to build 'clockwright' when getting requirements to build editable\n"
    )
    assert reason(said).startswith("setuptools.errors.InvalidConfigError: `project.license`")
    assert reason("one\ntwo\n") == "two"
    assert reason("") == "it says nothing"


@pytest.mark.parametrize("python", ["banana", "3.9", "", "3.12"])
def test_wheels_stay_where_others_cannot_be_fetched(
    python: str, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "WHEELS", wheels)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    before = sorted(wheels.iterdir())
    expected = r"^pip failed: setuptools<82,>=77 is missing$" if python == "3.12" else repr(python)
    with pytest.raises(CannotError, match=expected):
        fetch(python, [])
    assert sorted(wheels.iterdir()) == before
    assert list(wheels.parent.iterdir()) == [wheels]


def test_wheels_are_of_all_that_is_needed_less_what_the_target_has() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    has = re.findall(r"^HAS := (.*)$", text, re.M)[0].split()
    every = {re.split(r"[\[<>=]", each)[0] for each in lacking([])}
    assert {"setuptools", "msgspec", "uvloop", "pytest-timeout", *has} <= every
    assert {re.split(r"[\[<>=]", each)[0] for each in lacking(has)} == every - set(has)
    assert "onnxruntime" not in " ".join(lacking(["onnxruntime-gpu"]))


def test_the_environment_holds_what_the_system_lacks_and_finds_the_rest_there(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = inspect.getsource(wheel).replace("Mapping[str, str]", "dict")
    (tmp_path / "backend.py").write_text(BACKEND + source)
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["small>=1"]\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    for name, value in (("ROOT", tmp_path), ("VENV", tmp_path / "venv"), ("WHEELS", wheels)):
        monkeypatch.setattr(environment, name, value)
    # What the system has of what builds the project is too old.
    old = tmp_path / "site-packages"
    (old / "small-0.dist-info").mkdir(parents=True)
    (old / "small-0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: small\nVersion: 0\n"
    )
    (old / "small.py").write_text("ONE = 0\n")
    monkeypatch.syspath_prepend(str(old))
    wanted = Plan(True, ("gpu",), wheels)
    small = next(wheels.iterdir()).rename(tmp_path / "small-1-py3-none-any.whl")
    with pytest.raises(
        CannotError, match=f"cannot install from {wheels}: small>=1 is missing; run "
    ):
        make(wanted)
    small.rename(wheels / small.name)
    make(wanted)
    program = "import numpy, small, sys; print(numpy.__file__, small.__file__, sys.prefix)"
    python = tmp_path / "venv" / "bin" / "python"
    numpy, own, prefix = subprocess.check_output([python, "-c", program], text=True).split()
    assert not numpy.startswith(prefix)
    assert own.startswith(prefix)
    # The second time there is nothing to do, and nothing that could fail.
    (wheels / small.name).unlink()
    make(wanted)
