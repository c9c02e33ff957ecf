"""The controller: one process and one event loop thread between all clients, or their fronts, and all workers.

Theory of operation
-------------------
The controller is a pure scheduler (`core`) in a few shells. A shell owns something that a pure module
cannot have: a socket, a file, a clock, a future. It turns what happens there into a call on the shell
below, and what comes back into an answer. Only `core` decides which request runs where and when, so a
shell never waits for a resource that another request might have got.

::

      clients                    operators                 workers, one stream each
       |   ^                      |   ^                       |   ^
    ---|---|--- gRPC, REST ------|---|-----------------------|---|--------------
       v   |                      v   |                       v   |
      front: server, oip         front: control            worker_link, clock_sync
      |bytes, refusals' texts|                             |streams, clocks, files on their way|
       |   ^                      |                           |      |       ^   ^
       |   |                      |            ready, refused |      |       |   |
       v   |                      v                           |      |       |   |
      selection                  catalogue, model_folder <----+      |       |   |
      |applications, states,|    |models, names, readiness| --------|-------+   |
      |cache, store         |     |                           offers |           |
       |   ^                      | models come and go               |           |
       v   |                      v                                  |           |
      runtime  <------------------------------------------ results --+           |
      |clock, timer, who waits|  ------------------------------------ actions ---+
       |   ^
       v   |
      ledger (pure)  ------> telemetry
      |open requests, actions under way|
       |   ^
       v   |  events down, commands up
      core (pure): decides

The bars stand round what a shell owns: nobody else changes it.

A request goes down the left side and comes back up: `front.server` reads it (`oip.read_request`) and asks
`selection`, if an application is named, or `runtime` directly. The runtime opens it in the ledger, which
tells the scheduler of the arrival. In its own time the scheduler commands an Infer, which leaves by the
worker's link on the right; its result comes in by the same link, becomes an event in the ledger, and the
command that follows from it tells whoever waits for the request. The answer is checked against its deadline once
more on its way out, because the way out takes time too.

Who calls, and may he? `access` says so to every door: callers' keys, certificates and tokens in, a caller with
roles and a tenant out. It stands below `front`, asks nobody, and reads its files again when they change.

What became of one request, and why, is put together when somebody asks (`front.hindsight`): from telemetry's rows,
and from what `past_requests` keeps of refusals.

Who guards the deadline, and which module holds a rule, is said in one list: `controller.core`.

Fronts that are processes of their own (`front_process`) take the left column's top with them: `front.remote`
stands where `runtime` and `selection` are drawn, and `front.front_link`, here, asks those for it. What they
decide, and all state, stays in this process. Large tensors go past it. On one host fronts and workers map
each other's memory (`slabs`), and messages say where a tensor lies. Where they share none, the front keeps the inputs
until an Infer is sent, hears then which worker to send them to, and gets the outputs from there; the runtime has
handles meanwhile (`held_tensors`). An Infer is received, to worker and scheduler, when its inputs are whole: so
what the way through the front takes is learned as part of the link (`core.link`), and no plan knows of it.

Who scrapes (`metrics`) has a port of his own, and gets the counts of telemetry and what all the others say of
themselves.

What survives. Models that were added (`uploads`), which ones are pinned (`catalogue`), applications and what they
learned (`selection.stores`) lie in one SQLite file of the state folder (`state_file`), which one controller at a time
may use. Queues, timelines and residency do not: workers know what they hold, and clients ask again. What goes with the
process (`scratch`) is cleared away by the next one where it was killed.

Several controllers may stand behind one lease (`lease`): one leads, the others only listen and say that they are
not ready (`standby`). Nothing that is hot has to be handed over. Workers say what they hold when they register, fronts
ask again what was open, and models and applications lie in the state folder.

Threads. Everything runs in the one event loop thread (uvloop, started in `app`), so no state here needs a
thread lock. Two things leave it: reading, hashing, writing and deleting model files (`asyncio.to_thread`), and
the state file, which has a thread of its own; so has a Redis in its place. None of them touches a shell's state.
Telemetry's files are written by a process of their own (`telemetry_writer`).

Who may import whom: from top to bottom as drawn, never upwards. `app` stands above all and makes the
objects, with the settings in `config` and the policy that `schedulers` finds; the commands `cli` and `up`
stand above `app`. A lower module reaches an upper one only through a callable, a future, or a protocol of
its own (`catalogue.OfferTo`, the runtime's port to a worker). Import contracts in `pyproject.toml` hold the
floors.
"""
