"""The worker's pure core: what happens when. No clock, no threads, no tensors, no I/O.

`lanes` holds the actions and decides which step a lane takes next; `pages` and `io_pool` say which pages of
the weights cache and which stretches of the IO memory are free. The shell is `worker.lane_threads`; the
simulator has one with a virtual clock.
"""
