"""The pure parts of selection: settings, the policies' interface, combination, records.

    application   settings of one application
    shape         its tensors, and whether a model fits it
    query         records that a policy gets and returns
    policy        the interface of policies
    combination   several predictions become one answer
    cache         predictions that are known or on their way
    journal       answered queries that wait for feedback
    contexts      states by user, and which of them are still to be written

No I/O, no clock, no randomness of its own: time and random generators are arguments.
"""
