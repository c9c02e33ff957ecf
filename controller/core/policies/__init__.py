"""Policies: which batch a lane runs next, which weights are loaded or evicted.

| policy      | predicts | punctual | eager copies | what it is                                      |
|-------------|----------|----------|--------------|-------------------------------------------------|
| `edf_mh`    | yes      | yes      | yes          | earliest latest begin; Moore-Hodgson in overload|
| `clockwork` | yes      |          |              | OSDI'20, Appendix B                             |
| `clipper`   |          |          |              | NSDI'17: each container adapts its batch size   |
| `infaas`    |          |          |              | ATC'21: a batch size per SLO, replicas          |

`policy.Traits` explains the columns. Policies share parts: `strategies` (which model is next), `runs` (its batch),
`load_queue`, `eviction`. The docstring of `edf_mh` names its other parts.

Another package can bring a `PolicyKind` of its own (controller/process/schedulers.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from controller.core.policies.clockwork import ClockworkPolicy
from controller.core.policies.edf_mh import EdfMhPolicy
from controller.core.policies.reactive import clipper, infaas
from controller.core.policy import PolicyKind, Traits

POLICIES: Mapping[str, PolicyKind] = {
    "clockwork": PolicyKind(ClockworkPolicy, Traits(predicts=True)),
    "edf_mh": PolicyKind(EdfMhPolicy, Traits(predicts=True, punctual=True, eager_copies=True)),
    "clipper": PolicyKind(clipper, Traits()),
    "infaas": PolicyKind(infaas, Traits()),
}
