"""The file that says what is wanted on a Ray cluster, and how its errors read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clockwright.errors import ConfigError
from engines.ray import kinds as module
from engines.ray.environment import VARIABLE, check_cluster, ray_python
from engines.ray.kinds import read_kinds, spelled

LEAST = '[[kinds]]\nname = "a100"\nmax = 2\n'


def read(folder: Path, text: str) -> module.KindsFile:
    path = folder / "kinds.toml"
    path.write_text(text)
    return read_kinds(path)


def test_the_file_of_the_documentation_is_one(tmp_path: Path) -> None:
    _, _, text = (module.__doc__ or "").partition("::\n")
    file = read(tmp_path, re.sub(r"^ {4}", "", text, flags=re.M))
    assert [kind.name for kind in file.kinds] == ["a100"]
    assert json.loads(json.dumps(spelled(file)))["groups"]["controller"]["number"] == 2


def test_a_kind_and_its_most_are_all_that_is_needed(tmp_path: Path) -> None:
    wish = spelled(read(tmp_path, LEAST))
    assert wish["kinds"] == [{"name": "a100", "least": 1, "most": 2, "start_limit_s": 600.0}]
    worker = wish["groups"]["worker-a100"]
    assert worker["command"] == [sys.executable, "-m", "clockwright.cli", "worker"]
    assert worker["resources"] == {"clockwright_a100": 1.0}
    assert wish["groups"]["controller"]["number"] == wish["groups"]["front"]["number"] == 1


def test_labels_alone_need_no_resource(tmp_path: Path) -> None:
    labelled = LEAST + 'labels = { "ray.io/accelerator-type" = "A100" }\n'
    worker = spelled(read(tmp_path, labelled))["groups"]["worker-a100"]
    assert (worker["resources"], worker["labels"]) == ({}, {"ray.io/accelerator-type": "A100"})


def test_a_kind_may_have_an_environment_of_its_own(tmp_path: Path) -> None:
    text = 'python = "/all/python"\nmodels = "/m"\n' + LEAST + 'python = "/gpu/python"\n'
    groups = spelled(read(tmp_path, text))["groups"]
    assert groups["worker-a100"]["command"][0] == "/gpu/python"
    assert groups["controller"]["command"][0] == "/all/python"
    assert "--models=/m" in groups["controller"]["command"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "missing required field `kinds`"),
        ("kinds = []", "length >= 1"),
        ("[[kinds]]\nname = 3\nmax = 1", "Expected `str`, got `int` - at `$.kinds[0].name`"),
        ('[[kinds]]\nname = "A 1"\nmax = 1', "at `$.kinds[0].name`"),
        ('[[kinds]]\nname = "a"', "missing required field `max`"),
        ('[[kinds]]\nname = "a"\nmax = 1\nmin = 2', "kind a: max is 1, expected 2 or more"),
        ('[[kinds]]\nname = "a"\nmax = 1\nmin = 0', "Expected `int` >= 1"),
        ('[[kinds]]\nname = "a"\nmax = 1\ngpus = 2', "Expected `float` <= 1.0"),
        ('[[kinds]]\nname = "a"\nmax = 1\ncpu = 2', "unknown field `cpu`"),
        (LEAST + LEAST, "found a100 twice, expected unlike names"),
        (LEAST + 'arguments = ["--controller=h:1"]', "kind a100: found --controller in"),
        (LEAST + 'arguments = ["--devices=2"]', "kind a100: found --devices in"),
        ("[controllers]\nnumber = 2\n" + LEAST, "found 2 without --lease in `arguments`"),
        ("[controllers]\ncpus = 0\n" + LEAST, "at `$.controllers.cpus`"),
        ("[fronts]\nport = 70000\n" + LEAST, "at `$.fronts.port`"),
        ("[[kinds]", "line 1"),
    ],
)
def test_what_cannot_be_placed_is_refused_with_the_place_and_what_helps(
    tmp_path: Path, text: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)
    assert "kinds.toml" in str(caught.value)


def test_a_python_without_ray_is_refused_with_how_to_make_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install \"ray=="):
        ray_python()
    monkeypatch.setenv(VARIABLE, sys.executable)
    with pytest.raises(ConfigError, match=re.escape(f"found no Ray at {sys.executable}")):
        ray_python()


def test_the_python_of_the_command_ray_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lib/python3.11/site-packages/ray").mkdir(parents=True)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    for name in ("ray", "python"):
        (tmp_path / "bin" / name).touch(mode=0o755)
    assert ray_python() == tmp_path / "bin" / "python"


@pytest.mark.parametrize("address", ["nowhere", "h:port", ":6379", "127.0.0.1:1"])
def test_an_address_without_a_cluster_is_refused_at_once(address: str) -> None:
    with pytest.raises(ConfigError, match="expected"):
        check_cluster(address)


def test_what_ray_sets_for_its_own_processes_is_not_handed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from engines.ray.supervisor import environment_of

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", "/ray")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    found = environment_of({"PYTHONPATH": "/ours"})
    assert found["PYTHONPATH"] == "/ours"
    assert found["CUDA_VISIBLE_DEVICES"] == "3"
    assert not {"OMP_NUM_THREADS", "RAY_ADDRESS"} & found.keys()
    assert os.environ["RAY_ADDRESS"] == "auto"


def test_up_on_ray_has_flags_of_its_own(tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        command = [sys.executable, "-m", "clockwright.cli", "up", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return done.stderr

    (tmp_path / "kinds.toml").write_text(LEAST)
    (tmp_path / "lib/python3.11/site-packages/ray").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch(mode=0o755)
    environment = {**os.environ, VARIABLE: str(tmp_path / "bin" / "python")}
    kinds = f"--kinds={tmp_path / 'kinds.toml'}"
    assert "found no Ray cluster at 127.0.0.1:1" in said("--ray", "127.0.0.1:1", kinds)
    assert "found no --kinds" in said("--ray=127.0.0.1:1")
    assert "No such option" in said(kinds)
