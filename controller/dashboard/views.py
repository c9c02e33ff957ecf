"""The content of the pages, as JSON: read from the controller's parts on request.

Times are numbers in milliseconds, dates are Unix time in seconds. Content is made in the event loop, in slices,
without waiting: data that only a store has is left out until it has arrived. The rows read from telemetry's tables are
bounded: under a higher load it looks back less far.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import msgspec

from clockwright import __version__
from clockwright.errors import UnknownModelError
from clockwright.findings import SLOW_FACTOR, PagesAsked, diagnose, times_slower, well
from clockwright.foreign import quote
from clockwright.units import NS_PER_MS, NS_PER_S, ModelId
from clockwright.v1 import control_pb2 as pb
from controller.core import ClusterLoad, KindStatistics
from controller.front.admission.pressure import MemoryState
from controller.front.oip.json_messages import fields_of
from controller.front.services.recent import kind_info, recent_actions, recent_requests
from controller.front.services.request_report import explain_request
from controller.metrics.page import Parts
from controller.models.catalogue import name_of
from controller.models.entry import Entry, ModelState
from controller.selection.messages import application_info_at_hand
from controller.telemetry.rows import ActionRow, RequestRow
from controller.telemetry.tables import CANCELLED, OK, Counts

#: How far the rates of models look back, and rows of which they are made at most.
_WINDOW_NS: Final = 5 * NS_PER_S
_ROWS_MAX: Final = 2000
#: Models in a list, the busiest first: on a page with other lists, and on a page of its own.
_MODELS_SHOWN: Final = 12
MODELS_MAX: Final = 100
_WORKERS_MAX: Final = 200
#: Workers whose pages are listed, and models of each.
_HOLDERS_MAX: Final = 32
_HELD_MAX: Final = 24
#: The timeline: how far back, and rows of each table.
_TIMELINE_NS: Final = 2 * NS_PER_S
_TIMELINE_ROWS_MAX: Final = 300
#: The past of the charts: how far back, and rows that are read at most, so many between two looks at the clock.
_HISTORY_S: Final = 300
_HISTORY_ROWS_MAX: Final = 60_000
_ROWS_BETWEEN_TURNS: Final = 1000
#: Requests of one model that are listed.
_REQUESTS_MAX: Final = 30
#: States of models are looked at so many between two turns, and again after so long.
_STATES_BETWEEN_TURNS: Final = 1000
_STATES_KEPT_S: Final = 5.0

_encode = msgspec.json.Encoder().encode


class DashboardViews:
    """Looks at one controller. It lives in its event loop."""

    def __init__(self, parts: Parts, *, default_slo_ns: int) -> None:
        """Begin to look; the SLO is of models that have none of their own."""
        self._parts = parts
        self._default_slo_ns = default_slo_ns
        self._started_ns = parts.runtime.clock()
        self._num_by_state = dict.fromkeys(ModelState, 0)
        self._unfit: list[Entry] = []
        self._states_at_s = -_STATES_KEPT_S
        # Time of the last refresh, and the number of requests refused at the front by then.
        self._at_door: tuple[int, int] | None = None

    # --- pages --------------------------------------------------------------------------------

    async def overview(self) -> bytes:
        """How the whole is: rates of the last moments, workers, the busiest models."""
        parts = self._parts
        runtime = parts.runtime
        told, load, recent, workers = await self._head()
        await asyncio.sleep(0)
        now_ns = runtime.clock()
        rows = runtime.telemetry.requests_since(self._since(now_ns), _ROWS_MAX)
        models = self._busiest(rows, now_ns, _MODELS_SHOWN)
        await asyncio.sleep(0)
        over_s = max(recent.over_ns, 1) / NS_PER_S
        told["recent"] = {
            "over_s": over_s,
            "asked_rps": recent.requests / over_s,
            "good_rps": recent.answered / over_s,
            "refused_rps": {row.reason: row.count / over_s for row in recent.refusals},
            "p50_ms": recent.latency_ns_p50 / NS_PER_MS,
            "p99_ms": recent.latency_ns_p99 / NS_PER_MS,
            "p50_share": recent.slo_share_p50,
            "p99_share": recent.slo_share_p99,
        }
        told["waiting"] = runtime.num_waiting
        told["second"] = self._last_second(rows, now_ns)
        told["kinds"] = [_kind(kind) for kind in load.kinds]
        told["workers"] = workers[:_WORKERS_MAX]
        told["models"] = models
        return _encode(told)

    async def models(self) -> bytes:
        """The busiest models."""
        told, _, _, _ = await self._head()
        now_ns = self._parts.runtime.clock()
        rows = self._parts.runtime.telemetry.requests_since(self._since(now_ns), _ROWS_MAX)
        told["models"] = self._busiest(rows, now_ns, MODELS_MAX)
        return _encode(told)

    async def pages(self) -> bytes:
        """Which models fill the pages of which worker."""
        told, load, _, _ = await self._head()
        held = self._parts.runtime.held_pages()
        await asyncio.sleep(0)
        holders = []
        for worker in load.workers[:_HOLDERS_MAX]:
            found = sorted(held.get(worker.worker_id, ()), key=lambda row: -row[1])
            rest = found[_HELD_MAX:]
            holders.append(
                {
                    "id": worker.worker_id,
                    "pages": worker.num_pages,
                    # Others may have come and gone since the head was made: parts and the whole are of one time.
                    "free": worker.num_pages - sum(row[1] for row in found),
                    "models": [
                        {"name": name_of(model), "pages": num, "resident": resident}
                        for model, num, resident in found[:_HELD_MAX]
                    ],
                    "others": {"models": len(rest), "pages": sum(row[1] for row in rest)},
                }
            )
            await asyncio.sleep(0)
        told["holders"] = holders
        told["kinds"] = [_kind(kind) for kind in load.kinds]
        return _encode(told)

    async def timeline(self) -> bytes:
        """What the lanes did in the last moments, and which requests it was for."""
        told, load, _, workers = await self._head()
        runtime = self._parts.runtime
        await asyncio.sleep(0)
        now_ns = runtime.clock()
        since_ns = now_ns - _TIMELINE_NS
        actions = runtime.telemetry.actions_since(since_ns, _TIMELINE_ROWS_MAX)
        requests = runtime.telemetry.requests_since(since_ns, _TIMELINE_ROWS_MAX)
        told["lanes"] = sorted(row.worker_id for row in load.workers)[:_HOLDERS_MAX]
        told["slow"] = {row["id"]: row["slower"] for row in workers if row["slow"]}
        told["over_ms"] = (
            min(_covered(actions, 13, since_ns, now_ns), _covered(requests, 6, since_ns, now_ns))
            / NS_PER_MS
        )
        told["actions"] = [_action(row, now_ns) for row in actions if row.type != "EvictWeights"]
        await asyncio.sleep(0)
        told["requests"] = [_request(row, now_ns) for row in requests]
        return _encode(told)

    async def model(self, name: str) -> bytes:
        """One model: what it asks for, how it is served, and its last requests.

        Raises UnknownModelError if no model has that name.
        """
        parts = self._parts
        runtime, catalogue = parts.runtime, parts.catalogue
        entry = catalogue.find(name)
        if entry is None:
            raise UnknownModelError(f"there is no model {quote(name)}")
        told, _, _, _ = await self._head()
        await asyncio.sleep(0)
        now_ns = runtime.clock()
        rows = [
            row
            for row in runtime.telemetry.requests_since(self._since(now_ns), _ROWS_MAX)
            if row.model_id == entry.model_id
        ]
        counts = runtime.telemetry.by_model.get(entry.model_id, Counts())
        row = runtime.model_statistics(entry.model_id)
        found = self._busiest(rows, now_ns, 1)
        told["model"] = {
            "name": entry.name,
            "version": entry.version,
            "state": catalogue.state(entry).value,
            "reason": catalogue.reason(entry),
            "pinned": catalogue.is_pinned(entry),
            "slo_ms": (entry.slo_ns or self._default_slo_ns) / NS_PER_MS,
            "weights_bytes": entry.weights_bytes,
            "num_pages": entry.num_pages,
            "one_by_one": entry.one_by_one,
            "requests": counts.requests,
            "answered": counts.answered,
            "cancelled": counts.cancelled,
            "counters": counts.by_name(),
            "refusals": dict(counts.refusals),
            "resident_on": [] if row is None else row.resident_on,
            "waiting": 0 if row is None else row.num_waiting + row.num_sent,
            "load_ms": 0 if row is None else row.load_ns / NS_PER_MS,
            "exec_ms": []
            if row is None
            else [[size, ns / NS_PER_MS] for size, ns in sorted(row.exec_ns.items())],
            "recent": found[0] if found else None,
            "last": [_request(each, now_ns) for each in rows[:_REQUESTS_MAX]],
        }
        return _encode(told)

    async def applications(self, name: str, context: str) -> bytes:
        """All applications, or one with the weights of a context; unknown names are in no list."""
        told, _, _, _ = await self._head()
        found = self._parts.applications
        running = found.all
        if name:
            one = found.find(name)
            if one is None:
                raise UnknownModelError(f"there is no application {quote(name)}")
            running = [one]
        told["applications"] = [
            fields_of(application_info_at_hand(found, each, context)) for each in running
        ]
        told["context"] = context
        return _encode(told)

    async def request(self, request_id: str) -> bytes:
        """What happened to a request.

        Raises BadRequestError if no request has such a name; UnknownRequestError if it does not exist, or is too long
        ago.
        """
        told, _, _, _ = await self._head()
        found = explain_request(self._parts.runtime, request_id, lambda _: True)
        told["request"] = fields_of(found)
        return _encode(told)

    async def history(self, name: str) -> bytes:
        """Goodput and latency of each of the last seconds, as far as telemetry's rows go.

        Of a model, or of all if the name is empty.
        """
        runtime = self._parts.runtime
        model = self._parts.catalogue.find(name)
        now_ns, now_s = runtime.clock(), time.time()
        zero_ns = now_ns - int(now_s * NS_PER_S)
        # Whole seconds, but for the one that is not over.
        end_ns = int(now_s) * NS_PER_S + zero_ns
        rows = runtime.telemetry.requests_since(now_ns - _HISTORY_S * NS_PER_S, _HISTORY_ROWS_MAX)
        await asyncio.sleep(0)
        seconds: list[Mapping[str, Any]] = []
        by_second = groupby(rows, key=lambda row: (row.departure_ns - zero_ns) // NS_PER_S)
        num_read = 0
        for second, each in by_second:
            found = list(each)
            num_read += len(found)
            if name:
                found = [
                    row for row in found if model is not None and row.model_id == model.model_id
                ]
            if second * NS_PER_S + zero_ns < end_ns:
                seconds.append({"at_s": second, **_summary(found, 1.0)})
            if num_read >= _ROWS_BETWEEN_TURNS:
                num_read = 0
                await asyncio.sleep(0)
        if len(rows) == _HISTORY_ROWS_MAX and seconds:
            # The earliest second is not there as a whole.
            seconds.pop()
        return _encode({"seconds": seconds[::-1], "now_s": now_s})

    # --- parts of pages -----------------------------------------------------------------------

    async def _head(
        self,
    ) -> tuple[dict[str, Any], ClusterLoad, pb.RecentRequests, list[dict[str, Any]]]:
        """What every page begins with, and what that was found from."""
        parts = self._parts
        runtime, telemetry = parts.runtime, parts.runtime.telemetry
        await self._count_states()
        now_ns = runtime.clock()
        load = runtime.cluster_load()
        recent = recent_requests(telemetry, since_ns=self._started_ns, now_ns=now_ns)
        await asyncio.sleep(0)
        links = {link.worker_id: link for link in parts.links.links}
        actions = recent_actions(
            telemetry,
            {name: link.register.gpu_kind for name, link in links.items()},
            since_ns=self._started_ns,
            now_ns=now_ns,
        )
        await asyncio.sleep(0)
        infos = []
        workers = []
        for row in load.workers:
            link = links.get(row.worker_id)
            if link is None:
                continue
            suspended = [
                f"{name_of(model)}: {words}" for model, words in sorted(row.suspended.items())
            ]
            info = pb.WorkerInfo(
                worker_id=row.worker_id,
                gpu_kind=link.register.gpu_kind,
                num_pages=row.num_pages,
                num_free_pages=row.num_free_pages,
                complaints=link.card.complaints,
                suspended=suspended,
                recent=actions.get(row.worker_id),
            )
            infos.append(info)
            worked = info.recent
            workers.append(
                {
                    "id": row.worker_id,
                    "kind": link.register.gpu_kind,
                    "device": link.register.device,
                    "host": link.register.host,
                    "state": "draining" if link.draining else "ready",
                    "exec_busy": worked.exec_busy,
                    "load_busy": worked.load_busy,
                    "infers": worked.infers,
                    "slower": worked.exec_over_others or worked.exec_over_predicted,
                    "slow": times_slower(worked) >= SLOW_FACTOR,
                    "over_s": worked.over_ns / NS_PER_S,
                    "against": "others" if worked.exec_over_others else "prediction",
                    "too_late": worked.too_late,
                    "failed": worked.failed,
                    "pages": row.num_pages,
                    "free": row.num_free_pages,
                    "loading": row.num_loading_pages,
                    "ahead_ms": row.exec_backlog_ns / NS_PER_MS,
                    "suspended": suspended[:3],
                    "complaints": list(link.card.complaints)[:3],
                }
            )
        memory = parts.memory
        status = pb.StatusResponse(
            draining=runtime.draining,
            memory_bytes=memory.used_bytes,
            memory_limit_bytes=memory.limit_bytes,
            memory_state=memory.state.value,
            kinds=[kind_info(kind) for kind in load.kinds],
            dropped_without_worker_rps=load.dropped_without_worker_rps,
            recent=recent,
        )
        unfit = [
            pb.ModelInfo(
                model_id=entry.name, state="UNAVAILABLE", reason=parts.catalogue.reason(entry)
            )
            for entry in self._unfit
        ]
        asked = None
        if any(kind.dropped_for_pages_rps for kind in load.kinds):
            asked = self._pages_asked(telemetry.requests_since(self._since(now_ns), _ROWS_MAX))
        findings = diagnose(status, infos, unfit, asked)
        newest = telemetry.requests_since(self._started_ns, 1)
        ready = not (
            runtime.draining
            or memory.state is MemoryState.ALL_REFUSED
            or self._num_by_state[ModelState.LOADING]
        )
        told = {
            "now_s": time.time(),
            "version": __version__,
            "policy": parts.policy,
            "up_s": (now_ns - self._started_ns) / NS_PER_S,
            "ready": ready,
            "findings": [dataclasses.asdict(row) for row in findings],
            "well": well(status),
            "num_models": sum(self._num_by_state.values()),
            "num_ready": self._num_by_state[ModelState.READY],
            "num_unfit": self._num_by_state[ModelState.UNAVAILABLE],
            "idle": not recent.requests and not runtime.num_waiting,
            # How far figures look back: of requests, and of kinds of workers.
            "over_s": recent.over_ns / NS_PER_S,
            "kinds_over_s": max((kind.over_ns for kind in load.kinds), default=0) / NS_PER_S,
            "last_ago_s": (now_ns - newest[0].departure_ns) / NS_PER_S if newest else None,
        }
        return told, load, recent, workers

    async def _count_states(self) -> None:
        now_s = time.monotonic()
        is_loading = self._num_by_state[ModelState.LOADING]
        if now_s - self._states_at_s < _STATES_KEPT_S and not is_loading:
            return
        catalogue = self._parts.catalogue
        served = catalogue.served
        states: list[ModelState] = []
        for begin in range(0, len(served), _STATES_BETWEEN_TURNS):
            states += map(catalogue.state, served[begin : begin + _STATES_BETWEEN_TURNS])
            await asyncio.sleep(0)
        self._num_by_state = {state: states.count(state) for state in ModelState}
        self._unfit = []
        if self._num_by_state[ModelState.UNAVAILABLE]:
            found = zip(served, states, strict=True)
            self._unfit = [entry for entry, state in found if state is ModelState.UNAVAILABLE]
            # The first is named, the others are counted.
            self._unfit.sort(key=lambda entry: entry.name)
        self._states_at_s = now_s

    def _pages_asked(self, rows: Sequence[RequestRow]) -> PagesAsked:
        """What the models need that some requests were for."""
        catalogue = self._parts.catalogue
        entries = {
            model_id: catalogue.find(name_of(model_id))
            for model_id in {row.model_id for row in rows}
        }
        pages = {
            model_id: entry.num_pages for model_id, entry in entries.items() if entry is not None
        }
        refused = {
            row.model_id for row in rows if row.outcome in ("COLD", "OVERLOADED")
        } & pages.keys()
        least = min([pages[model_id] for model_id in refused], default=0)
        return PagesAsked(num_pages=sum(pages.values()), num_least=least)

    def _since(self, now_ns: int) -> int:
        return max(self._started_ns, now_ns - _WINDOW_NS)

    def _last_second(self, rows: Sequence[RequestRow], now_ns: int) -> dict[str, Any]:
        """A point of the charts."""
        since_ns = max(self._started_ns, now_ns - NS_PER_S)
        found = [row for row in rows if row.departure_ns >= since_ns]
        told = _summary(found, _covered(found, 6, since_ns, now_ns, _ROWS_MAX) / NS_PER_S)
        num_at_door = self._parts.runtime.telemetry.at_door.total()
        if self._at_door is not None and num_at_door > self._at_door[1]:
            before_ns, num_before = self._at_door
            rps = (num_at_door - num_before) * NS_PER_S / max(now_ns - before_ns, 1)
            told["refused_rps"]["at the front"] = rps
            told["asked_rps"] += rps
        self._at_door = (now_ns, num_at_door)
        return told

    def _busiest(
        self, rows: Sequence[RequestRow], now_ns: int, num_max: int
    ) -> list[dict[str, Any]]:
        """Sum up requests of the last seconds by model, those that were asked most first."""
        if not rows:
            return []
        over_s = _covered(rows, 6, self._since(now_ns), now_ns, _ROWS_MAX) / NS_PER_S
        numbers = Counter([row.model_id for row in rows])
        order = [model_id for model_id, _ in numbers.most_common(num_max)]
        by_model: dict[ModelId, list[RequestRow]] = {model_id: [] for model_id in order}
        for row in rows:
            if row.model_id in by_model:
                by_model[row.model_id].append(row)
        backlogs = self._parts.runtime.backlogs(order)
        told = []
        for model_id, (num_waiting, num_copies) in zip(order, backlogs, strict=True):
            told.append(
                {
                    "name": name_of(model_id),
                    "waiting": num_waiting,
                    "copies": num_copies,
                    **_summary(by_model[model_id], over_s),
                }
            )
        return told


def _summary(rows: Iterable[RequestRow], over_s: float) -> dict[str, Any]:
    """Sum up requests that are over; those that clients withdrew do not count."""
    outcomes: dict[str, int] = {}
    latencies: list[int] = []
    shares: list[float] = []
    num_cold = 0
    for row in rows:
        outcome = row.outcome
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if outcome == OK:
            latency_ns = row.departure_ns - row.arrival_ns
            latencies.append(latency_ns)
            shares.append(latency_ns / max(row.slo_ns, 1))
            num_cold += row.cold
    num_good = outcomes.pop(OK, 0)
    outcomes.pop(CANCELLED, 0)
    num_asked = num_good + sum(outcomes.values())
    latencies.sort()
    shares.sort()
    return {
        "asked_rps": num_asked / over_s,
        "good_rps": num_good / over_s,
        "good": num_good / num_asked if num_asked else None,
        "refused_rps": {reason: num / over_s for reason, num in outcomes.items()},
        "cold_rps": num_cold / over_s,
        "p50_ms": _percentile(latencies, 50, NS_PER_MS),
        "p99_ms": _percentile(latencies, 99, NS_PER_MS),
        "p50_share": _percentile(shares, 50, 1),
        "p99_share": _percentile(shares, 99, 1),
    }


def _percentile(ordered: Sequence[float], percent: int, unit: int) -> float | None:
    if not ordered:
        return None
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)] / unit


def _covered(
    rows: Sequence[Any], column: int, since_ns: int, now_ns: int, num_max: int = _TIMELINE_ROWS_MAX
) -> int:
    """How far rows reach back that are the newest since a time; as far as that, if there are all."""
    if len(rows) == num_max:
        since_ns = rows[-1][column]
    return max(now_ns - since_ns, 1)


def _action(row: ActionRow, now_ns: int) -> dict[str, Any]:
    """An action for the timeline; times are before now, so that they are negative."""
    is_load = row.type != "Infer"
    step = row.load if is_load else row.exec
    return {
        "id": row.action_id,
        "lane": "load" if is_load else "exec",
        "worker": row.worker_id,
        "model": name_of(row.model_id),
        "batch": row.batch_size,
        "requests": row.num_requests,
        "earliest": _before(row.earliest_ns, now_ns),
        "latest": _before(row.latest_ns, now_ns),
        "predicted": [
            _before(row.expected_begin_ns, now_ns),
            _before(row.expected_begin_ns + row.expected_duration_ns, now_ns),
        ],
        "ran": None
        if step is None
        else [_before(step.begin_ns, now_ns), _before(step.end_ns, now_ns)],
        "error": "" if row.error == "NONE" else row.error,
    }


def _request(row: RequestRow, now_ns: int) -> dict[str, Any]:
    """A request that is over, as `_action`."""
    return {
        # Beyond 2^53 JavaScript would round it.
        "id": str(row.request_id),
        "model": name_of(row.model_id),
        "arrived": _before(row.arrival_ns, now_ns),
        "deadline": _before(row.arrival_ns + row.slo_ns, now_ns),
        "left": _before(row.departure_ns, now_ns),
        "outcome": row.outcome,
        "cold": row.cold,
        "worker": row.worker_id,
        "action": row.action_id,
        "batch": row.batch_size,
        "rows": row.rows,
    }


def _before(at_ns: int | None, now_ns: int) -> float | None:
    return None if at_ns is None else (at_ns - now_ns) / NS_PER_MS


def _kind(row: KindStatistics) -> dict[str, Any]:
    return {
        "kind": row.gpu_kind,
        "workers": row.num_workers,
        "wanted": row.wanted,
        "exec_busy": row.exec_busy,
        "load_busy": row.load_busy,
        "loads_per_s": row.loads_per_s,
        "evictions_per_s": row.evictions_per_s,
        "dropped_rps": {
            "EXEC time": row.dropped_for_exec_rps,
            "time to load": row.dropped_for_loads_rps,
            "pages": row.dropped_for_pages_rps,
            "links": row.dropped_for_links_rps,
        },
    }
