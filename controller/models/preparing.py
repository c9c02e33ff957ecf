"""How long a model that workers still prepare has to wait: its place, and the pace of late."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from clockwright.units import NS_PER_S, ModelId

# Until the first model is ready or refused, one is taken to need as much: most take 1 to 3 s to compile.
_FIRST_PACE_NS = 2 * NS_PER_S
# A model that comes counts a quarter, so the pace follows when small models are followed by large ones.
_SMOOTHING = 4
# The places of thousands of models are found once in a second, and not for each request.
_PLACES_KEPT_NS = NS_PER_S
_RETRY_NS_MIN = NS_PER_S


class PreparingModels:
    """The models that no worker has ready or refused. Workers prepare small ones first, and several at once."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._pace_ns = _FIRST_PACE_NS
        self._last_ns = 0
        #: When workers began with those that are under way.
        self._begun_ns: dict[ModelId, int] = {}
        self._places: dict[ModelId, int] = {}
        self._places_ns = -_PLACES_KEPT_NS

    def offered(self) -> None:
        """A model is offered to workers: time without one does not count for the pace."""
        if not self._begun_ns:
            self._last_ns = self._clock()

    def begun(self, model_id: ModelId) -> None:
        """A worker has begun with a model."""
        self._begun_ns.setdefault(model_id, self._clock())

    def stopped(self, model_id: ModelId) -> None:
        """No worker is at the model any more."""
        self._begun_ns.pop(model_id, None)

    def judged(self, model_id: ModelId) -> None:
        """A model is ready or refused."""
        now_ns = self._clock()
        self._pace_ns += (now_ns - self._last_ns - self._pace_ns) // _SMOOTHING
        self._last_ns = now_ns
        self.stopped(model_id)

    def place(self, model_id: ModelId, sizes: Callable[[], Iterable[tuple[int, ModelId]]]) -> int:
        """How many models come before one; 0 while a worker is at it.

        `sizes` lists them as offered, each with its bytes.
        """
        if model_id in self._begun_ns:
            return 0
        now_ns = self._clock()
        if now_ns - self._places_ns >= _PLACES_KEPT_NS:
            line = sorted(sizes(), key=lambda each: (each[1] not in self._begun_ns, each[0]))
            self._places = {each: place for place, (_, each) in enumerate(line)}
            self._places_ns = now_ns
        return self._places.get(model_id, len(self._places))

    def retry_ns(self, model_id: ModelId, place: int) -> int:
        """After how long a model may be ready, in ns. One that takes long may take as long again."""
        begun_ns = self._begun_ns.get(model_id)
        if begun_ns is None:
            expected_ns = (place + 1) * self._pace_ns
        else:
            # Those that are under way share the pace.
            expected_ns = max(len(self._begun_ns) * self._pace_ns, self._clock() - begun_ns)
        return max(expected_ns, _RETRY_NS_MIN)
