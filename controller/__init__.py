"""The controller: one process and one event loop thread between all clients and all workers.

Theory of operation
-------------------
The controller is a pure scheduler (`core`) in a few shells. A shell owns something that a pure module
cannot have: a socket, a file, a clock, a future. It turns what happens there into a call on the shell
below, and what comes back into an answer. Only `core` decides which request runs where and when, so a
shell never waits for a resource that another request might have got.

::

      clients: requests, feedback         operators               workers, one stream each
              |        ^                   |    ^                        |     ^
    - gRPC ---|--------|-------------------|----|------------------------|-----|--------------
              v        |                   v    |                        v     |
      front/  server, oip, statuses       control                  worker_link, clock_sync
      owns:   bytes of the protocol, texts of refusals             owns: streams, a clock per worker,
              |        ^                                           files on their way
      a query | answer |                                                 |     ^
              v        |                                                 |     |
      selection/  owns: applications, their states,              results |     | actions, offers
              |   prediction cache, store                                |     |
              |        ^                                                 |     |
              +--------|------ catalogue, model_folder ------------------+     |
              |        |       owns: models, names, who is ready         |     |
              v        |                                                 v     |
      runtime     owns: the clock, the one timer, a future per request   +-----+
              |        ^
              v        |
      ledger      books (pure): open requests, actions under way, rows ----> telemetry
       events |        ^ commands
              v        |
      core/       decides (pure)

A request goes down the left side and comes back up: `front.server` reads it (`oip.read_request`) and asks
`selection`, if an application is named, or `runtime` directly. The runtime opens it in the ledger, which
tells the scheduler of the arrival. In its own time the scheduler commands an Infer, which leaves by the
worker's link on the right; its result comes in by the same link, becomes an event in the ledger, and the
command that follows from it resolves the request's future. The answer is checked against its deadline once
more on its way out, because the way out takes time too.

Who guards the deadline: `core` admits and plans by prediction, the worker drops an action whose window is
over, the ledger counts what came back, and `front.server` what left. The first two save the GPU's time; the
last two keep the promise to the client.

Threads. Everything runs in the one event loop thread (uvloop, started in `app`), so no state here needs a
thread lock. Three things leave it: reading, hashing and writing model files (`asyncio.to_thread`),
telemetry's flush to disk, and the selection store, which has a thread of its own. None of them touches a
shell's state.

Who may import whom: from top to bottom as drawn, never upwards. `app` stands above all and makes the
objects; `config` holds their settings. What has to travel upwards is a callable, a future, or a protocol
that the lower module defines (`catalogue.OfferTo`, the runtime's port to a worker). Import contracts in
`pyproject.toml` hold the floors.
"""
