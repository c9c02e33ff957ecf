"""Metrics of a controller for Prometheus, on a port of their own.

    families   every exported metric, with its type, labels and meaning
    histogram  how many times fell into which bucket; no I/O
    tally      counts of requests and actions, from telemetry's records; no I/O
    text       the lines of a page, in Prometheus' format or OpenMetrics'; no I/O
    page       the current values of all families, collected from the controller's parts in slices
    app        HTTP: access control, and the pages

The names that begin with `nv_` are Triton's, with its labels, units and meaning, so that its dashboards and scaling
rules hold here too; the others are ours. Both are listed in `docs/metrics.md`.

Cost per request. Telemetry makes a record of each request and action anyway. It gives them to the tally in batches,
which looks up each model or worker once and counts in a plain object whose labels are text already. Nothing else is
done per request, and nothing at all if metrics are off.

Cost per scrape. The controller's event loop has no time for a page in one piece, and a thread would hold the
interpreter for 5 ms at a time. So a page is made in slices of a millisecond, between which requests are served.
prometheus-client's writer takes 65 ms for the 13,000 lines of a thousand models, without a pause. The writer here
takes 2 ms, because its labels are ready; in the tests prometheus-client reads its pages.

Label values come from clients, so their number is bounded: up to `NAMES_MAX` models and tenants are counted under their
own names, and all others together as `other`.
"""
