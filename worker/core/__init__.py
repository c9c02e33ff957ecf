"""The worker's pure core decides which step runs when. It has no clock, no threads, no tensors and no I/O.

`lanes` holds the actions and decides which step a lane takes next; `pages` and `io_pool` say which pages of
the weights cache and which parts of the IO memory are free. The shell is `worker.lane_threads`; the simulator has a shell with a
virtual clock.
"""
