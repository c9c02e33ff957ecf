"""Combination, prediction cache, feedback journal, contexts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clockwright.errors import ConfigError
from controller.selection.core.application import Application
from controller.selection.core.cache import ENTRY_BYTES, Key, PredictionCache
from controller.selection.core.combination import Rule, combine, single
from controller.selection.core.contexts import Contexts
from controller.selection.core.journal import AnsweredQuery, FeedbackItem, FeedbackStatus, Journal
from controller.selection.core.query import Choice, Prediction

# --- combination ----------------------------------------------------------------------------------


def votes(**labels: int) -> dict[str, Prediction]:
    return {model: Prediction(label) for model, label in labels.items()}


def test_the_label_with_the_most_weight_wins() -> None:
    weights = {"a": 0.5, "b": 0.3, "c": 0.2}
    combined = combine(Rule.VOTE, weights, votes(a=1, b=2, c=2), ["a", "b", "c"])
    assert combined.label == 1
    assert combined.agreement == pytest.approx(1 / 3)
    assert combined.weight_mass == pytest.approx(0.5)


def test_of_equally_heavy_labels_the_earlier_members_wins() -> None:
    weights = dict.fromkeys("ab", 0.5)
    assert combine(Rule.VOTE, weights, votes(b=2, a=1), ["a", "b"]).label == 1
    assert combine(Rule.VOTE, weights, votes(b=2, a=1), ["b", "a"]).label == 2


def test_a_missing_member_counts_against_the_confidence() -> None:
    weights = dict.fromkeys("abcd", 0.25)
    combined = combine(Rule.VOTE, weights, votes(a=1, b=1), list("abcd"))
    assert (combined.label, combined.confidence, combined.weight_mass) == (1, 0.5, 0.5)


def test_members_without_weight_count_alike_when_nobody_else_answers() -> None:
    weights = {"a": 1.0, "b": 0.0, "c": 0.0}
    combined = combine(Rule.VOTE, weights, votes(b=4, c=4), ["a", "b", "c"])
    assert combined.label == 4
    assert combined.agreement == pytest.approx(2 / 3)


def test_probabilities_are_averaged_by_weight() -> None:
    predictions = {"a": Prediction(0, (0.6, 0.4)), "b": Prediction(1, (0.1, 0.9))}
    combined = combine(Rule.AVERAGE, {"a": 0.75, "b": 0.25}, predictions, ["a", "b"])
    assert combined.probabilities == pytest.approx((0.475, 0.525))
    assert (combined.label, combined.agreement) == (1, 0.5)


def test_a_single_model_is_as_sure_as_it_says() -> None:
    assert single(Rule.VOTE, Prediction(3)).confidence == 1.0
    assert single(Rule.VOTE, Prediction(3, (0.2, 0.8))).confidence == 0.8


# --- the prediction cache -------------------------------------------------------------------------


def key(n: int, model: str = "m") -> Key:
    return Key(model, (n.to_bytes(4, "little"),))


def cache(entries: int, ttl_ns: int = 10**9) -> PredictionCache[str, str]:
    return PredictionCache(capacity_bytes=entries * (ENTRY_BYTES + 4 + 1), ttl_ns=ttl_ns)


def test_a_computation_is_asked_for_once_and_then_served() -> None:
    predictions = cache(10)
    assert predictions.request(key(1), deadline_ns=100, now_ns=0) is None
    predictions.begin(key(1), "flight", deadline_ns=100)
    assert predictions.request(key(1), deadline_ns=100, now_ns=0) == "flight"
    predictions.end(key(1), "flight")
    predictions.put(key(1), "value", 1, now_ns=5)
    assert predictions.request(key(1), deadline_ns=100, now_ns=6) == "value"
    totals = predictions.statistics()
    assert (totals.misses, totals.joins, totals.hits) == (1, 1, 1)


def test_a_computation_with_a_later_deadline_is_not_joined() -> None:
    predictions = cache(10)
    predictions.begin(key(1), "slow", deadline_ns=100)
    assert predictions.request(key(1), deadline_ns=99, now_ns=0) is None
    predictions.begin(key(1), "fast", deadline_ns=99)
    predictions.end(key(1), "slow")
    assert predictions.request(key(1), deadline_ns=99, now_ns=0) == "fast"


def test_versions_and_inputs_are_never_mixed() -> None:
    predictions = cache(10)
    predictions.put(key(1, "m"), "old", 1, now_ns=0)
    assert predictions.fetch(key(1, "m@2"), now_ns=0) is None
    # Both keys have the same bytes in all, cut in different places.
    predictions.put(Key("m", (b"ab", b"c")), "x", 1, now_ns=0)
    assert predictions.fetch(Key("m", (b"a", b"bc")), now_ns=0) is None


def test_equal_hashes_do_not_make_equal_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Key, "__hash__", lambda _: 1)
    predictions = cache(10)
    for n in range(5):
        predictions.put(key(n), str(n), 1, now_ns=0)
    assert [predictions.fetch(key(n), now_ns=0) for n in range(6)] == [*"01234", None]


def test_the_clock_spares_what_was_used_since_it_came_by() -> None:
    predictions = cache(3)
    for n in range(3):
        predictions.put(key(n), str(n), 1, now_ns=0)
    predictions.fetch(key(0), now_ns=1)
    predictions.put(key(3), "3", 1, now_ns=2)
    assert [predictions.fetch(key(n), now_ns=3) is not None for n in range(4)] == [
        True,
        False,
        True,
        True,
    ]


def test_an_old_value_is_forgotten() -> None:
    predictions = cache(3, ttl_ns=10)
    predictions.put(key(0), "0", 1, now_ns=0)
    assert predictions.fetch(key(0), now_ns=9) == "0"
    assert predictions.fetch(key(0), now_ns=10) is None
    assert predictions.statistics().num_bytes == 0


def test_switched_off_it_neither_keeps_nor_joins() -> None:
    predictions: PredictionCache[str, str] = PredictionCache(capacity_bytes=0, ttl_ns=10)
    predictions.begin(key(0), "flight", deadline_ns=5)
    predictions.put(key(0), "0", 1, now_ns=0)
    assert predictions.request(key(0), deadline_ns=5, now_ns=0) is None


def test_a_removed_models_values_are_dropped() -> None:
    predictions = cache(5)
    predictions.put(key(0), "0", 1, now_ns=0)
    predictions.put(key(0, "n"), "n", 1, now_ns=0)
    predictions.forget_model("m")
    assert predictions.fetch(key(0), now_ns=0) is None
    assert predictions.fetch(key(0, "n"), now_ns=0) == "n"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 300), st.booleans())))
def test_the_cache_never_exceeds_its_budget_and_never_lies(
    steps: list[tuple[int, int, bool]],
) -> None:
    budget = 2000
    predictions: PredictionCache[int, str] = PredictionCache(capacity_bytes=budget, ttl_ns=50)
    stored: dict[int, tuple[int, int]] = {}
    for now_ns, (n, size, store) in enumerate(steps):
        if store:
            predictions.put(key(n), now_ns + 1, size, now_ns=now_ns)
            stored[n] = (now_ns + 1, now_ns + 50)
        found = predictions.fetch(key(n), now_ns=now_ns)
        if found is not None:
            assert (found, True) == (stored[n][0], now_ns < stored[n][1])
        assert 0 <= predictions.statistics().num_bytes <= budget


# --- the journal ----------------------------------------------------------------------------------


def record(at_ns: int = 0, **changes: object) -> AnsweredQuery:
    fields: dict[str, object] = {
        "application": "app",
        "context": "",
        "choice": Choice(("a", "b", "c"), (1.0, 1.0, 1.0)),
        "votes": {"a": 7, "b": 1},
        "combined": 7,
        "propensity": 0.5,
        "is_default": False,
        "at_ns": at_ns,
    }
    return AnsweredQuery(**{**fields, **changes})  # type: ignore[arg-type]


def journal(capacity: int = 10, ttl_ns: int = 100) -> Journal:
    return Journal(capacity=capacity, ttl_ns=ttl_ns)


def test_a_label_says_of_each_model_that_answered_whether_it_was_right() -> None:
    answered = journal()
    answered.add("q", record())
    joined = answered.join(FeedbackItem("q", label=7), now_ns=5)
    assert joined.status is FeedbackStatus.APPLIED
    assert joined.observation is not None
    # Model c did not answer, so nothing follows for it.
    assert joined.observation.losses == {"a": 0.0, "b": 1.0}
    assert (joined.observation.served_loss, joined.observation.served_propensity) == (0.0, 0.5)


def test_a_reward_speaks_only_of_those_who_said_what_was_served() -> None:
    answered = journal()
    answered.add("q", record())
    joined = answered.join(FeedbackItem("q", reward=0.25), now_ns=5)
    assert joined.losses == {"a": 0.75}


def test_a_reward_for_the_default_teaches_nothing_but_a_label_does() -> None:
    answered = journal()
    answered.add("q", record(is_default=True))
    answered.add("p", record(is_default=True))
    assert answered.join(FeedbackItem("q", reward=1.0), now_ns=5).status is (
        FeedbackStatus.UNINFORMATIVE
    )
    assert answered.join(FeedbackItem("p", label=1), now_ns=5).losses == {"a": 1.0, "b": 0.0}


def test_feedback_counts_once_and_in_any_order() -> None:
    answered = journal()
    for name in "xyz":
        answered.add(name, record())
    statuses = [
        answered.join(FeedbackItem(name, label=7), now_ns=5).status.value for name in "zxzyx"
    ]
    assert statuses == ["APPLIED", "APPLIED", "DUPLICATE", "APPLIED", "DUPLICATE"]


def test_feedback_for_what_is_too_old_or_was_never_asked_is_unknown() -> None:
    answered = journal(capacity=2)
    for name in "xyz":
        answered.add(name, record())
    assert answered.join(FeedbackItem("x", label=7), now_ns=5).status is FeedbackStatus.UNKNOWN
    assert answered.join(FeedbackItem("y", label=7), now_ns=101).status is FeedbackStatus.UNKNOWN
    assert answered.join(FeedbackItem("z", label=7), now_ns=100).status is FeedbackStatus.APPLIED
    answered.add("new", record(at_ns=1000))
    assert len(answered) == 1


def test_a_shadows_answer_may_come_after_the_reply() -> None:
    answered = journal()
    answered.add("q", record())
    answered.add_vote("q", "s", 7)
    assert answered.join(FeedbackItem("q", label=7), now_ns=5).losses["s"] == 0.0
    answered.add_vote("q", "t", 7)
    answered.add_vote("gone", "t", 7)


def test_queries_of_a_context_are_forgotten_on_request() -> None:
    answered = journal()
    answered.add("q", record(context="ann"))
    answered.add("p", record(context="bob"))
    assert answered.forget("app", "ann") == 1
    assert answered.join(FeedbackItem("q", label=7), now_ns=5).status is FeedbackStatus.UNKNOWN
    assert answered.join(FeedbackItem("p", label=7), now_ns=5).status is FeedbackStatus.APPLIED


class Watched(AnsweredQuery):
    """A query that counts how often somebody looks at it."""

    looks = 0

    def __getattribute__(self, name: str) -> object:
        Watched.looks += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize("whole", [False, True])
def test_to_forget_some_queries_costs_nothing_for_all_others(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = journal(capacity=10_000)
    watched = Watched(**{name: getattr(record(), name) for name in AnsweredQuery.__slots__})
    for number in range(5000):
        answered.add(str(number), watched)
    answered.add("q", record(application="other", context="ann"))
    monkeypatch.setattr(Watched, "looks", 0)
    # Nor does feedback.
    assert answered.join(FeedbackItem("q", label=7), now_ns=5).status is FeedbackStatus.APPLIED
    assert answered.join(FeedbackItem("guess", label=7), now_ns=5).status is FeedbackStatus.UNKNOWN
    assert answered.forget("other", None if whole else "ann") == 1
    assert Watched.looks == 0
    assert answered.forget("other") == answered.forget("app", "nobody") == 0
    assert answered.forget("app") == 5000
    assert len(answered) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab"), st.sampled_from("xy"))))
def test_the_journal_forgets_exactly_what_it_is_asked_to(
    steps: list[tuple[int, str, str]],
) -> None:
    answered, kept = journal(capacity=6), list[tuple[str, str, str]]()
    for number, (what, application, context) in enumerate(steps):
        if what < 7:
            answered.add(str(number), record(application=application, context=context))
            kept = [*kept, (str(number), application, context)][-6:]
            continue
        doomed = [row for row in kept if row[1] == application and (what == 7 or row[2] == context)]
        assert answered.forget(application, None if what == 7 else context) == len(doomed)
        kept = [row for row in kept if row not in doomed]
    assert [answered.find(row[0], now_ns=0) is not None for row in kept] == [True] * len(kept)
    assert len(answered) == len(kept)


# --- contexts -------------------------------------------------------------------------------------


def test_the_least_recently_used_state_leaves_memory() -> None:
    contexts = Contexts(capacity=2)
    contexts.loaded("app", "a", 1)
    contexts.loaded("app", "b", 2)
    assert contexts.find("app", "a") == 1
    contexts.loaded("app", "c", 3)
    assert [contexts.find("app", name) for name in "abc"] == [1, None, 3]


def test_a_change_is_found_until_it_is_written() -> None:
    contexts = Contexts(capacity=1)
    contexts.set("app", "a", 1)
    contexts.set("app", "b", 2)
    assert contexts.find("app", "a") == 1
    changes = contexts.changes(9)
    assert changes == {("app", "a"): 1, ("app", "b"): 2}
    assert contexts.find("app", "b") == 2
    contexts.set("app", "a", 10)
    contexts.written(changes)
    assert contexts.find("app", "b") is None
    assert contexts.changes(9) == {("app", "a"): 10}


def test_what_changes_during_every_write_keeps_nobody_from_being_written() -> None:
    contexts = Contexts(capacity=9)
    for name in "abc":
        contexts.set("app", name, 0)
    written: set[str] = set()
    for turn in range(1, 3):
        changes = contexts.changes(2)
        written |= {name for _, name in changes}
        for name in "ab":
            contexts.set("app", name, turn)
        contexts.written(changes)
    assert written == {"a", "b", "c"}


def test_a_failed_write_is_handed_out_again_with_what_came_since() -> None:
    contexts = Contexts(capacity=5)
    contexts.set("app", "a", 1)
    contexts.set("app", "b", 2)
    contexts.changes(9)
    contexts.set("app", "b", 3)
    assert contexts.changes(9) == {("app", "a"): 1, ("app", "b"): 3}


def test_changes_that_are_never_written_do_not_fill_the_memory() -> None:
    contexts = Contexts(capacity=5, changes_max=2)
    for name in "aba":
        contexts.set("app", name, name)
    assert contexts.num_lost == 0
    contexts.set("app", "c", "c")
    assert contexts.num_lost == 1
    assert contexts.changes(9) == {("app", "b"): "b", ("app", "c"): "c"}
    assert contexts.changes(1) == {("app", "b"): "b"}
    # The change is lost to the store, but the state is still in memory.
    assert contexts.find("app", "a") == "a"


def test_contexts_in_memory_are_counted_by_application() -> None:
    contexts = Contexts(capacity=4)
    for application, name in (("app", ""), ("app", "a"), ("app", "b"), ("b", "a"), ("app", "b")):
        contexts.set(application, name, 1)
    assert (contexts.num_of("app"), contexts.num_of("b"), contexts.num_of("c")) == (2, 1, 0)
    contexts.loaded("b", "b", 1)  # The global state is evicted.
    assert (contexts.num_of("app"), contexts.num_of("b")) == (2, 2)
    contexts.loaded("b", "c", 1)
    assert (contexts.num_of("app"), contexts.num_of("b")) == (1, 3)
    contexts.erase("b", "a")
    contexts.erase("b", "nobody")
    assert contexts.num_of("b") == 2
    contexts.erase("b")
    assert (contexts.num_of("app"), contexts.num_of("b")) == (1, 0)


def test_what_was_loaded_does_not_replace_what_is_newer() -> None:
    contexts = Contexts(capacity=5)
    contexts.set("app", "a", 2)
    contexts.loaded("app", "a", 1)
    assert contexts.find("app", "a") == 2


def test_an_erased_context_is_nowhere() -> None:
    contexts = Contexts(capacity=5)
    contexts.set("app", "a", 1)
    contexts.changes(9)
    contexts.set("app", "a", 2)
    contexts.set("app", "b", 3)
    contexts.erase("app", "a")
    assert contexts.find("app", "a") is None
    assert contexts.changes(9) == {("app", "b"): 3}
    contexts.erase("app")
    assert contexts.changes(9) == {}


# --- applications ---------------------------------------------------------------------------------


def test_an_application_survives_json() -> None:
    app = Application(name="app", models=("a", "b"), policy="exp3", options={"eta": 0.5}, slo_ns=5)
    assert Application.load(app.dump()) == app


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ()}, "found none"),
        ({"models": ("a", "a")}, "'a' twice"),
        ({"models": ("app",)}, "found itself"),
        ({"slo_ns": 0}, "slo_ns: found 0"),
        ({"confidence_threshold": 1.5}, "confidence_threshold: found 1.5"),
        ({"combination": Rule.ONE, "default_label": 3}, "default_label: found one"),
    ],
)
def test_a_bad_application_is_refused(changes: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"name": "app", "models": ("a", "b")}
    with pytest.raises(ConfigError, match=message):
        Application(**{**fields, **changes})  # type: ignore[arg-type]
