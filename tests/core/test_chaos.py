"""The scheduler against workers that do as they like: every event, every error, in any order.

Where test_random has workers that behave, here chance decides when an action ends and how, which models
and workers come and go, and what is cancelled. Whatever happens: one response per request, nothing sent
that the worker's state forbids, no command that finds nobody to carry it out, and no GPU idle beside
requests that it could answer. A failing case prints its seed; `Chaos(seed, policy).run()` repeats it.
"""

from __future__ import annotations

import pytest

from controller.core.policies import POLICIES
from controller.core.policies.deferral import Deferral
from controller.core.policies.edf_mh import EdfMhPolicy
from controller.core.policy import PolicyKind
from controller.core.state import Batch, Copy, WorkerState
from tests.kit.chaos import Chaos


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.seeds(10)
def test_whatever_happens_every_request_is_responded_to_and_no_gpu_idles(
    seed: int, policy: str
) -> None:
    """In every other life an operator pins models and lets them go, in two of three clients ask for certainty."""
    chaos = Chaos(seed, policy, pins=seed % 2 == 1, asks=seed % 3 > 0)
    chaos.run()
    assert chaos.num_answers > 0
    assert chaos.ledger.promised == {}


class Everywhere(Deferral):
    """Few models on many GPUs are rare here, so that deferral would hardly be seen."""

    def __init__(self) -> None:
        super().__init__(keep_ns=1 << 62)  # from the first drops on
        self.num_waited = 0

    def may_wait_on(self, worker: WorkerState) -> bool:
        return True

    def shares_gpus(self, copy: Copy) -> bool:
        return True

    def grows_until_ns(self, batch: Batch) -> int:
        at_ns = super().grows_until_ns(batch)
        self.num_waited += at_ns > batch.begin_ns
        return at_ns


def live_deferring(seed: int) -> tuple[Chaos, Everywhere]:
    deferral = Everywhere()
    kind = PolicyKind(
        lambda config: EdfMhPolicy(config, deferral=deferral), POLICIES["edf_mh"].traits
    )
    chaos = Chaos(seed, "edf_mh", kind)
    chaos.run()
    return chaos, deferral


@pytest.mark.seeds(4)
def test_nor_when_batches_wait_to_grow_wherever_they_can(seed: int) -> None:
    chaos, _ = live_deferring(seed)
    assert chaos.num_answers > 0


def test_batches_do_wait_to_grow_there() -> None:
    """A life in some hundreds sees none that does: this asks for it in lives that are known."""
    for seed in range(3):
        _, deferral = live_deferring(seed)
        assert deferral.num_waited > 0
