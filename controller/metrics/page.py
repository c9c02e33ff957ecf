"""The current values of all families, collected from the controller's parts.

A page is made in the event loop, in slices, because lists by model may be long; requests are served in between. So its
figures are not all of one moment; those of one histogram are.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any, Final

from clockwright import __version__
from clockwright.errors import Refusal
from clockwright.units import NS_PER_MS, NS_PER_S, NS_PER_US, ModelId
from clockwright.v1 import inference_pb2 as pb
from controller.access.quota_book import QuotaBook
from controller.core import ClusterLoad
from controller.front.admission.limits import AdmissionLimits
from controller.front.admission.pressure import MemoryPressure, MemoryState
from controller.front.remote.front_link import FrontLinks
from controller.links.worker_link import WorkerLinks
from controller.metrics.loop_share import LoopShare
from controller.metrics.process import Changes, ProcessFigures
from controller.metrics.tally import NAMES_MAX, OTHER, ModelTally, Tally, WorkerTally
from controller.metrics.text import Text, labels_of
from controller.models.catalogue import Catalogue, name_of
from controller.models.entry import ModelState, Pipeline
from controller.runtime import Runtime
from controller.selection.applications import Applications
from controller.stages.sequences.book import REASONS, Book
from controller.telemetry.tables import CANCELLED, COUNTERS, OK

# A page yields to requests after this time, which it checks after this many models.
_SLICE_NS: Final = NS_PER_MS

# After a page, there is a pause of this many times its own time.
_PAUSE_FACTOR: Final = 9
_MODELS_BETWEEN_LOOKS: Final = 50
# How far a look for long runs goes back, and how many rows it takes at most.
_LONG_RUNS_NS, _LONG_RUNS_ROWS_MAX = 5 * NS_PER_S, 2000

_REASONS: Final = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
# Triton's name of each outcome; REJECTED for all others.
_REASON_OF: Final = {
    CANCELLED: "CANCELED",
    Refusal.FAILED.value: "BACKEND",
    Refusal.WORKER_LOST.value: "OTHER",
    Refusal.MODEL_REMOVED.value: "OTHER",
}

#: Counters by model without other labels, and their attributes.
_BY_MODEL: Final[dict[str, Callable[[ModelTally], int]]] = {
    "nv_inference_request_success": lambda model: model.answered,
    "nv_inference_count": lambda model: model.rows,
    "nv_inference_exec_count": lambda model: model.batches,
    "nv_inference_request_duration_us": lambda model: model.durations.sum_ns // NS_PER_US,
    "nv_inference_queue_duration_us": lambda model: model.queue_ns // NS_PER_US,
    "nv_inference_compute_input_duration_us": lambda model: model.input_ns // NS_PER_US,
    "nv_inference_compute_infer_duration_us": lambda model: model.exec_ns // NS_PER_US,
    "nv_inference_compute_output_duration_us": lambda model: model.output_ns // NS_PER_US,
    "clockwright_model_loads_total": lambda model: model.loads,
    "clockwright_model_evictions_total": lambda model: model.evictions,
    **{each.metric: methodcaller("counter", index) for index, each in enumerate(COUNTERS)},
}

#: Families whose samples are made worker by worker.
_BY_WORKER: Final = (
    *("nv_gpu_utilization", "nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes"),
    *("clockwright_worker_info", "clockwright_pages", "clockwright_page_bytes"),
    *("clockwright_gpu_exec_seconds_total", "clockwright_gpu_load_seconds_total"),
    *("clockwright_lane_backlog_seconds", "clockwright_actions_total"),
    *("clockwright_actions_in_flight", "clockwright_models_suspended"),
    *("clockwright_worker_complaints", "clockwright_gpu_clock_hertz"),
    "clockwright_worker_round_trip_seconds",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a controller that a page shows."""

    runtime: Runtime
    catalogue: Catalogue
    links: WorkerLinks
    fronts: FrontLinks
    applications: Applications
    quotas: QuotaBook
    door: AdmissionLimits
    memory: MemoryPressure
    #: Delay of the event loop.
    lag_ns: Callable[[], int]
    #: Generation in which it leads; 0: without a lease.
    generation: int
    #: Name of the scheduler's policy.
    policy: str
    #: Sequences of steps.
    sequences: Book[Any]


class Page:
    """Makes pages of one controller."""

    def __init__(self, parts: Parts) -> None:
        """Begin to count, from the next request on."""
        self._parts = parts
        self.tally = Tally(parts.runtime.telemetry, self._describe)
        self._changes = Changes()
        self._busy = Changes()
        self._process = ProcessFigures()
        self._slice_began_ns = 0
        self._making: dict[bool, asyncio.Task[list[bytes]]] = {}
        self._share = LoopShare(_PAUSE_FACTOR)

    async def make(self, *, openmetrics: bool) -> list[bytes]:
        """Make a page, in pieces; concurrent scrapes get the same page."""
        making = self._making.get(openmetrics)
        if making is None:
            # A client that scrapes without a pause gets a tenth of the loop's time, not half.
            make = partial(self._make, Text(openmetrics=openmetrics))
            making = asyncio.create_task(self._share.run(make))
            self._making[openmetrics] = making
            making.add_done_callback(lambda _: self._making.pop(openmetrics))
        return await asyncio.shield(making)

    def fill_statistics(self, model_id: ModelId, told: pb.ModelStatistics) -> None:
        """Fill in Triton's statistics of a model, with the same values as its metrics.

        A model that is counted together with others is left out. As with Triton, each time is a sum over successful
        requests.
        """
        self._parts.runtime.telemetry.count()
        model = self.tally.find(model_id)
        if model is self.tally.others:
            return
        told.inference_count, told.execution_count = model.rows, model.batches
        if model.last_ns:
            # In ms since 1970, as Triton has it.
            age_ns = self._parts.runtime.clock() - model.last_ns
            told.last_inference = (time.time_ns() - age_ns) // NS_PER_MS
        found = told.inference_stats
        num_answered, unanswered = model.answered, model.unanswered
        found.fail.count = unanswered.total() - unanswered[CANCELLED]
        found.fail.ns = model.refused_ns
        for duration, ns in (
            (found.success, model.durations.sum_ns),
            (found.queue, model.queue_ns),
            (found.compute_input, model.input_ns),
            (found.compute_infer, model.exec_ns),
            (found.compute_output, model.output_ns),
        ):
            duration.count, duration.ns = num_answered, ns
        for rows, size in sorted(model.by_size.items()):
            batches = told.batch_stats.add(batch_size=rows)
            for duration, ns in (
                (batches.compute_input, size.input_ns),
                (batches.compute_infer, size.exec_ns),
                (batches.compute_output, size.output_ns),
            ):
                duration.count, duration.ns = size.batches, ns

    def _describe(self, model_id: ModelId) -> tuple[str, str] | None:
        catalogue = self._parts.catalogue
        entry = catalogue.find_id(model_id)
        if entry is None:  # Workers know no pipelines.
            found = catalogue.find(name_of(model_id))
            entry = found if isinstance(found, Pipeline) else None
        return None if entry is None else (entry.name, entry.version)

    async def _give_way(self) -> None:
        """Yield to requests, if this slice is over."""
        now_ns = time.perf_counter_ns()
        if now_ns - self._slice_began_ns >= _SLICE_NS:
            await asyncio.sleep(0)
            self._slice_began_ns = time.perf_counter_ns()

    async def _make(self, text: Text) -> list[bytes]:
        self._slice_began_ns = time.perf_counter_ns()
        self._parts.runtime.telemetry.count()
        await self._give_way()
        await self._models(text)
        self._requests(text)
        await self._give_way()
        self._workers(text)
        await self._give_way()
        self._tenants(text)
        await self._give_way()
        self._controller(text)
        self._process.write(text)
        return text.end()

    # --- models -------------------------------------------------------------------------------

    async def _models(self, text: Text) -> None:
        runtime, catalogue, tally = self._parts.runtime, self._parts.catalogue, self.tally
        served = catalogue.served
        states: list[ModelState] = []
        waiting: Counter[ModelTally] = Counter()
        copies: Counter[ModelTally] = Counter()
        # Models without requests are listed too, if there is room for all.
        has_room = len(served) <= NAMES_MAX
        for begin in range(0, len(served), _MODELS_BETWEEN_LOOKS):
            entries = served[begin : begin + _MODELS_BETWEEN_LOOKS]
            states += [catalogue.state(entry) for entry in entries]
            model_ids = [entry.model_id for entry in entries]
            if has_room:
                for model_id in model_ids:
                    tally.add(model_id)
            backlogs = runtime.backlogs(model_ids)
            for model_id, (num_waiting, num_resident) in zip(model_ids, backlogs, strict=True):
                if num_waiting or num_resident:
                    counted = tally.find(model_id)
                    waiting[counted] += num_waiting
                    copies[counted] += num_resident
            await self._give_way()
        models = [*tally.models.values()]
        if len(served) > len(models) or tally.others.answered or tally.others.unanswered:
            models.append(tally.others)
        for name, value in (
            *_BY_MODEL.items(),
            ("nv_inference_pending_request_count", waiting.__getitem__),
            ("clockwright_model_copies", copies.__getitem__),
        ):
            await self._by_model(text, name, models, partial(_line, name, value))
        await self._by_model(text, "nv_inference_request_failure", models, _failures)
        await self._by_model(text, "clockwright_requests_total", models, _outcomes)
        name = "clockwright_request_duration_seconds"
        text.begin(name)
        for index, counted in enumerate(models):
            # For a model without requests it adds nothing to the other counters.
            if counted.durations.sum_ns:
                text.histogram(name, counted.labels, counted.durations)
            if index % _MODELS_BETWEEN_LOOKS == 0:
                await self._give_way()
        text.begin("clockwright_models")
        for state in ModelState:
            text.line("clockwright_models", labels_of(state=state.value), states.count(state))
        draining = runtime.draining or self._parts.memory.state is MemoryState.ALL_REFUSED
        text.one("clockwright_ready", int(ModelState.LOADING not in states and not draining))

    async def _by_model(
        self,
        text: Text,
        name: str,
        models: list[ModelTally],
        lines_of: Callable[[ModelTally], str],
    ) -> None:
        text.begin(name)
        for begin in range(0, len(models), _MODELS_BETWEEN_LOOKS):
            text.lines(map(lines_of, models[begin : begin + _MODELS_BETWEEN_LOOKS]))
            await self._give_way()

    # --- requests -----------------------------------------------------------------------------

    def _requests(self, text: Text) -> None:
        tally, telemetry = self.tally, self._parts.runtime.telemetry
        name = "clockwright_deadline_slack_seconds"
        text.begin(name)
        text.histogram(name, "", tally.slacks)
        name = "clockwright_refusal_duration_seconds"
        text.begin(name)
        for reason in sorted(tally.refusals):
            text.histogram(name, labels_of(reason=reason), tally.refusals[reason])
        name = "clockwright_prediction_error_seconds"
        text.begin(name)
        for what, histogram in tally.errors.items():
            text.histogram(name, labels_of(predicted=what), histogram)
        total = telemetry.total
        _, answered, over = self._changes.since_earlier(
            "requests", (time.monotonic_ns(), total.answered, total.requests - total.cancelled)
        )
        text.one("clockwright_slo_attainment_ratio", answered / over if over else 1.0)
        text.one("clockwright_requests_waiting", self._parts.runtime.num_waiting)
        text.each(
            "clockwright_requests_refused_at_door_total",
            [(labels_of(reason=reason), num) for reason, num in telemetry.at_door.items()],
        )
        text.each(
            "clockwright_calls_denied_total",
            [(labels_of(reason=denial.value), num) for denial, num in telemetry.denials.items()],
        )
        text.one("clockwright_bad_requests_total", telemetry.bad_requests)
        since_ns = self._parts.runtime.clock() - _LONG_RUNS_NS
        runs = telemetry.long_runs_since(since_ns, _LONG_RUNS_ROWS_MAX)
        behind = [] if runs is None else [(runs.model_id, runs.num_refused / _LONG_RUNS_NS)]
        text.each(
            "clockwright_requests_behind_long_runs_per_second",
            [(labels_of(model=name_of(model)), rate * NS_PER_S) for model, rate in behind],
        )
        cache = self._parts.applications.cache_statistics()
        lookups = {"hit": cache.hits, "join": cache.joins, "miss": cache.misses}
        text.each(
            "clockwright_cache_lookups_total",
            [(labels_of(result=result), num) for result, num in lookups.items()],
        )
        text.one("clockwright_cache_bytes", cache.num_bytes)
        book = self._parts.sequences
        text.one("clockwright_sequences", len(book))
        text.one("clockwright_sequence_state_bytes", book.num_bytes)
        text.each(
            "clockwright_sequences_ended_total",
            [(labels_of(reason=reason), book.ended[reason]) for reason in REASONS],
        )

    # --- workers ------------------------------------------------------------------------------

    def _workers(self, text: Text) -> None:
        links, load = self._parts.links.links, self._parts.runtime.cluster_load()
        states = Counter(
            [
                "DRAINING" if link.draining else "READY" if link.joined else "JOINING"
                for link in links
            ]
        )
        text.each(
            "clockwright_workers",
            [(labels_of(state=state), states[state]) for state in ("JOINING", "READY", "DRAINING")],
        )
        samples: dict[str, list[tuple[str, float]]] = {name: [] for name in _BY_WORKER}
        page_bytes = {}
        for link in links:
            register, card = link.register, link.card
            worker = labels_of(worker=link.worker_id)
            page_bytes[link.worker_id] = register.page_bytes
            info = labels_of(
                worker=link.worker_id,
                gpu_kind=register.gpu_kind,
                device=register.device,
                host=register.host,
            )
            samples["clockwright_worker_info"].append((info, 1))
            samples["clockwright_page_bytes"].append((worker, register.page_bytes))
            samples["clockwright_worker_complaints"].append((worker, len(card.complaints)))
            if card.clock_mhz:
                samples["clockwright_gpu_clock_hertz"].append((worker, card.clock_mhz * 1_000_000))
            round_trip_s = link.clock.round_trip_ns / NS_PER_S
            samples["clockwright_worker_round_trip_seconds"].append((worker, round_trip_s))
        for row in load.workers:
            worker = labels_of(worker=row.worker_id)
            num_resident = row.num_pages - row.num_free_pages - row.num_loading_pages
            samples["clockwright_pages"] += [
                (f'{worker},state="resident"', num_resident),
                (f'{worker},state="loading"', row.num_loading_pages),
                (f'{worker},state="free"', row.num_free_pages),
            ]
            samples["clockwright_lane_backlog_seconds"] += [
                (f'{worker},lane="exec"', row.exec_backlog_ns / NS_PER_S),
                (f'{worker},lane="load"', row.load_backlog_ns / NS_PER_S),
            ]
            samples["clockwright_actions_in_flight"].append((worker, row.num_in_flight))
            samples["clockwright_models_suspended"].append((worker, len(row.suspended)))
            gpu = labels_of(gpu_uuid=row.worker_id)
            size = page_bytes.get(row.worker_id, 0)
            samples["nv_gpu_memory_total_bytes"].append((gpu, row.num_pages * size))
            used_bytes = (row.num_pages - row.num_free_pages) * size
            samples["nv_gpu_memory_used_bytes"].append((gpu, used_bytes))
            tally = self.tally.workers.get(row.worker_id) or WorkerTally()
            elapsed_ns, busy_ns = self._busy.since_earlier(
                row.worker_id, (time.monotonic_ns(), tally.exec_ns)
            )
            # Work that started before and ended since counts as a whole.
            samples["nv_gpu_utilization"].append((gpu, min(1.0, busy_ns / max(elapsed_ns, 1))))
            exec_s, load_s = tally.exec_ns / NS_PER_S, tally.load_ns / NS_PER_S
            samples["clockwright_gpu_exec_seconds_total"].append((worker, exec_s))
            samples["clockwright_gpu_load_seconds_total"].append((worker, load_s))
            samples["clockwright_actions_total"] += [
                (f'{worker},type="{kind}",error="{error}"', num)
                for (kind, error), num in sorted(tally.actions.items())
            ]
        self._busy.keep_only({row.worker_id for row in load.workers})
        for name, found in samples.items():
            text.each(name, found)
        _capacity(text, load)

    # --- tenants and the controller -------------------------------------------------------------

    def _tenants(self, text: Text) -> None:
        # Admitted, refused, open requests, open bytes.
        sums: dict[str, list[int]] = {}
        for number, (tenant, use) in enumerate(self._parts.quotas.uses()):
            known = tenant if number < NAMES_MAX and tenant != OTHER else OTHER
            found = sums.setdefault(labels_of(tenant=known), [0, 0, 0, 0])
            for index, value in enumerate(
                (use.num_admitted, use.num_refused, use.num_open, use.num_bytes)
            ):
                found[index] += value
        for index, name in enumerate(
            (
                "clockwright_quota_admitted_total",
                "clockwright_quota_refused_total",
                "clockwright_quota_open_requests",
                "clockwright_quota_open_bytes",
            )
        ):
            text.each(name, [(labels, values[index]) for labels, values in sums.items()])

    def _controller(self, text: Text) -> None:
        parts = self._parts
        door, memory = parts.door, parts.memory
        text.one("clockwright_open_requests", door.num_requests)
        text.one("clockwright_open_requests_limit", door.max_requests)
        text.one("clockwright_open_bytes", door.num_bytes)
        text.one("clockwright_open_bytes_limit", door.max_bytes)
        text.one("clockwright_memory_bytes", memory.used_bytes)
        text.one("clockwright_memory_limit_bytes", memory.limit_bytes)
        text.each(
            "clockwright_memory_state",
            [(labels_of(state=each.value), int(each is memory.state)) for each in MemoryState],
        )
        text.one("clockwright_event_loop_lag_seconds", parts.lag_ns() / NS_PER_S)
        text.one("clockwright_fronts", parts.fronts.num_fronts)
        text.one("clockwright_leader", int(not parts.runtime.draining))
        text.one("clockwright_generation", parts.generation)
        text.each(
            "clockwright_build_info",
            [(labels_of(version=__version__, policy=parts.policy), 1)],
        )


def _line(name: str, value: Callable[[ModelTally], int], model: ModelTally) -> str:
    return f"{name}{{{model.labels}}} {value(model)}\n"


def _failures(model: ModelTally) -> str:
    """The lines of requests that were not answered in time, by Triton's reasons."""
    numbers = dict.fromkeys(_REASONS, 0)
    for outcome, number in model.unanswered.items():
        numbers[_REASON_OF.get(outcome, "REJECTED")] += number
    return "".join(
        [
            f'nv_inference_request_failure{{{model.labels},reason="{reason}"}} {number}\n'
            for reason, number in numbers.items()
        ]
    )


def _outcomes(model: ModelTally) -> str:
    numbers = {OK: model.answered, **model.unanswered}
    return "".join(
        [
            f'clockwright_requests_total{{{model.labels},outcome="{_outcome(outcome)}",reason="'
            f'{"" if outcome in (OK, CANCELLED) else outcome}"}} {number}\n'
            for outcome, number in numbers.items()
        ]
    )


def _outcome(outcome: str) -> str:
    return {OK: "ok", CANCELLED: "cancelled"}.get(outcome, "refused")


def _capacity(text: Text, load: ClusterLoad) -> None:
    """The families of kinds of workers, for autoscaling."""
    kinds = [(labels_of(gpu_kind=kind.gpu_kind), kind) for kind in load.kinds]
    text.each(
        "clockwright_required_workers",
        [(labels, kind.wanted) for labels, kind in kinds],
    )
    text.each(
        "clockwright_lane_busy_ratio",
        [
            (f'{labels},lane="{lane}"', busy)
            for labels, kind in kinds
            for lane, busy in (("exec", kind.exec_busy), ("load", kind.load_busy))
        ],
    )
    shortages = [
        (f'{labels},resource="{resource}"', rps)
        for labels, kind in kinds
        for resource, rps in (
            ("exec", kind.dropped_for_exec_rps),
            ("link", kind.dropped_for_links_rps),
            ("load", kind.dropped_for_loads_rps),
            ("pages", kind.dropped_for_pages_rps),
        )
    ]
    nobody = labels_of(gpu_kind="", resource="worker")
    text.each(
        "clockwright_shortage_requests_per_second",
        [*shortages, (nobody, load.dropped_without_worker_rps)],
    )
    text.each(
        "clockwright_one_more_requests_per_second",
        [(labels, kind.one_more_rps) for labels, kind in kinds],
    )
