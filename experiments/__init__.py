"""What is asked of the system, and what it answers: figures, bounds, benchmarks, demo.

Theory of operation
-------------------
A *case* is a value: cluster, models, clients, policy, seed. The simulator plays it on a virtual clock with
the code that serves (the scheduler, the books of requests and actions, the worker's core); only clocks,
links, devices and clients are modelled. `live` plays it against a real server, and `bench` measures one part
of the product alone. A *bound* says what no schedule could exceed in the same case. Every run leaves one JSON
file in `results/` with the command that repeats it, the commit, the machine and the seeds (`results_file`),
its table and its picture next to it; nothing is written there by hand.

`python -m experiments NAME` runs a study, and `python -m experiments` lists them. The rooms are the questions::

    gpu              what only a GPU can show
    policies         who schedules better, on workloads of many kinds, and how near to the bound
    bench            what one part of the product costs on this machine
    demo             what it looks like
    faults           the whole system on virtual time, broken in random stories
    clipper_paper    the figures of the Clipper paper
    live             what a real server does, compared with what the simulator says
    clockwork_paper  the figures of the Clockwork paper
    planning         how many workers a load needs
    study            the frame of them all: tables, pictures, records, and the page of results
    bounds           what no schedule could exceed
    simulator        a case on a virtual clock
    telemetry        what a run recorded; next to it digits (models to ask)
             |
     controller.core, controller.ledger, worker.core: the code that serves

`live.open_loop` is the client that measures promises: nothing of the product is part of its process,
`live.open_loop_client`.

Arrows point down only, and nothing in the product imports this room. Simulated figures repeat bit for bit,
so a change of a CSV in a diff is a change of a decision. Live figures are measured, with their spread.
`native` compiles the simulator's inner loop and both cores for runs of hours.
"""

import os

# From 1.29 on onnxruntime sends Microsoft an account of every session, with hashes of the model's graph and
# weights, from a thread of its own. onnxruntime reads this variable when it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
