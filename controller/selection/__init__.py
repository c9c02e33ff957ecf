"""Clipper's model selection layer: applications that choose and combine models, and learn which.

Theory of operation
-------------------
An *application* is a name that clients ask like a model. Behind it stand candidate models, a *policy*,
and one *state* of that policy per context (user, session, tenant) beside a global one. For a query the
policy `select`s members among the candidates, knowing from the scheduler which of them can be in time
and what they cost; members are asked, each as a request of its own with the query's deadline, unless
the prediction `cache` has the answer; `combine` makes one answer of those that came, with a
confidence; what was chosen, with what probability, and what each said goes into the `journal` under the
query id. Feedback by that id becomes an `Observation`, and `observe` makes the next state of it.

`core` and `policies` are pure: no I/O, no clock, no random number that is not drawn from a generator
handed in. Around them stand the shells: `applications` (which applications there are, and feedback),
`queries` and `ensemble` (one query, and what its members are asked), `context_states` (between memory
and `stores`), `live_application` and `plugins` (policies from other packages, by entry point).

The paper leaves open, and here is decided: a missing member has no say, does not count as wrong,
and counts against the confidence (combination.py); exponents are bounded (exp3.py); models that come
later weigh what an average one does (weights.py); ties go to the earlier model.
"""
