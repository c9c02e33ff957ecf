"""Links to workers, and memory shared with workers and fronts of the same host.

joining         peers that ask for a connection, until they connect
worker_link     the controller's end of its links to workers
worker_actions  a worker's actions and results, and their tensors
worker_models   a worker's models: offers, answers, files
workers_wanted  how many there should be, and which one leaves, for orchestrators that start and end them
worker_claims   what a worker may say of itself and of models; no I/O
slabs           shared memory for large tensors
slab_book       which parts of it are taken; no I/O
held_tensors    tensors that travel between a front and a worker, and of which the controller has a handle
"""
