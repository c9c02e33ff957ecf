"""The services behind gRPC and REST.

inference       requests for inference
templates       requests alike but for ids and tensors are parsed and checked once
early_refusals  requests that the scheduler would refuse are refused where they are read, many at a time
repository      metadata and the model repository
health          whether the server serves: asked once, or watched
reflection      which services and messages there are
leadership      whether this controller leads
control         operators: workers, models, applications, feedback
recent          figures of the last seconds, for operators
request_report  the outcome of one request, and why
tracing         where the time of some requests went, for collectors of traces
forwarding      in a front process: every method but inference goes on to the controller
"""
