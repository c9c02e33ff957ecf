"""Sequences: requests that are steps, each of which takes the state that the step before left.

A step is a request with a `sequence_id`. Its client leaves state out; this stage of the port keeps it, puts it in, and
takes it out of the answer. So to everything behind the stage a step is a request like any other: every worker may run it,
a batch holds steps of many sequences, a worker that drains has nothing to hand over, and one that dies costs the step
that it ran, if no other worker has the time for it. The price is that state travels with each step (`docs/sequences.md`
has what that costs, and from what size it is too much).

`book` is pure: which sequences are live, whose turn it is, what is refused. `beats` is pure: whether there is time for one
more stream of steps. `stage` does the asking and sets the timer. `limits` has the bounds.

`driven` runs requests with several answers: the steps of those the server asks itself.
"""
