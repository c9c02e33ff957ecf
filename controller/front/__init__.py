"""The controller's doors for clients and operators: gRPC in, gRPC out; or HTTP, which asks the same methods.

    http2         HTTP/2 and gRPC's framing of one connection: bytes in, events out; no I/O
    http2_server  sockets, and calls for handlers: a gRPC server that knows when a request came
    tls           TLS of one connection: ciphertext in, plaintext out; no I/O
    turns         the latest moment that is surely before the bytes came which are read now
    door          how much may be open at once
    pressure      what is refused when memory gets short; no I/O
    throttle      how many requests a busy event loop takes
    waiting_line  those that have time until it does; no I/O
    server        the Open Inference Protocol: inference
    repository    the rest of it: metadata, the model repository
    health        whether the server serves, as gRPC asks: now, or whenever it changes
    regions       clients' own shared memory: what is registered, and copies in and out
    leadership    whether this controller leads
    control       operators: workers, models, applications, feedback
    recent        what requests and actions of the last seconds say, for operators
    calls         a request for inference, by gRPC or REST
    backend       what a front needs of a controller, and the controller of this process
    templates     requests alike but for ids and tensors are parsed and checked once
    methods       unary methods of services on bytes: parse, answer, or a status
    rest          paths of HTTP and JSON, as an ASGI application: which method is meant, and its answer
    rest_server   sockets for that: uvicorn's HTTP/1.1, on connections that are looked after as gRPC's are
    oip_json      requests and answers in JSON, with binary tensors behind it
    classification  the largest values of an output, as text
    oip           the bytes of the Open Inference Protocol, without gRPC
    tracing       where the time of some requests went, for collectors of traces
    explanation   where the time of an answer went
    hindsight     what became of one request, and why
    refusals      a refusal as a sentence
    statuses      every error as a gRPC status

A front may be a process of its own (`clockwright front`), with the same server and service; then the controller
is at the other end of a link:

    remote         a controller elsewhere, which may go and come back
    open_requests  what is open meanwhile; no I/O
    early_quotas   what quotas forbid, as far as told: refused early; no I/O
    worker_sockets workers with which it shares no memory: tensors go straight there
    fed_requests   what was sent to which of them, and what came back; no I/O
    link_frames    what the two tell each other
    front_link     the controller's end
    forwarding     whatever is not inference is handed on to the controller

Fronts that are processes judge callers and loads, and leave quotas to the controller: a tenant's requests come by
all fronts, and only one place can count them. That place tells them whose rate is used up, and they refuse by
themselves what it would refuse; so a flood over its quota ends at the fronts.

Why the server is our own: grpcio spends more on a small request than everything else here does, most of it on
threads that wake each other. `pygrpc-native` 0.5.0, which serves in Rust, is no cheaper than `http2_server`:
48 us against 49 at 8 clients, 36 against 33 at 32, and 495 against 411 for a message of 602 kB, each server bare
and both in turns (commit 2596042). It has no TLS and no streams of requests, and does not know when a request's
first byte came.

REST is uvicorn's business, for its requests are few beside gRPC's and HTTP/1.1 has more corners than a server of our
own should have to know. A request there costs up to twice what one of gRPC costs.

Each call passes the authoriser (`controller.access`) before anything of it is looked at but its headers. Whatever
is answered later knows who asks: `Call.caller`, or `CALLER` in the tasks of handlers.

Nothing is decided here, and no error of a client gets further than this room. Handlers run in the
controller's event loop thread; workers come in by another door, `controller.worker_link`.
"""
