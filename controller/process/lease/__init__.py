"""The lease: of several controllers that serve the same workers, one leads, and the others stand by.

    lease       who leads, and until when; no I/O and no clock
    stores      the interface of a store for the record
    places      the place that a setting names
    file        the record is a file, for controllers of one host
    etcd        the record is a key of etcd, for controllers anywhere
    kubernetes  the record is in a Lease object, for controllers of one cluster
    keeper      checks the record periodically, renews it, releases it

There is one record. The leader increments a counter in it once a second, by compare-and-swap, and counts itself
leader for a little less than three seconds from the moment before it asked. A standby reads the record ten times a
second. If the record has not changed for three seconds of the standby's clock, the standby takes it over, under the
next generation. So no two clocks are ever compared, and no leader overlaps with its successor. A record
that was given back, or whose holder is known to have ended, is taken at once.

Generations go with every order to a worker, which obeys none older than the newest that it has heard of
(`clockwright.wire.leadership`). A leader that was stopped, and goes on without knowing how late it is, is harmless
therefore. It leads on if it can still renew the record, for then no other has led; else it ends.
"""
