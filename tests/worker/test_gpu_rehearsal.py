"""The worker on the real torch for CUDA, without a GPU: on the stand-in for CUDA's runtime (`experiments.gpu.stand_in`).

`make gpu-rehearsal` installs the oldest and the newest torch allowed, and runs these tests on both.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from experiments.gpu.stand_in import (
    MissingError,
    environment,
    idle_environment,
    interpreters,
    rehearse,
)

PYTHONS = interpreters()

pytestmark = pytest.mark.skipif(
    not PYTHONS,
    reason="no torch for CUDA: neither CLOCKWRIGHT_CUDA_PYTHONS nor `make gpu-rehearsal` names one",
)


@pytest.fixture(
    scope="module", params=PYTHONS or [Path()], ids=lambda path: path.parent.parent.name
)
def python(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    try:
        environment(found)
    except MissingError as error:
        pytest.skip(str(error))
    return found


def test_answers_are_right_over_random_pages_and_streams_that_come_late(python: Path) -> None:
    found = rehearse(python, "answers", 1)
    assert (found["right"], found["wrong"], found["failed"]) == (100, 0, 0)
    assert found["allocations"] == 0
    assert found["pageable_copies"] == 0
    assert found["captures_spoilt"] == 0
    assert found["unknown_kernels"] == 0


def test_a_wait_that_is_missing_shows_as_a_wrong_answer(python: Path) -> None:
    assert rehearse(python, "without-wait", 2)["wrong"] > 0


def test_a_spoilt_capture_costs_its_own_model_alone(python: Path) -> None:
    found = rehearse(python, "spoilt")
    assert len(found["refused"]) == 2
    assert not found["lost"]
    assert (found["right"], found["wrong"], found["failed"]) == (30, 0, 0)


def test_a_kernel_after_memory_that_cannot_be_locked_does_not_report_that(python: Path) -> None:
    found = rehearse(python, "register-refused")
    assert "cannot lock" in found["words"]
    assert found["next"] == 1.0


def test_a_call_that_fails_costs_a_model_or_the_worker_and_never_an_answer(python: Path) -> None:
    found = rehearse(python, "faults", 1)
    assert found["faults_tried"] > 0
    assert found["wrong_answers"] == 0
    assert not found["needlessly"]
    assert not found["ended"]


def test_a_server_on_a_gpu_answers_right_while_sixty_models_share_sixteen_pages(
    python: Path,
) -> None:
    found = rehearse(python, "serve", 90)
    assert found["wrong"] == 0
    assert found["right"] > 0
    assert found["launches"] >= found["right"]
    assert not found["forbidden"]


# A convolution, products with a bias and without, and kernels that the stand-in does not know; in two precisions.
_NETWORK = """
import torch
for kind in (torch.float32, torch.float16):
    x = torch.zeros(2, 3, 8, 8, device="cuda", dtype=kind)
    y = torch.nn.functional.conv2d(x, x[:, :, :3, :3], padding=1).relu().flatten(1)
    z = torch.nn.functional.linear(y, y, y[:, 0])
    torch.bmm(z[None], z[None]).softmax(-1)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("idle", [False, True])
def test_kernels_that_are_not_known_fail_unless_they_are_to_do_nothing(
    python: Path, idle: bool
) -> None:
    added = idle_environment(python) if idle else environment(python)
    done = subprocess.run(
        [str(python), "-c", _NETWORK],
        env=os.environ | added,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) is idle, done.stderr
