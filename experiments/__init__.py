"""What is asked of the system, and what it answers: figures, bounds, benchmarks, demo.

Theory of operation
-------------------
A *case* is a value: cluster, models, clients, policy, seed. The simulator plays it on a virtual clock with
the code that serves (the scheduler, the books of requests and actions, the worker's core); only clocks,
links, devices and clients are modelled. `live_run` and `local_server` play it against a real server, and a
benchmark measures one part of the product alone. A *bound* says what no schedule could exceed in the same
case. Every run leaves one JSON file in `results/` with the command that repeats it, the commit, the machine
and the seeds (`results_file`), its table and its picture beside it; nothing is written there by hand.

::

    gpu   demo   poisoned   bench_serve           a question each: python -m experiments.NAME
      |     |        |           |
      |   figures ---+     bench_{core,grpc,overload,selection,worker,frontend}
      |     |        |           |
      +-----+- bounds, selection, calibration     what a figure compares with, and models to ask
            |        |           |
            |   live_run, local_server            a case played against a real server
        simulator                                 the same case on a virtual clock
            |
     controller.core, controller.ledger, worker.core: the code that serves

    beside all of them: results_file, telemetry_tables, timeline, chrome_trace

`open_loop` is the client that measures promises (`live_promises`, `broken`, `bench_overload`): nothing of the product
is part of its process, `open_loop_client`. `broken_worker` is a real worker whose device breaks.

Arrows point down only, and nothing in the product imports this room. Simulated figures repeat bit for bit,
so a change of a CSV in a diff is a change of a decision. Live figures are measured, with their spread.
`native` compiles the simulator's inner loop and both cores for runs of hours.
"""

import os

# From 1.29 on onnxruntime sends Microsoft an account of every session, with hashes of the model's graph and
# weights, from a thread of its own. onnxruntime reads this variable when it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
