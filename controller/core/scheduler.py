"""The scheduler's interface: events in, commands out.

It gives each event to the responsible room: `Requests`, `Results` or `Membership`. `Books` holds the state, `Alarms` the
timers, and `Dispatch` fills the lanes. The policy chooses batches and weights.

Deviations from Clockwork's source, shared by the policies that predict (those that react evict a model with
waiting requests, and refuse nothing by prediction):

* A model's queue is in deadline order, not arrival order, so mixed SLOs in one model work.
* `latest_ns` of an Infer is capped by its earliest deadline minus its predicted time.
* An Infer may be planned behind a pending LoadWeights of its model.
* A model whose requests have to wait is copied to an idle worker with free pages, although Appendix B
  finds its demand met (`fill_free_pages`): else a worker that joins gets nothing before the others are
  overloaded.
* A request refused because its model is cold has the model loaded, where nothing else wants the lane.
* Eviction never takes a model with an action in flight or with waiting requests.
* An Infer refused for lateness, or lost with its worker or alone, puts its requests back while slack remains; so does
  one that failed, in smaller batches, one whose result is overdue (health.py), and one whose window closed behind a run
  that took too long.
* Every action has a timeout; a worker that exceeds it, or contradicts the controller's books, is let
  go and starts afresh when it registers again.
* Refused requests are answered at once, with the reason, not at the deadline.
* The link of each worker is measured, its length and what it carries, and planned for (link.py).
* Estimates are kept per GPU kind, clock, architecture and batch sizes (estimator.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from clockwright.errors import ConfigError, Refusal
from clockwright.units import GpuKind, ModelId, WorkerId
from controller.core.alarms import Alarms
from controller.core.books import Books
from controller.core.config import SchedulerConfig
from controller.core.dispatch import Dispatch
from controller.core.events import (
    ActionFailed,
    ActionSucceeded,
    AdmissionClosed,
    CertaintyAsked,
    ClockSeen,
    Command,
    Event,
    LearnedLink,
    LearnedStart,
    LearnedTimes,
    ModelAdded,
    ModelPinned,
    ModelReady,
    ModelRemoved,
    ModelWanted,
    Recalled,
    RefuseRequest,
    RequestArrived,
    RequestCancelled,
    RequestsArrived,
    TenantsWeighed,
    TimerFired,
    TurnedAway,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from controller.core.forecast import Forecast, forecast
from controller.core.health import Health
from controller.core.lag import Lag
from controller.core.leaving import Leaving, cheapest_to_lose, why_not
from controller.core.membership import Membership
from controller.core.parts import CoreParts
from controller.core.policies import POLICIES
from controller.core.policy import PolicyKind
from controller.core.remedies import Obstacles, Remedies
from controller.core.requests import Requests
from controller.core.results import Results
from controller.core.state import (
    WorkerState,
)
from controller.core.statistics import (
    ClusterLoad,
    HeldPages,
    ModelStatistics,
    ModelTimes,
    Outlook,
    Statistics,
    cluster_load_of,
    held_pages_of,
    model_statistics_of,
    model_times_of,
    outlook_of,
    share_with_devices,
    snapshot,
)


class Scheduler:
    """Decides which model runs on which GPU, and when."""

    def __init__(
        self, config: SchedulerConfig | None = None, kind: PolicyKind | None = None
    ) -> None:
        """Make one without workers, models or requests, with the built-in policy that `config` names, or another kind.

        Raises ConfigError if no policy is built in under that name.
        """
        self.config = config or SchedulerConfig()
        kind = kind or POLICIES.get(self.config.policy)
        if kind is None:
            raise ConfigError(
                f"policy is {self.config.policy!r}, expected one of {', '.join(POLICIES)}"
            )
        self.traits = kind.traits
        self._predicts = kind.traits.predicts
        self._punctual = kind.traits.punctual
        self._policy = kind.make(self.config)
        self._now_ns = 0
        self._commands: list[Command] = []
        self._alarms = Alarms(self.config)
        self._books = Books(self._policy)
        self._remedies = Remedies(self._books)
        parts = CoreParts(
            self.config,
            kind.traits,
            self._policy,
            self._books,
            self._alarms,
            Lag(),
            Health(self._books),
            self._commands,
        )
        self._dispatch = dispatch = Dispatch(parts)
        self._requests = requests = Requests(parts, dispatch)
        self._members = members = Membership(parts, requests, dispatch)
        self._results = results = Results(parts, requests, members, dispatch)
        self._handlers: dict[type, Callable[[Any, int], None]] = {
            RequestArrived: requests.arrived,
            RequestsArrived: requests.arrived_together,
            TurnedAway: requests.turned_away,
            CertaintyAsked: requests.certainty_asked,
            RequestCancelled: requests.cancelled,
            AdmissionClosed: requests.close,
            ActionSucceeded: results.succeeded,
            ActionFailed: results.failed,
            TimerFired: self._timer_fired,
            TenantsWeighed: self._tenants_weighed,
            Recalled: members.recalled,
            WorkerJoined: members.worker_joined,
            ClockSeen: members.clock_seen,
            WorkerDraining: members.worker_draining,
            WorkerLost: members.worker_lost,
            ModelAdded: members.model_added,
            ModelReady: members.model_ready,
            ModelRemoved: members.model_removed,
            ModelWanted: members.model_wanted,
            ModelPinned: members.model_pinned,
        }

    def handle(self, event: Event, *, now_ns: int) -> list[Command]:
        """Apply one event and return what to do about it.

        It reads no clock and draws no random number: the same events at the same times give the same
        commands.

        Args:
            event: what happened. Events about workers, models or requests that are gone are ignored.
            now_ns: when, on the controller's clock; never earlier than in the previous call.

        Returns:
            Commands in the order to carry them out. Empty when nothing is to be done.
        """
        assert now_ns >= self._now_ns, f"time went back: {now_ns} after {self._now_ns}"
        self._now_ns = now_ns
        self._handlers[type(event)](event, now_ns)
        alarms = self._alarms
        if self._punctual and alarms.wakeups and alarms.wakeups[0][0] <= now_ns:
            self._wake_due(now_ns)
        if alarms.expiries and alarms.expiries[0][0] <= now_ns:
            self._requests.expire(now_ns)
        commands = self._commands.copy()
        self._commands.clear()
        return commands

    def next_wakeup_ns(self) -> int | None:
        """When to send `TimerFired` at the latest, if nothing happens before."""
        return self._alarms.next_ns()

    def forecast(
        self,
        model_ids: Sequence[ModelId],
        *,
        rows: int,
        arrival_ns: int,
        slo_ns: int,
        now_ns: int,
        together: bool,
        num_bytes: int = 0,
    ) -> list[Forecast]:
        """Predict the latency of a request to each of some models.

        It is not quite read-only: where one estimate alone rules a model out, that
        estimate may lose an outlier, as it may when a request is refused. No client would send the request
        that could measure it again, so a forecast that only read would exclude the model for ever. The
        same events give the same commands only if the same forecasts are asked for between them.

        Args:
            model_ids: the most important first.
            rows: rows of the request.
            arrival_ns: when the request arrived.
            slo_ns: SLO of the request.
            now_ns: the present, not before the last event.
            together: all are asked at once, and share the lanes; else each as if it were alone.
            num_bytes: of the inputs that each gets.

        Returns:
            One per model. Where a policy does not predict, only whether there is a worker for it.
        """
        models = [self._books.models.get(model_id) for model_id in model_ids]
        if self._requests.closed:
            return [Forecast(Refusal.DRAINING) for _ in models]
        margin_ns = self._requests.margin_of(slo_ns, now_ns)
        forecasts = forecast(
            models,
            rows,
            due_ns=arrival_ns + slo_ns - margin_ns,
            now_ns=now_ns,
            together=together,
            num_bytes=num_bytes,
        )
        if not self._predicts:
            for row in forecasts:
                if row.exec_ns:  # some worker could run it
                    row.refusal = None
        return forecasts

    def margin_ns(self, slo_ns: int, now_ns: int) -> int:
        """The part of an SLO that is kept free behind the predicted end of a run."""
        return self._requests.margin_of(slo_ns, now_ns)

    def is_in_vain(self, request: RequestArrived, *, behind_rows: int, now_ns: int) -> bool | None:
        """Say whether a request that arrived now would be refused as `OVERLOADED`, and change nothing.

        It judges as the arrival itself would, so what it turns away would not have been served. Who refuses a request for
        it tells `TurnedAway`. It does not judge requests of tenants, and not without predictions.

        Args:
            request: its number does not matter.
            behind_rows: rows of the same model that are about to arrive before it, and have to end no later.
            now_ns: the present, not before the last event.

        Returns:
            None: that is not known; it may be tried, or refused for another reason.
        """
        return self._requests.is_in_vain(request, behind_rows, now_ns)

    def obstacles(self, request: RequestArrived, refused: RefuseRequest) -> Obstacles:
        """Say what stood in the way of a request, and what would have let it succeed.

        It changes nothing that decides, so schedules are the same whether it is called or not. Call it while the
        commands of the event that led to the refusal are carried out.
        """
        return self._remedies.obstacles(
            request,
            refused,
            margin_ns=self._requests.most_kept_ns(self.config.way_back_ns),
            margin_share=self.config.margin_fraction,
            now_ns=self._now_ns,
        )

    def statistics(self, now_ns: int = 0) -> Statistics:
        """A frozen snapshot for people and dashboards. Takes O(models + workers).

        Args:
            now_ns: the present; the default is the time of the last event, which may be long ago.
        """
        return snapshot(self._books, max(now_ns, self._now_ns))

    def cluster_load(self, now_ns: int) -> ClusterLoad:
        """The work of all workers, summed up. Takes O(workers)."""
        return cluster_load_of(self._books, max(now_ns, self._now_ns))

    def cheapest_to_lose(self, gpu_kind: GpuKind, now_ns: int) -> Leaving:
        """Find the worker of a kind that should leave first; see `leaving`."""
        return cheapest_to_lose(self._books, gpu_kind, max(now_ns, self._now_ns))

    def why_not_without(self, worker_id: WorkerId) -> str:
        """Say what would have no worker without one that is there; empty: nothing. See `leaving`."""
        return why_not(self._books, worker_id)

    def outlook(self, slos_ns: Sequence[int], now_ns: int) -> Outlook:
        """How soon the lanes could begin requests with some SLOs. Takes O(models + workers)."""
        return outlook_of(self._books, slos_ns, max(now_ns, self._now_ns))

    def model_times(self) -> dict[ModelId, ModelTimes]:
        """What a row of each model takes, and its weights if they are not resident. Takes O(models + copies)."""
        return model_times_of(self._books)

    def held_pages(self) -> dict[WorkerId, list[HeldPages]]:
        """The models in the pages of each worker. Takes O(copies)."""
        return held_pages_of(self._books)

    def model_statistics(self, model_id: ModelId) -> ModelStatistics | None:
        """One model's row of `statistics`. Returns None if there is no such model."""
        return model_statistics_of(self._books, model_id)

    def learned_times(self) -> Iterator[LearnedTimes | None]:
        """What was learned of actions, for `Recalled`: a row at a time, so that the caller can pause. None: a row without."""
        return self._members.learned_times()

    def learned_starts(self) -> list[LearnedStart]:
        """What was learned of how long workers take to start, likewise. Takes O(kinds)."""
        return self._members.learned_starts()

    def learned_links(self) -> list[LearnedLink]:
        """What was learned of workers' links, likewise. Takes O(workers)."""
        return self._members.learned_links()

    def backlogs(self, model_ids: Sequence[ModelId]) -> list[tuple[int, int]]:
        """For each model: how many requests wait, not sent yet, and how many workers hold its weights."""
        models = self._books.models
        found: list[tuple[int, int]] = []
        for model_id in model_ids:
            model = models.get(model_id)
            if model is None:
                found.append((0, 0))
                continue
            num_resident = 0
            for copy in model.copies.values():
                num_resident += copy.resident
            found.append((len(model.queue), num_resident))
        return found

    @property
    def num_open_requests(self) -> int:
        """Requests that have no response yet."""
        return len(self._books.requests)

    def share_with_devices(self, now_ns: int) -> float:
        """The part of the open requests that a device is to answer before this process can. Takes O(actions in flight)."""
        return share_with_devices(self._books, now_ns)

    @property
    def predicts(self) -> bool:
        """Whether the policy refuses what it predicts to be late."""
        return self._predicts

    @property
    def weighs_tenants(self) -> bool:
        """Whether tenants' weights have any effect. Most policies have no shares."""
        return hasattr(self._policy, "weigh_tenants")

    def _tenants_weighed(self, event: TenantsWeighed, now_ns: int) -> None:
        weigh = getattr(self._policy, "weigh_tenants", None)
        if weigh is not None:
            weigh(event.weights)

    # --- time passes ----------------------------------------------------------------------------

    def _timer_fired(self, event: TimerFired, now_ns: int) -> None:
        self._wake_due(now_ns)
        timeouts = self._alarms.timeouts
        while timeouts and timeouts[0][0] <= now_ns:
            at_ns, worker = self._alarms.timed_out()
            if self._is_here(worker) and worker.in_flight:
                self._results.check_timeout(worker, at_ns, now_ns)

    def _wake_due(self, now_ns: int) -> None:
        """Look at the lanes whose time has come."""
        wakeups = self._alarms.wakeups
        while wakeups and wakeups[0][0] <= now_ns:
            at_ns, worker = self._alarms.woken()
            if self._is_here(worker):
                self._dispatch.wake(worker, at_ns, now_ns)

    def _is_here(self, worker: WorkerState) -> bool:
        """Whether this record of the worker is current: it did not leave or join again."""
        return self._books.workers.get(worker.worker_id) is worker
