"""The front: what clients and operators reach, by gRPC or by REST.

    http       sockets and protocols: HTTP/2 for gRPC, HTTP/1.1 for REST, TLS, when bytes arrived
    oip        the Open Inference Protocol: messages and JSON in, answers and errors out; no I/O
    admission  how much may be inside at once, and what is rejected before it is parsed
    methods    the one table: path, role, messages, REST paths, and where each method is answered
    services   inference, the model repository, operators, health, reflection
    remote     the controller as a front sees it: in the same process, or over a link
    cells      several controllers: what each says of itself, and which of them gets a request

A front may be a process of its own (`clockwright front`). It runs the same server and services; only the
controller is at the other end of a link (`remote`). It judges callers and load by itself and leaves quotas to the
controller, because a tenant's requests come by all fronts and only one place can count them. The controller tells
fronts whose rate is used up, and they reject by themselves what it would reject: a flood over its quota ends
at the fronts.

Why the server is our own: grpcio spends more on a small request than everything else here does, most of it on
threads that wake each other. `pygrpc-native` 0.5.0, which serves in Rust, is no cheaper than `http2_server`:
48 us against 49 at 8 clients, 36 against 33 at 32, and 495 against 411 for a message of 602 kB, each server bare
and both in turns (commit 2596042). It has no TLS and no streams of requests, and does not know when a request's
first byte came.

uvicorn serves REST: its requests are few compared with gRPC's, and HTTP/1.1 has more special cases than a server
of our own should have to know. A REST request costs up to twice what a gRPC request costs.

The authoriser (`controller.access`) judges each call by its headers, before anything else of it is read. Code that
answers later finds the caller in `Call.caller`, or in a handler's second argument.

The front decides nothing, and no error of a client gets further than it. Handlers run in the controller's event
loop thread. Workers connect to `controller.links.worker_link`.
"""
