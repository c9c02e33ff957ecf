"""Remembers failures, and avoids workers that fail until a probe succeeds.

A model that fails on one worker is *suspended* there: the model no longer sees that worker among those that are
ready, nor the copy there, so admission, the policies and the load lanes do without it and need no rule
for it. A worker that fails everything, is overdue or slow is suspended for all its models.

| what happens on a worker                       | what is suspended there                                  |
|------------------------------------------------|----------------------------------------------------------|
| a run fails, its requests never failed before  | the model                                                |
| runs of two models fail, and none succeeds     | every model                                              |
| a run fails again that failed elsewhere        | nothing: the requests are to blame, not the worker       |
| a load fails                                   | the model; the second in a row also where it is the last |
| loads of two models fail, and none succeeds    | every model that has no copy there                       |
| a result is overdue (`Alarms.suspect_ns`)      | every model                                              |
| three actions in a row take far too long       | every model                                              |

A model is never suspended on the last worker that offers it, with the one exception of the table: else no
probe could show whether it works again. A suspension ends when a probe succeeds there. A probe is a load, or a run of
one request that waits or runs elsewhere all the same, so it costs no answer. Where the worker did not answer, any answer
ends it, once none is late. The pause before the next probe doubles with every failure. What a worker remembers of a
model's failures ends with the model's next success.

What a slow worker measures is kept from the estimates that it shares with its kind, while another worker is
there to be asked instead. Where all are slow, the last one teaches, and the others' probes are in time again.
"""

from __future__ import annotations

from clockwright.units import NS_PER_MS, NS_PER_S
from clockwright.wire.actions import Infer
from controller.core.alarms import SUSPECT_NS
from controller.core.books import Books
from controller.core.estimator import SLOW_FACTOR
from controller.core.state import Model, SentAction, Suspension, Trouble, WorkerState

# The first pause is long enough that a burst of failures counts as one, and short compared with a second, in which
# a healthy worker would be missed.
_FIRST_PAUSE_NS = 20 * NS_PER_MS
_MAX_DOUBLINGS = 6

# So many models that fail in a row, with no success between, are the worker's fault.
_MANY_MODELS = 2

# A worker that is silent for less is likelier to answer than to be lost: TCP sends what was lost again after 200 ms
# and, if that is lost too, after 400 ms more. A process that ends closes its connection at once.
_MAY_RETURN_NS = NS_PER_S

# An outlier may take as long as a slow worker; three in a row are none.
_SLOW_IN_A_ROW = 3


class Health:
    """Suspends and restores; the caller looks at the lanes of the models that are returned."""

    def __init__(self, books: Books) -> None:
        self._books = books

    # --- what goes wrong ------------------------------------------------------------------------

    def run_failed(self, sent: SentAction, words: str, now_ns: int) -> list[Model]:
        """The engine failed at an Infer whose requests had not failed before."""
        worker, model = sent.copy.worker, sent.copy.model
        trouble = _trouble_of(worker)
        trouble.run_strikes[model] = trouble.run_strikes.get(model, 0) + 1
        trouble.failing_runs[model] = None
        if self._fails_elsewhere(worker, model):
            trouble.failing_runs.pop(model)
        elif len(trouble.failing_runs) >= _MANY_MODELS:
            return self._suspend_all(worker, words, now_ns)
        return self._suspend(worker, model, words, now_ns)

    def requests_failed(self, sent: SentAction) -> list[Model]:
        """Requests failed that had failed before, elsewhere: the first worker was suspected without reason."""
        model = sent.copy.model
        restored = []
        for worker in list(model.suspended):
            trouble = worker.trouble
            if trouble and not trouble.sick and trouble.run_strikes.get(model) == 1:
                trouble.failing_runs.pop(model, None)
                self._books.restore(model, worker)
                restored.append(model)
        return restored

    def load_failed(self, sent: SentAction, words: str, now_ns: int) -> list[Model]:
        """A worker could not load a model."""
        worker, model = sent.copy.worker, sent.copy.model
        trouble = _trouble_of(worker)
        trouble.load_strikes[model] = trouble.load_strikes.get(model, 0) + 1
        trouble.failing_loads[model] = None
        touched: list[Model] = []
        if len(trouble.failing_loads) >= _MANY_MODELS:
            for other in self._books.models.values():
                if other is not model and other not in worker.copies:
                    touched += self._suspend(worker, other, words, now_ns, load=True)
        last = trouble.load_strikes[model] > 1
        return touched + self._suspend(worker, model, words, now_ns, load=True, last=last)

    def overdue(self, worker: WorkerState, now_ns: int) -> list[Model]:
        """Suspend all models on a worker that does not answer, where another worker offers them."""
        touched = self._suspend_all(worker, f"worker {worker.worker_id} does not answer", now_ns)
        _trouble_of(worker).silent = True
        return touched

    # --- what goes well, or takes long ----------------------------------------------------------

    def succeeded(
        self, sent: SentAction, duration_ns: int, now_ns: int
    ) -> tuple[bool, list[Model]]:
        """Take in a success that was slow, or that a worker had of which something is remembered.

        Returns whether the estimates shall learn from it, and the models that are suspended or restored.
        """
        worker, model = sent.copy.worker, sent.copy.model
        if worker.draining:
            return True, []  # nothing is offered there
        trouble, action = _trouble_of(worker), sent.action
        estimates, size = sent.copy.estimates, action.batch_size if isinstance(action, Infer) else 0
        if estimates.is_slow(size, duration_ns):
            if worker in model.ready and len(model.ready) == 1:
                return True, []
            if trouble.sick:
                suspension = model.suspended.get(worker)
                if suspension is not None and suspension.until_ns <= now_ns:
                    trouble.strikes += 1
                    self._pause(worker, trouble.strikes, now_ns)
                return False, []
            trouble.held.append((estimates, size, duration_ns))
            if len(trouble.held) < _SLOW_IN_A_ROW:
                return False, []
            trouble.held.clear()
            words = f"worker {worker.worker_id} takes {SLOW_FACTOR} times as long as predicted"
            return False, self._suspend_all(worker, words, now_ns)
        for estimates, held_size, held_ns in trouble.held:
            if held_size:
                estimates.measured_exec(held_size, held_ns)
            else:
                estimates.measured_load(held_ns)
        trouble.held.clear()
        touched: list[Model] = []
        is_run = isinstance(action, Infer)
        if is_run:
            trouble.run_strikes.pop(model, None)
            trouble.load_strikes.pop(model, None)  # it was loaded, if slowly
            trouble.failing_runs.clear()
        else:
            trouble.load_strikes.pop(model, None)
            trouble.failing_loads.clear()
            touched = self._restore_all(worker, load=True)
        if trouble.sick and (is_run or trouble.silent) and not self._answers_late(worker, now_ns):
            trouble.sick = False
            trouble.strikes = 0
            touched += self._restore_all(worker, load=False)
        suspension = model.suspended.get(worker)
        if suspension is not None and (is_run or suspension.load) and not trouble.sick:
            self._books.restore(model, worker)
            touched.append(model)
        if not (trouble.sick or trouble.run_strikes or trouble.load_strikes):
            worker.trouble = None
        return True, touched

    def replaced(self, model: Model, now_ns: int) -> list[WorkerState]:
        """A worker is ready for the model: suspend it on sick workers. Returns those."""
        found = []
        for worker in list(model.ready):
            trouble = worker.trouble
            if trouble is not None and trouble.sick:
                words = f"worker {worker.worker_id} is avoided"
                if self._suspend(worker, model, words, now_ns):
                    found.append(worker)
        return found

    def forget(self, worker: WorkerState, model: Model) -> None:
        """A worker gets no more actions for a removed model."""
        trouble = worker.trouble
        if trouble is not None:
            trouble.run_strikes.pop(model, None)
            trouble.load_strikes.pop(model, None)
            trouble.failing_runs.pop(model, None)
            trouble.failing_loads.pop(model, None)

    # --- where to look again --------------------------------------------------------------------

    def last_resort(self, model: Model, now_ns: int) -> None:
        """No worker offers the model: restore workers that fail at runs, or have paused after a failed load."""
        for worker, suspension in list(model.suspended.items()):
            if suspension.is_last_resort(now_ns):
                self._books.restore(model, worker)

    def to_probe(self, model: Model, now_ns: int) -> list[WorkerState]:
        """Workers on which the model is suspended, has paused, and may be tried now."""
        found = []
        for worker, suspension in model.suspended.items():
            if suspension.until_ns > now_ns:
                continue
            trouble = worker.trouble
            if trouble is not None and trouble.sick and self._may_answer(worker, now_ns):
                continue  # what it has shows it
            copy = worker.copies.get(model)
            if copy is None or (copy.resident and not copy.num_pins):
                found.append(worker)
        return found

    def may_return(self, model: Model, now_ns: int) -> bool:
        """Whether a worker with a copy of the model does not answer, but is likelier to answer yet than to be lost."""
        for worker in model.suspended:
            copy = worker.copies.get(model)
            if copy is not None and copy.resident:
                for sent in worker.in_flight.values():
                    if 0 < now_ns - sent.expected_end_ns < _MAY_RETURN_NS:
                        return True
                    break
        return False

    # --- suspend and restore --------------------------------------------------------------------

    def _suspend(
        self,
        worker: WorkerState,
        model: Model,
        words: str,
        now_ns: int,
        *,
        load: bool = False,
        last: bool = False,
    ) -> list[Model]:
        trouble = _trouble_of(worker)
        strikes = (trouble.load_strikes if load else trouble.run_strikes).get(model, 1)
        until_ns = now_ns + _pause_ns(strikes)
        suspension = model.suspended.get(worker)
        if suspension is not None:
            suspension.until_ns = until_ns
            suspension.words = words
            return []
        if worker not in model.ready or (len(model.ready) == 1 and not last):
            return []
        self._books.suspend(model, worker, Suspension(model.ready[worker], until_ns, words, load))
        return [model]

    def _suspend_all(self, worker: WorkerState, words: str, now_ns: int) -> list[Model]:
        trouble = _trouble_of(worker)
        trouble.sick, trouble.silent = True, False
        trouble.strikes += 1
        touched: list[Model] = []
        for model in self._books.models.values():
            touched += self._suspend(worker, model, words, now_ns)
        self._pause(worker, trouble.strikes, now_ns)
        return touched

    def _pause(self, worker: WorkerState, strikes: int, now_ns: int) -> None:
        for model in self._books.models.values():
            suspension = model.suspended.get(worker)
            if suspension is not None:
                suspension.until_ns = now_ns + _pause_ns(strikes)

    def _restore_all(self, worker: WorkerState, *, load: bool) -> list[Model]:
        """Restore what is suspended on the worker for its own sake, not for the model's."""
        assert worker.trouble is not None
        trouble = worker.trouble
        strikes = trouble.load_strikes if load else trouble.run_strikes
        touched = []
        for model in self._books.models.values():
            suspension = model.suspended.get(worker)
            if suspension is not None and suspension.load == load and model not in strikes:
                self._books.restore(model, worker)
                touched.append(model)
        return touched

    def _fails_elsewhere(self, worker: WorkerState, model: Model) -> bool:
        """Whether the model fails on other workers too; then it says nothing about any of them."""
        found = False
        for other in self._books.workers.values():
            trouble = other.trouble
            if other is not worker and trouble is not None and model in trouble.run_strikes:
                trouble.failing_runs.pop(model, None)
                found = True
        return found

    def _may_answer(self, worker: WorkerState, now_ns: int) -> bool:
        """Whether it has an action that is not overdue. Else its results may be lost, and only another shows that."""
        for sent in reversed(worker.in_flight.values()):
            return now_ns < sent.expected_end_ns + SUSPECT_NS
        return False

    def _answers_late(self, worker: WorkerState, now_ns: int) -> bool:
        """Whether its oldest action should have ended before now."""
        for sent in worker.in_flight.values():
            return sent.expected_end_ns + sent.action.expected_duration_ns < now_ns
        return False


def _trouble_of(worker: WorkerState) -> Trouble:
    if worker.trouble is None:
        worker.trouble = Trouble()
    return worker.trouble


def _pause_ns(strikes: int) -> int:
    return _FIRST_PAUSE_NS << min(strikes - 1, _MAX_DOUBLINGS)
