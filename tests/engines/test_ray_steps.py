"""What the keeper of a Ray cluster does next."""

from __future__ import annotations

from dataclasses import replace

from engines.ray.reconcile import (
    ENDED,
    PENDING,
    RUNNING,
    UNABLE,
    Actor,
    KindSaid,
    KindWish,
    Known,
    Steps,
    Wish,
    group_of,
    next_steps,
)

HERE = ("h:1",)
WISH = Wish(
    kinds=(KindWish("a100", least=1, most=4, start_limit_s=60),), num_fronts=2, num_controllers=1
)
CONTROLLER = {"controller-0": Actor(RUNNING)}
FRONTS = {f"front-{n}": Actor(RUNNING, controllers=HERE) for n in range(2)}


def workers(*actors: Actor) -> dict[str, Actor]:
    return {f"worker-a100-{n}": actor for n, actor in enumerate(actors)}


def worker(name: str = "w", state: str = RUNNING, **more: object) -> Actor:
    actor = Actor(state, worker=name, controllers=HERE)
    return replace(actor, **more)  # type: ignore[arg-type]


def steps(*actors: Actor, wanted: KindSaid | None = None, **more: object) -> Steps:
    known = Known(
        actors={**CONTROLLER, **FRONTS, **workers(*actors)},
        wanted={} if wanted is None else {"a100": wanted},
        controllers=HERE,
    )
    return next_steps(WISH, replace(known, **more))  # type: ignore[arg-type]


def test_the_group_of_a_name_has_no_number() -> None:
    assert group_of("worker-a-100-12") == "worker-a-100"


def test_controllers_come_first_as_the_others_are_told_their_addresses() -> None:
    first = next_steps(WISH, Known())
    assert first.start == ("controller-0",)
    then = next_steps(WISH, Known(actors=CONTROLLER, controllers=HERE))
    assert then.start == ("front-0", "front-1", "worker-a100-0")
    assert then.room == {"controller": 1, "front": 2, "worker-a100": 1}


def test_first_all_controllers_are_waited_for_and_later_one_is_enough() -> None:
    wish = replace(WISH, num_controllers=2)
    two = {**CONTROLLER, "controller-1": Actor(PENDING)}
    assert next_steps(wish, Known(actors=two, controllers=HERE)).start == ()
    later = next_steps(wish, Known(actors={**two, **FRONTS}, controllers=HERE))
    assert later.start == ("worker-a100-0",)


def test_nothing_is_done_where_all_is_as_wished() -> None:
    done = steps(worker(), wanted=KindSaid(1, 1))
    assert done == Steps(room={"controller": 1, "front": 2, "worker-a100": 1})


def test_as_many_workers_are_started_as_the_controller_wants_and_the_wish_allows() -> None:
    assert steps(worker(), wanted=KindSaid(3, 1)).start == ("worker-a100-1", "worker-a100-2")
    assert steps(worker(), wanted=KindSaid(9, 1)).room["worker-a100"] == 4
    assert steps(worker(), wanted=KindSaid(0, 1)).release == ()


def test_before_the_controller_has_seen_a_worker_there_are_as_few_as_the_wish_allows() -> None:
    assert steps().start == ("worker-a100-0",)
    assert steps(worker()).start == ()


def test_the_controller_chooses_which_worker_leaves() -> None:
    found = steps(worker("x"), worker("y"), wanted=KindSaid(1, 2))
    assert (found.release, found.remove) == (("a100",), ())


def test_one_choice_is_waited_for_before_the_next() -> None:
    found = steps(worker("x"), worker("y"), wanted=KindSaid(1, 2), releasing=frozenset({"a100"}))
    assert found.release == ()


def test_no_worker_is_told_to_leave_while_the_controller_is_away() -> None:
    found = steps(worker("x"), worker("y"), worker("z"), wanted=None)
    assert (
        next_steps(WISH, Known({**CONTROLLER, **workers(*[worker()] * 3)}, None, HERE)).release
        == ()
    )
    assert found.release == ()


def test_a_pending_start_goes_first_and_holds_no_scale_in_up() -> None:
    found = steps(worker("x"), worker("y"), worker("", PENDING), wanted=KindSaid(2, 2))
    assert (found.remove, found.release) == (("worker-a100-2",), ())
    assert found.room["worker-a100"] == 2
    found = steps(worker("x"), worker("y"), worker("", PENDING), wanted=KindSaid(1, 2))
    assert (found.remove, found.release) == (("worker-a100-2",), ("a100",))


def test_of_several_pending_starts_the_newest_goes() -> None:
    found = steps(worker("x"), worker("", PENDING), worker("", PENDING), wanted=KindSaid(2, 1))
    assert found.remove == ("worker-a100-2",)


def test_starts_are_not_taken_back_while_no_worker_is_ready() -> None:
    found = steps(worker("", PENDING), worker("", PENDING), wanted=KindSaid(0, 0))
    assert (found.remove, found.start) == ((), ())


def test_room_is_kept_for_a_worker_that_drains_until_it_has_left() -> None:
    drains = steps(worker("x"), worker("y", leaving=True), wanted=KindSaid(1, 1))
    assert (drains.remove, drains.release, drains.room["worker-a100"]) == ((), (), 2)
    left = steps(worker("x"), worker("y", ENDED, leaving=True), wanted=KindSaid(1, 1))
    assert (left.remove, left.room["worker-a100"]) == (("worker-a100-1",), 1)


def test_a_drained_worker_may_go_when_the_controller_says_so() -> None:
    leaving = worker("y", leaving=True)
    gone = KindSaid(1, 1, frozenset({"y"}))
    assert steps(worker("x"), leaving, wanted=gone).remove == ("worker-a100-1",)
    # One that came again under its name, or that others have drained, is no affair of ours.
    assert steps(worker("x"), worker("y"), wanted=replace(gone, wanted=2)).remove == ()


def test_a_draining_worker_is_replaced_at_once_where_more_are_wanted() -> None:
    found = steps(worker("x"), worker("y", leaving=True), wanted=KindSaid(2, 1))
    assert found.start == ("worker-a100-2",)


def test_a_worker_that_an_operator_has_drained_is_replaced() -> None:
    found = steps(worker("x", ENDED), wanted=KindSaid(1, 0))
    assert (found.remove, found.start) == (("worker-a100-0",), ("worker-a100-1",))


def test_a_worker_whose_settings_cannot_work_is_not_replaced() -> None:
    found = steps(worker("x", UNABLE), wanted=KindSaid(1, 0))
    assert (found.start, found.remove) == ((), ())


def test_a_worker_that_has_not_joined_in_time_starts_again() -> None:
    late = worker("y", age_s=61)
    assert steps(worker("x"), late, wanted=KindSaid(2, 1)).ask
    missed = steps(worker("x"), late, wanted=KindSaid(2, 1), workers=frozenset({"x"}))
    assert (missed.again, missed.ask) == (("worker-a100-1",), False)
    known = steps(worker("x"), late, wanted=KindSaid(2, 1), workers=frozenset({"x", "y"}))
    assert known.again == ()
    assert not steps(worker("x"), late, wanted=KindSaid(2, 2)).ask


def test_processes_that_know_none_of_the_controllers_start_again() -> None:
    found = steps(worker(), wanted=KindSaid(1, 1), controllers=("h:2",))
    assert found.again == ("front-0", "front-1", "worker-a100-0")
    assert steps(worker(), wanted=KindSaid(1, 1), controllers=("h:1", "h:2")).again == ()
    # One that is away is looked for where it was.
    assert steps(worker(), wanted=KindSaid(1, 1), controllers=()).again == ()


def test_what_is_not_wished_any_more_is_told_to_leave() -> None:
    actors = {**CONTROLLER, **FRONTS, "front-2": Actor(RUNNING, controllers=HERE)}
    actors |= {"worker-old-0": worker("o"), **workers(worker())}
    wanted = {"a100": KindSaid(1, 1)}
    found = next_steps(WISH, Known(actors, wanted, HERE))
    assert found.leave == ("front-2", "worker-old-0")
    actors["worker-old-0"] = worker("o", ENDED, leaving=True)
    found = next_steps(WISH, Known(actors, wanted, HERE))
    assert (found.leave, found.remove) == (("front-2",), ("worker-old-0",))


def test_a_controller_that_left_is_started_again() -> None:
    actors = {"controller-0": Actor(ENDED), **FRONTS, **workers(worker())}
    found = next_steps(WISH, Known(actors, None, HERE))
    assert found.remove == ("controller-0",)
    actors.pop("controller-0")
    assert next_steps(WISH, Known(actors, None, HERE)).start == ("controller-0",)
