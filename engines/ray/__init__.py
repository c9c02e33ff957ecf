"""Clockwright on a Ray cluster: Ray places and restarts processes, the controller says how many and which leave.

    kinds        the file that says what is wanted: kinds of workers, fronts, controllers
    cli          `clockwright up --ray`
    environment  finds Ray's Python, and runs a script with it
    launch       starts and stops a keeper
    keeper       in Ray: the actor that creates the others, and has them leave
    supervisor   in Ray: an actor for each process, which starts one of our commands
    reconcile    what the keeper does next, as a pure function
    calls        in Ray: calls of a sweep as tasks
    executor     hands a sweep's calls to it

Ray pins versions of protobuf and gRPC that are not ours, so it has a Python environment of its own, and none of its
processes imports our packages: `launch`, `keeper`, `supervisor`, `reconcile` and `calls` need Ray and the standard library only. What they start
runs in the project's environment, and what they ask the controller, they ask by its command line.
"""
