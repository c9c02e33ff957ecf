"""The scheduler: events in, commands out. No I/O, no clock, no randomness.

Theory of operation
-------------------
All choice is in one place (Clockwork, OSDI'20, section 4). The controller keeps a model of every
worker: which weights lie in its pages, what each lane is busy with and until when, and how long a load
or a batch takes there. As long as that model is right, a request's finish can be predicted before
anything is sent, and work that would be late is never begun.

A request arrives and is judged (`admission`): if no worker could finish it in time it is refused at
once, with the numbers. Otherwise it waits in its model's queue, in deadline order. Each lane of each
GPU is kept a few milliseconds ahead of itself: whenever the predicted backlog of its `timeline` falls
below the look-ahead, the policy chooses the next batch for the exec lane, or the next weights for the
load lane, and `dispatch` sends the action with the window in which it may start. The result re-anchors
the timeline, feeds the `estimator`, and makes room for the next action. Binding late is what makes
batches: requests gather while the GPU is busy.

Time enters as `now_ns`, so the simulator drives the same code on a virtual clock.

The rooms
---------
They are split along state: each thing that is true has one owner, and others ask or call it. Arrows of
import point down only::

      events                                                     commands
         |                                                           ^
         v                                                           |
    +--------------------------- scheduler ----------------------------+
    |  the door: events, admission, results, who leaves                |   invariants: what must be
    +------+------------------------------------------------+---------+   true after each event
           |                                                |
           v                                                |
    +-- dispatch ---------------------+                     |
    |  what does a lane get next      |                     |
    +--+-----------+------------+-----+                     |
       |           |            |                           |
       |           v            v                           v
       |      +- copies -+   +- books, health ----------+  +- admission, forecast ---+
       |      |  why     |   |  what is true; the only  |  |  can it be in time      |
       |      |  another |   |  one that tells          |  |                         |
       |      |  copy    |   |  the policy; who is sick |  |                         |
       |      +----+-----+   +-----------+--------------+  +-----------+-------------+
       |           |                     |                             |
       |           +----------+----------+                             |
       v                      v                                        |
    +- alarms ------+   +- policy ----------+   policies/: clockwork,  |
    |  when do I    |   |  what is asked of |<- edf_mh, clipper,       |
    |  look again   |   |  a policy         |   infaas                 |
    +------+--------+   +---------+---------+                          |
           |                      |                                    |
           v                      v                                    v
    +- state ----------------------------------------------------------+
    |  records: Request, Model, Copy, SentAction, WorkerState          |
    +------------------------------------------------------------------+
       timeline   estimator   link   load_lanes   shares   sums   events   config

To find a rule: which SLO holds, `controller.front.oip.request_slo_ns`; when a lane gets its next action,
`Dispatch.fill_exec` and `fill_load`; what an operator's pin does, `Dispatch.load_pinned`; how long the ways to a worker and back are, and what they carry, `link`;
why a model gets another copy, `copies`; what the policy hears of a change, the table in `books`; what is
evicted, `policies.eviction`; the margin, `admission.margin_of`;
the window of an action, `dispatch`; what is believed of a duration, and when it is tried again, `estimator`;
why `edf_mh` chooses a batch, `EdfMhPolicy.next_infer`; which worker is avoided, and when it is tried again, the
table in `health`; what becomes of the requests of a run
that failed, `Scheduler._run_failed`, and of one that is overdue, `Scheduler._do_without`; what is taken back,
`Scheduler._withdraw`. A worker is given up when a result is overdue for long (`Scheduler._check_timeout`),
when it contradicts the books (`Scheduler._action_failed`), and by its link when it is silent
(`controller.worker_link`). What a cluster falls short of, for whoever scales it, is in `shortages`;
what stood in the way of one request, and what would have let it succeed, in `remedies`.

Who guards the deadline
-----------------------
A response after its deadline is never a success, and a request's clock starts when its first byte comes
(`controller.front.turns`). Eight places see to it, each for what the one before cannot know:

0. The front refuses a request (`LATE`) that has waited longer than its SLO before anybody looked at it.
1. `admission.judge` refuses a request that no worker could finish by `due_ns`, when it arrives and
   whenever it is judged again. `due_ns` is the deadline less the margin (`admission.margin_of`), which
   is for the answer's way back.
2. `Scheduler._expire` refuses a request that waits (`OVERLOADED`, `COLD`) when its slack is gone: other
   models' requests went first, which `judge` leaves out.
3. The policy gives each batch the begin that its earliest deadline requires, and `dispatch` caps the
   window of the Infer by it. The worker does not start an action after its window: it says `TOO_LATE`,
   and `Scheduler._put_back` has its requests wait again, or refuses them (`LATE`).
4. `Scheduler._expire` refuses a request that was sent (`LATE`) when its deadline passes without a result.
5. `Scheduler._answer` refuses it (`LATE`) when the result comes after the deadline, but before the timer.
6. The ledger looks at the clock once more when it carries an answer out: the event may have waited its turn.
7. So does the front right before it writes the encoded response to the client's socket.
   The last two can be late without the core's knowing.

A policy that does not predict skips 1 to 4: its requests wait until they have run, and 5 to 7 judge them.
"""

from controller.core.config import EdfMhConfig, SchedulerConfig
from controller.core.scheduler import Scheduler
from controller.core.shortages import KindStatistics
from controller.core.statistics import (
    ClusterLoad,
    HeldPages,
    ModelStatistics,
    Statistics,
    WorkerStatistics,
)

__all__ = [
    "ClusterLoad",
    "EdfMhConfig",
    "HeldPages",
    "KindStatistics",
    "ModelStatistics",
    "Scheduler",
    "SchedulerConfig",
    "Statistics",
    "WorkerStatistics",
]
