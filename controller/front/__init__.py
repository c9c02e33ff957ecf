"""The controller's doors for clients and operators: gRPC in, gRPC out.

    server        the Open Inference Protocol: inference, health, metadata, the model repository
    control       operators: workers, models, applications, feedback
    oip           the bytes of the Open Inference Protocol, without gRPC
    explanation   where the time of an answer went
    refusals      a refusal as a sentence
    statuses      every error as a gRPC status

Nothing is decided here, and no error of a client gets further than this room. Handlers run in the
controller's event loop thread; workers come in by another door, `controller.worker_link`.
"""
