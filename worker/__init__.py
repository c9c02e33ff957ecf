"""The worker: one process for one GPU. It runs each action in the window that the controller set, or refuses it.

     cli  (gpu_workers)                      the command; a process per GPU if there are several
       |
    process                                  from settings (config) to the exit code
       |
     link ------> offers                     the link to the controller; models on offer
       |             |
    controller_socket|                       the connection: actions in, results out
    front_sockets    |                       inputs of fronts elsewhere in, their outputs out
       |             |
    lane_threads     |                       four threads round one lock; on time by timing
       |     |       |
       |     +-------+-> devices/ containers/        what runs a step: GPU, processor, profile, Python code
       |                    |
       |                 compiling/ --> engines/     ONNX to graph, weights, profile; what runs a graph
       |                    |              |
       +--> core/ <---- models/ <----------+         what happens when; what one model is

No arrow points up. `core` has no clock, no threads and no tensors.

The threads. One thread reads the connection to the controller. Four lane threads carry out actions, each one step
at a time, and the thread that has a result writes it. The event loop handles all other messages of the controller, and
fronts of other hosts. One setup thread and one compiler process get models ready, at low priority.

    actions      read action ........................................... write result
                     | submit (small inputs are copied right here,            ^
                     |         and a short Infer on idle lanes runs here)     |
    INPUT            +--> copy the inputs into an IO slot --+                 |
    LOAD     copy the weights, host to pages --------+      |                 |
    EXEC                                             +------+--> gather, run -+- small outputs too
    OUTPUT                                                                    +--> copy the outputs out

What waits for what. An idle thread sleeps on its lane's condition; a change of the core wakes the lanes that it
concerns. An EXEC waits for its INPUT and for its model's LOAD. A LOAD waits for pages that an evicted model's
EXEC still reads. An INPUT waits for a free IO slot. Each waits until its own window closes, and is then refused.
On a GPU the next EXEC is queued shortly before the running one ends, so the GPU does not idle between them. A LOAD
waits, on the device, for the last gather from its pages. No lane waits for the compiler or the setup thread, so
preparing a model delays no action.

Memory. A worker allocates everything that serving needs at start: pages, arena, IO slots, the static batch and,
for a GPU, locked host memory. Setting up a model may allocate more (the workspace of its kernels; on the processor
its weights too). Serving never allocates, because an action that allocates takes an unpredictable time.

Measurement. The lane thread records when a step began and ended; some devices add how long they were busy.
Preparing an architecture measures its EXECs once. These figures seed the controller's estimates until results
replace them. A worker reads its GPU's clock every second and reports it, because durations depend on the clock.

Clocks. This process never converts times: every time on the connection is this machine's monotonic clock. The
controller converts them, by the offsets that heartbeats measure in both directions.

A lost GPU. The step that meets the fault fails its action and raises `DeviceLostError`; no other step starts. The
link sends the results that are ready and closes the connection, so the controller sends all other actions to other
workers. A process cannot recover from a fault of its GPU, so it exits; a container is restarted, and the worker
attaches again. If a GPU's step has not ended ten seconds after the connection, the process exits without joining its
threads.

A lost connection. When only the connection is lost, the worker forgets all actions and connects again.
It tells the controller that answers which models it holds, and drops those that the controller does not want.
"""

import os

# From 1.29 on onnxruntime sends Microsoft an account of every session, hashes of the model's graph and
# weights included, from a thread of its own. onnxruntime reads this variable when it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
