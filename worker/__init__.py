"""The worker: one process for one GPU. It does what the controller says, when it says so, or refuses.

     cli  (gpu_workers)                      the command; a process per GPU if there are several
       |
    process                                  from settings (config) to the exit code
       |
     link ------> offers                     the stream to the controller; models on offer
       |             |
    controller_socket|                       actions in, results out
    front_sockets    |                       inputs of fronts elsewhere in, their outputs out
       |             |
    lane_threads     |                       four threads round one lock; on time by timing
       |     |       |
       |     +-------+-> devices/ containers/        what runs a step: GPU, processor, profile, somebody's code
       |                    |
       |                 compiling/ --> engines/     ONNX to graph, weights, profile; what runs a graph
       |                    |              |
       +--> core/ <---- models/ <----------+         what happens when; what one model is

No arrow points up, and `core` knows neither clock nor thread nor tensor.

The threads. The event loop serves the stream, which controls, and fronts of other hosts. One thread reads actions from the socket, and four
lane threads carry them out, each one step at a time; whoever has a result writes it. One setup thread and one
compiler process get models ready, at low priority.

    actions      read action ........................................... write result
                     | submit (small inputs are copied right here,            ^
                     |         and a short Infer on idle lanes runs here)     |
    INPUT            +--> copy the inputs into an IO slot --+                 |
    LOAD     copy the weights, host to pages --------+      |                 |
    EXEC                                             +------+--> gather, run -+- small outputs too
    OUTPUT                                                                    +--> copy the outputs out

Who waits for whom. A thread that has nothing to do sleeps on its lane's condition; whatever changes the core
wakes the lanes that this concerns. An EXEC waits for its INPUT and for its model's LOAD, a LOAD waits for
pages that an evicted model's EXEC still reads, an INPUT waits for a free IO slot: each until its own window
closes, and then it is refused. On a GPU the next EXEC is queued shortly before the running one ends, so
the GPU does not idle between two; and a LOAD waits, on the device, for the last gather from its pages.
No lane ever waits for the compiler or the setup thread, so a model that is being prepared delays no action.

What is allocated when. Everything that serving needs is taken at start: pages, arena, IO slots, the static
batch and, for a GPU, locked host memory. Setting a model up may take more (its kernels' workspace; on
the processor its weights too); serving never takes any. An action that took memory would take an
unpredictable time, and prediction is the whole point.

Who measures. The lane thread stamps when a step began and ended; a device that can tell adds how long it was
busy. Preparing an architecture measures its EXECs once, and the figures seed the controller's estimates
until results replace them. A GPU's clock is looked at every second and reported, because durations go
with the clock.

Who translates time. Nobody here: every time on stream and socket is this machine's monotonic clock. The
controller translates, from the offsets that heartbeats measure in both directions.

What happens when the GPU is lost. The step that meets the fault fails its action and raises
`DeviceLostError`; no other step starts. The link sends the results that wait and ends the socket; all other
actions thereby return to the controller, which sends them elsewhere. A process never recovers from its
GPU's fault, so it exits; a container is started anew, and the worker attaches again. A GPU's step that
never ends is given ten seconds after the stream's end; then the process exits without its threads.
When only stream or socket is lost, the worker forgets all actions and dials again. It tells whichever controller
answers which models it holds, and what of that the controller does not want any more it drops.
"""

import os

# From 1.29 on onnxruntime sends Microsoft an account of every session, hashes of the model's graph and
# weights included, from a thread of its own. onnxruntime reads this variable when it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
