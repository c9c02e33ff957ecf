"""Stories that nobody reads: everything that may happen, in any order, from a seed."""

from __future__ import annotations

import random
from typing import Final

# Settings by which the runs differ, so that more of what may be set is in force somewhere.
SETTINGS: Final = (
    "",
    "batch_slo_ns=400ms fill_free_pages=no dispatch_delay_ns=0us margin_ns=1ms max_outstanding=2 "
    "batching=quantile batch_delay_ns=4ms action_timeout_ns=60ms tenant_weights=gold:4,tin:0.5",
    "adaptive_lookahead=no adaptive_margin=no limit_batch=no isolation=0.5 "
    "batch_slo_ns=2s batching=none lookahead_ns=2ms action_timeout_ns=500ms",
)
SIZES: Final = ((1,), (1, 2, 4), (1, 2, 4, 8, 16), (4,), (1, 3))
NUM_STEPS: Final = 1000


class RandomStory:
    """A script of so many steps, and calm at the end until all is answered."""

    def __init__(self, seed: int) -> None:
        # Draws whole numbers only: what a logarithm's last digit is depends on the machine.
        self._random = random.Random(seed)
        self._now_us = 0
        self._num_models = 0
        self._num_gpus = 0
        self._num_requests = 0
        self._models: list[str] = []
        self._lines = [f"config {SETTINGS[seed % len(SETTINGS)]}"]

    def script(self) -> str:
        for _ in range(2):
            self._join()
        for _ in range(8):
            self._add()
        happenings = {
            self._ask: 700,
            self._ask_together: 120,
            self._cancel: 40,
            self._fate: 30,
            self._clock: 12,
            self._pace: 8,
            self._way: 5,
            self._want: 8,
            self._add: 6,
            self._remove: 4,
            self._join: 4,
            self._leave: 3,
        }
        for number in range(NUM_STEPS):
            # Calm and rush take turns, every 200 steps.
            self._now_us += self._random.randrange(400 if number // 200 % 2 else 4000)
            (happens,) = self._random.choices(list(happenings), list(happenings.values()))
            happens()
        self._say("close")
        self._ask()
        return "\n".join(self._lines) + "\n"

    def _say(self, words: str) -> None:
        self._lines.append(f"{self._now_us}us {words}")

    def _ask(self) -> None:
        self._num_requests += 1
        self._say(f"request {self._model()} {self._terms()}")

    def _ask_together(self) -> None:
        names = list(dict.fromkeys([self._model(), self._model()]))
        count = self._random.randint(2, 12)
        self._num_requests += count * len(names)
        self._say(f"{count} requests {','.join(names)} {self._terms()}")

    def _model(self) -> str:
        # The first ones are asked for more often; one does not exist.
        if self._random.randrange(60) == 0:
            return "nobody"
        most = self._random.choice([2, len(self._models), len(self._models)])
        return self._random.choice(self._models[:most])

    def _terms(self) -> str:
        words = f"slo={self._random.choice([5, 20, 30, 40, 50, 100, 400, 3000])}ms"
        words += f" rows={self._random.choice([1] * 12 + [2, 3, 5])}"
        words += self._random.choice(["", "", " tenant=gold", " tenant=tin", " tenant=lead"])
        return words + self._random.choice(["", "", " ago=100us", " ago=3ms"])

    def _cancel(self) -> None:
        if self._num_requests:
            last = self._random.randrange(min(self._num_requests, 12))
            self._say(f"cancel {self._num_requests - last}")

    def _fate(self) -> None:
        error = self._random.choice(["TOO_LATE"] * 4 + ["DEVICE"] * 3 + ["BAD_INPUT", "NO_PAGES"])
        what = self._random.choice(
            [f"takes {self._random.randint(1, 30)}ms", f"fails {error}"] * 4 + ["hangs"]
        )
        kind = self._random.choice(["infer", "infer", "load"])
        self._say(f"next {kind} {what}")

    def _clock(self) -> None:
        mhz = self._random.choice([900, 1200, 1400, 1400, 1400])
        self._say(f"clock {self._gpu()} {mhz}")

    def _pace(self) -> None:
        self._say(f"pace {self._gpu()} {self._random.choice(['0.75', '1', '1', '1.5'])}")

    def _way(self) -> None:
        self._say(f"way {self._gpu()} {self._random.choice(['0.3ms', '0.5ms', '0.5ms', '9ms'])}")

    def _want(self) -> None:
        self._say(f"want {self._model()}")

    def _add(self) -> None:
        if len(self._models) == 10:
            return
        self._num_models += 1
        name, number = f"m{self._num_models}", self._random.randrange(len(SIZES))
        times = ",".join(f"{size}:{(1 + number) * (1 + size) * 250}us" for size in SIZES[number])
        self._models.append(name)
        self._say(
            f"model {name} load={1 + 3 * number}ms exec={times} pages={1 + number % 4} arch=r{number} "
            f"mhz={self._random.choice([0, 0, 1400])}"
        )

    def _remove(self) -> None:
        if len(self._models) > 4:
            self._say(f"remove {self._models.pop(self._random.randrange(len(self._models)))}")

    def _join(self) -> None:
        self._num_gpus += 1
        unlike = self._random.choice(["", "", " kind=old slow=1.75"])
        self._say(f"gpu g{self._num_gpus} pages={self._random.randint(5, 14)}{unlike}")

    def _gpu(self) -> str:
        return f"g{self._random.randint(max(1, self._num_gpus - 4), self._num_gpus)}"

    def _leave(self) -> None:
        self._say(f"{self._random.choice(['drain', 'lose'])} {self._gpu()}")
