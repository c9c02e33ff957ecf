"""Decides when a model gets another copy of its weights: all reasons, and what each may evict.

| reason         | asked when                      | taken from                                          | may evict  |
|----------------|---------------------------------|-----------------------------------------------------|------------|
| `DEMAND`       | requests wait                   | a load lane with room, in the policy's own order    | yes        |
| `IDLE_PAGES`   | requests wait                   | a worker with nothing in flight, and its free pages | no         |
| `REFUSED_FULL` | one was refused as `OVERLOADED` | an idle load lane, and free pages of its worker     | if cheap   |
| `REFUSED_COLD` | one was refused as `COLD`       | an idle load lane that nothing else wants           | yes        |
| `WANTED`       | `ModelWanted`                   | as for `REFUSED_COLD`                               | yes        |

`ModelWanted` may name a time. Until then a model that got no copy is tried again whenever a load ends: the next stage
of a pipeline stands behind the load of the stage before it.

`DEMAND` is the policy's measure: for `clockwork` Appendix B's load priority, for `edf_mh` no copy at all, or
requests refused of late though there was one; for
`clipper` and `infaas` no copy, or late answers. `REFUSED_FULL` is for policies that ask for it (`Traits.eager_copies`),
`REFUSED_COLD` and `WANTED` for models without any copy. Only for `DEMAND` a model queues: it stays wanted until its
load is sent, or the policy finds the demand gone. The other reasons hold at that moment or not at all.

What an operator has pinned needs no reason: where it has no copy, `Dispatch.load_pinned` loads one.

Two of them are about requests that do not wait, and so are no demand: without `REFUSED_COLD`, a model whose
SLO is shorter than its load would be refused for ever; without `REFUSED_FULL`, it would never get a second
copy. For `REFUSED_FULL` the policy says what may go (`Policy.victims_of_refused`): for `edf_mh` copies that served
much less of late than the model lost. With free pages only, the order in which models filled the pages
would decide whether a hot model gets a second copy.
"""

from __future__ import annotations

import enum
from typing import Final

from clockwright.errors import Refusal
from controller.core.config import SchedulerConfig
from controller.core.lag import Lag
from controller.core.policy import Policy, Traits
from controller.core.state import Model


class Reason(enum.Enum):
    """Why a model gets another copy."""

    DEMAND = "the policy finds that its copies cannot serve the requests that wait"
    IDLE_PAGES = "requests wait for its lanes, and a worker with free pages has nothing to do"
    REFUSED_FULL = (
        "a request was refused though the model has a copy, and another worker has pages to spare"
    )
    REFUSED_COLD = (
        "a request was refused because the model has no copy; the next one shall find one"
    )
    WANTED = "a request for it is expected soon, and it has no copy"


# Looking a member up in its enum takes ten times as long as a global.
DEMAND: Final = Reason.DEMAND
IDLE_PAGES: Final = Reason.IDLE_PAGES
REFUSED_FULL: Final = Reason.REFUSED_FULL
REFUSED_COLD: Final = Reason.REFUSED_COLD
WANTED: Final = Reason.WANTED


def reason_for_copy(
    model: Model,
    config: SchedulerConfig,
    traits: Traits,
    policy: Policy,
    *,
    refusal: Refusal | None = None,
    wanted: bool = False,
    any_idle: bool = False,
    lag: Lag,
    now_ns: int,
) -> Reason | None:
    """Why a model should get another copy now. Returns None if it should not.

    Args:
        model: some worker that is ready for it has no copy.
        config: the scheduler's.
        traits: the policy's.
        policy: queues the model for loading, if requests wait and it finds demand.
        refusal: why a request of the model was refused at arrival, if one was.
        wanted: `ModelWanted` asks for a copy.
        any_idle: some worker has nothing in flight.
        lag: of the controller itself. While it has too much to do, another copy would be one more thing to do, and what
            waits or is refused does not wait for lanes.
        now_ns: the present.
    """
    if wanted or refusal is Refusal.COLD:
        if model.copies:
            return None
        policy.forget_unwanted(now_ns)
        if policy.wants_any:
            return None
        return WANTED if wanted else REFUSED_COLD
    if refusal is not None:
        if refusal is Refusal.OVERLOADED and traits.eager_copies:
            return REFUSED_FULL if config.fill_free_pages and not lag.at(now_ns) else None
        return None
    if not model.queue:
        return None
    if policy.want_load(model, now_ns):
        return DEMAND
    if any_idle and config.fill_free_pages and not lag.at(now_ns):
        return IDLE_PAGES
    return None
