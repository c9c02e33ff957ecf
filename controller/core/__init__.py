"""The scheduler: events in, commands out. No I/O, no clock, no randomness.

Theory of operation
-------------------
The scheduler makes all choices (Clockwork, OSDI'20, section 4). It keeps a model of every worker: which weights lie in
its pages, when each lane will be free, and how long a load or a batch takes there. As long as that model is right, the
finish of a request can be predicted before anything is sent, and work that would be late never begins.

A request arrives and is judged (`admission`): if no worker could finish it in time it is refused at
once, with the numbers. Otherwise it waits in its model's queue, in deadline order. Each lane of each
GPU is kept a few milliseconds ahead of itself: whenever the predicted backlog of its `timeline` falls
below the look-ahead, the policy chooses the next batch for the exec lane, or the next weights for the
load lane, and `dispatch` sends the action with the window in which it may start. The result corrects
the timeline, feeds the `estimator`, and makes room for the next action. Because actions are sent late,
requests gather into batches while the GPU is busy.

Time enters as `now_ns`, so the simulator drives the same code on a virtual clock.

The rooms
---------
Each piece of state has one owner, a room; other rooms ask it or call it. Imports
point down only::

      events                                                     commands
         |                                                           ^
         v                                                           |
    +--------------------------- scheduler ----------------------------+
    |  the interface: each event to a part; forecasts, statistics      |   invariants: what must be
    +------+---------------------+---------------------+---------------+   true after each event
           |                     |                     |
           v                     v                     v
    +- results --------+  +- membership -----+  +- requests -----------+
    |  what a result   |->|  which workers   |->|  admits, refuses,    |
    |  means           |  |  and models are  |  |  sends again, takes  |
    |                  |  |  there           |  |  back                |
    +------+-----------+  +------+-----------+  +------+---------+-----+
           |                     |                     |         |
           +---------------------+---------------------+         |
           v                                           |         |
    +-- dispatch ---------------------+                |         |
    |  when to look; loads            |                |         |
    |  exec_lanes: batches            |                |         |
    +--+-----------+------------+-----+                |         |
       |           |            |                      |         |
       |           v            v                      v         v
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

To find a rule: which SLO holds, `controller.front.oip.protocol.request_slo_ns`; when a lane gets its next action,
`ExecLanes.fill` and `Dispatch.fill_load`; what an operator's pin does, `Dispatch.load_pinned`; the delays and the
bandwidth of the link to a worker, `link`;
why a model gets another copy, `copies`; what the policy hears of a change, the table in `books`; what is
evicted, `policies.eviction`; the margin, `admission.margin_of`; what changes while the controller itself is behind, `lag`;
the window of an action, `dispatch`; the predicted duration, and when it is measured again, `estimator`;
why `edf_mh` chooses a batch, `EdfMhPolicy.next_infer`; what keeps a promise to a client that asked for certainty,
`promises`; which worker is avoided, and when it is tried again, the
table in `health`; what happens to the requests of a run
that failed, `Results._run_failed`, and of one that is overdue, `Requests._do_without`; what is taken back,
`Requests.withdraw`. A worker is given up when a result is overdue for long (`Results.check_timeout`),
when it contradicts the books (`Results.failed`), and by its link when it is silent
(`controller.links.worker_link`). `shortages` says what a cluster lacks, for autoscalers;
`remedies` says what stood in the way of one request, and what would have let it succeed.

Who guards the deadline
-----------------------
A response after its deadline is never a success, and a request's clock starts when its first byte comes
(`controller.front.http.arrival_clock`). Eight places guard it. Each knows something that the one before cannot know:

0. The front refuses a request (`LATE`) that waited longer than its SLO before the front read it.
1. `admission.judge` refuses a request that no worker could finish by `due_ns`, when it arrives and
   whenever it is judged again. `due_ns` is the deadline less the margin (`admission.margin_of`), which
   is for the answer's way back.
2. `Requests.expire` refuses a request that waits (`OVERLOADED`, `COLD`) when its slack is gone: other
   models' requests went first, which `judge` leaves out.
3. The policy gives each batch the begin that its earliest deadline requires, and `dispatch` caps the
   window of the Infer by it. The worker does not start an action after its window: it says `TOO_LATE`,
   and `Requests.put_back` has its requests wait again, or refuses them (`LATE`). Where a run took too long,
   `Results` does so at once for all that was sent after it and can no longer begin.
4. `Requests.expire` refuses a request that was sent (`LATE`) when its deadline passes without a result.
5. `Results._answer` refuses it (`LATE`) when the result comes after the deadline, but before the timer.
6. The ledger looks at the clock once more when it carries an answer out: the event may have waited its turn.
7. So does the front right before it writes the encoded response to the client's socket.
   The core does not hear of answers that the last two find late.

A request that is promised has a place on a lane (`promises`), so 2 does not apply to it.
A policy that does not predict skips 1 to 4: its requests wait until they have run, and 5 to 7 judge them.
"""

from controller.core.capacity import KindStatistics
from controller.core.config import EdfMhConfig, SchedulerConfig
from controller.core.scheduler import Scheduler
from controller.core.statistics import (
    ClusterLoad,
    HeldPages,
    ModelStatistics,
    ModelTimes,
    Outlook,
    Statistics,
    WorkerStatistics,
)

__all__ = [
    "ClusterLoad",
    "EdfMhConfig",
    "HeldPages",
    "KindStatistics",
    "ModelStatistics",
    "ModelTimes",
    "Outlook",
    "Scheduler",
    "SchedulerConfig",
    "Statistics",
    "WorkerStatistics",
]
