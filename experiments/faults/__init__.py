"""The whole system on one virtual time: fronts, controllers, workers, clients, links, disks and clocks.

    world      virtual time, hosts with clocks, processes, their event loops and threads
    sockets    TCP and Unix sockets between them, over links that break, stall and lose
    rpc        gRPC's client on those sockets, in place of grpcio's
    interpose  the standard library's doors (clock, socket, thread, process id) lead into the world
    leases     where it is kept which of several controllers leads
    redis_place  a Redis, which applications may have as their store
    keys       what callers show, and the file that says what it allows
    writer     the program that a controller starts to write its telemetry
    device     a worker's device, whose answers show which inputs it has read
    plant      the product's own controllers, fronts and workers, as processes of the world
    clients    clients, which write down the outcome
    story      a random story: what happens when, of a seed
    checks     what must hold whatever happens

Nothing of the product is imitated but the device and grpcio's client. All else is the code that serves: the
world stands below the standard library, where the kernel stands otherwise. A seed decides everything, so that
a failure is found again. Approach: FoundationDB's simulation, madsim, TigerBeetle's VOPR.
"""
