"""Clipper's model selection layer: applications that choose and combine models, and learn which.

Theory of operation
-------------------
An *application* is a name that clients ask like a model. Behind it stand candidate models, a *policy*,
and one *state* of that policy per context (user, session, tenant) beside a global one. For a query the
policy `select`s members among the candidates, knowing from the scheduler which of them can be in time
and what they cost. Each member is asked by a request of its own with the query's deadline, unless the
prediction `cache` has the answer. `combine` makes one answer of the predictions that came, with a
confidence. The choice, its probability and what each member said go into the `journal` under the query
id. Feedback by that id becomes an `Observation`, and `observe` makes the next state of it.

::

    operators --> messages     records of control.proto
                     |
                     v
    query ----> applications --> queries --> ensemble --> runtime: a request per member
    feedback -->     |              |  ^         |
                     |              |  +---------+        the answers that came in time
                     v              v
                  context_states: states of users in memory --> stores/: SQLite or Redis
                     |
                     v
                  live_application: one revision with its policy, state, shape and counts
                     |
                     v
     guarded: a policy whose failures stay its application's
                     |
                     v
     plugins --> policies/: exp3, exp4, tallies, rollout
                     |
                     v
                  core/: application, query, combination, policy, journal, contexts, cache, shape

`core` and `policies` are pure: no I/O, no clock, and no random number but from a generator that is handed
in. All else runs in the controller's event loop thread, except the store's own thread. Imports point
down only; no policy imports another, and no store another.

The paper leaves some questions open. The answers here: a missing member has no say, does not count as
wrong, and counts against the confidence (core/combination.py); exponents are bounded
(policies/exp3.py); models that come later weigh what an average one does (policies/weights.py); ties go
to the earlier model; a member's answer that comes after the query's still counts when feedback comes.
"""
