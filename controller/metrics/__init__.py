"""What Prometheus is told of a controller, on a port of its own.

    families   every name that is exported, with its type, labels and meaning
    histogram  how many times fell into which bucket; no I/O
    tally      counts of requests and actions, made of telemetry's records; no I/O
    capacity   how many workers are needed; no I/O
    text       the lines of a page, in Prometheus' format or OpenMetrics'; no I/O
    page       what each family says now, collected from the controller's parts in slices
    door       HTTP: who asks, may he, and the page

The names that begin with `nv_` are Triton's, with its labels, units and meaning, so that its dashboards and scaling
rules hold here too; the others are ours. Both are listed in `docs/metrics.md`.

What a request costs. Telemetry makes a record of each request and action anyhow. It hands them to the tally in
batches: what is known of a model or a worker is looked up once and counted in a plain object, whose labels are text
already. Nothing is done per request beside that, and nothing at all where metrics are off.

What a scrape costs. The event loop of a controller has no time for a page in one piece, and a thread would take the
interpreter from it for 5 ms at a time. So a page is made in slices of a millisecond, between which requests have
their turn. prometheus-client's own writer takes 65 ms for the 13,000 lines of a thousand models and does not stop
in between. The writer here takes 2 ms, because it takes labels as they are; prometheus-client reads its pages in the
tests.

A label's value comes from outside, so that there may be any number of them: models and tenants have a name of their
own up to `NAMES_MAX`, and all others are counted together as `other`.
"""
