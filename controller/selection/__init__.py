"""Clipper's model selection layer: applications that choose and combine models, and learn which.

Theory of operation
-------------------
An *application* is one name for several models. It has candidate models, a *policy*, and one *state* of that policy
per context (user, session, tenant) in addition to a global one. For a query the
policy `select`s members among the candidates, knowing from the scheduler which of them can be in time
and what they cost. Each member gets a request of its own with the query's deadline, unless the prediction
`cache` has the answer. `combine` makes one answer of the predictions, with a confidence. The choice, its
probability and each member's answer go into the `journal` under the query id. Feedback with that id becomes an
`Observation`, and `observe` makes the next state from it.

::

    operators --> messages     records of control.proto
                     |
                     v
    query ---------------------> queries --> ensemble --> runtime: a request per member
    feedback --> applications       |  ^         |
                     |              |  +---------+        the answers that came in time
                     |              |
    model ---------------------> queries --> predictions --> runtime: unless the cache has its answer
                     v              v
                  context_states: states of users in memory --> stores/: SQLite or Redis
                     |
                     v
                  live_application: one revision with its policy, state, shape and counts
                     |
                     v
     guarded: a policy whose failures affect only its application
                     |
                     v
     plugins --> policies/: exp3, exp4, tallies, rollout
                     |
                     v
                  core/: application, query, combination, policy, journal, contexts, cache, shape

`core` and `policies` are pure: no I/O, no clock, and random numbers only from a generator that is passed
in. Everything else runs in the controller's event loop thread, except the store's own thread. Imports point
down only; no policy imports another, and no store another.

The paper leaves some questions open. The answers here: a missing member has no vote, does not count as
wrong, and lowers the confidence (core/combination.py); exponents are bounded
(policies/exp3.py); models that are added later get an average weight (policies/weights.py); ties go
to the earlier model; a member's answer that is later than the query's still counts for feedback.
"""
