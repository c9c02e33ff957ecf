"""The controller: one process and one event loop thread between all clients, or their fronts, and all workers.

Theory of operation
-------------------
The controller is a pure scheduler (`core`) in a few shells. A shell owns something that a pure module cannot have: a
socket, a file, a clock, a future. It turns events there into calls on the shell below, and results into answers. Only
`core` decides which request runs where and when, so a shell never waits for a resource that other requests share.

::

      clients                    operators                 workers, one link each
       |   ^                      |   ^                       |   ^
    ---|---|--- gRPC, REST ------|---|-----------------------|---|--------------
       v   |                      v   |                       v   |
      front: services, oip       front: services           links: worker_link
      |bytes, refusals' texts|                             |links, clocks, files on their way  |
       |   ^                      |                           |      |       ^   ^
       |   |                      |            ready, refused |      |       |   |
       v   |                      v                           |      |       |   |
      selection                  models: catalogue       <----+      |       |   |
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

The bars stand round the state of a shell: only the shell changes it.

A request goes down the left side and comes back up. `front.services.inference` reads it
(`front.oip.protocol.read_request`), and asks `selection` if it names an application, else `runtime`. The runtime opens
it in the ledger, which tells the scheduler of the arrival. When a lane has room, the scheduler commands an Infer, which
leaves by the worker's link on the right. The result comes in by the same link and becomes an event in the ledger. The
command that follows answers the request. The front checks the deadline once more before it writes the answer, because
the response path takes time too.

Access. `access` decides for every listener: a caller's key, certificate or token goes in, a caller with roles and a
tenant comes out. It depends on no other room, and reads its files again when they change.

Reports. The report on one request (`front.services.request_report`) is made when a client or operator asks, from
telemetry's rows and from the refusals that `telemetry.past_requests` keeps.

The list of places that guard the deadline, and of modules that hold a rule, is in `controller.core`.

Fronts in processes of their own (`process.front_process`) contain the top of the left column. There
`front.remote.remote_backend` takes the place of `runtime` and `selection`; in this process, `front.remote.front_link`
asks them for it. All decisions and all state stay in this process, but large tensors do not pass through it. On one host
fronts and workers map each other's memory (`links.slabs`), and messages carry the places of tensors. Without shared
memory, the front keeps the inputs until an Infer is sent, then sends them to its worker, and gets the outputs from
there; the runtime has handles meanwhile (`links.held_tensors`). For worker and scheduler an Infer has arrived when its
inputs are whole. So the time through the front is learned as part of the link (`core.link`), and no plan needs it.

Metrics. `metrics` serves the counts of telemetry, and the figures of all other rooms, on a port of its own.

State. One SQLite file of the state folder (`models.state_file`) holds the added models (`models.uploads`), the pins
(`models.catalogue`), and the applications with what they learned (`selection.stores`). One controller at a time may use
it. Queues, timelines and residency are not kept: workers know what they hold, and clients ask again. Files that live as
long as the process (`process.scratch`) are removed by the next one if it was killed.

Several controllers may stand behind one lease (`process.lease`): one leads, the others only listen and say that they are
not ready (`process.standby`). Nothing that is hot has to be handed over. Workers say what they hold when they register, fronts
ask again what was open, and models and applications lie in the state folder.

Threads. Everything runs in the one event loop thread (uvloop, started in `process.app`), so no state here needs a
thread lock. Two things leave it: reading, hashing, writing and deleting model files (`asyncio.to_thread`), and
the state file, which has a thread of its own; so has a Redis in its place. None of them touches a shell's state.
Telemetry's files are written by a process of their own (`telemetry.writer`).

Who may import whom: from top to bottom as drawn, never upwards. `process` stands above all: `app` makes the
objects, with the settings in `config` and the policy that `schedulers` finds. A lower module reaches an upper one only through a callable, a future, or a protocol of
its own (`catalogue.OfferTo`, `port.Link`). Import contracts in `pyproject.toml` hold the
floors.
"""
