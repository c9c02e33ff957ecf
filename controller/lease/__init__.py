"""The lease: of several controllers that serve the same workers, one leads, and the others stand by.

    lease     who leads, and until when; no I/O and no clock
    stores    what a place for the record has to do
    places    the place that a setting names
    file      the record is a file, for controllers of one host
    etcd      the record is a key of etcd, for controllers anywhere
    keeper    looks at the record at its times, renews it, gives it back

There is one record. Whoever leads counts up in it once a second, by comparing and swapping, and counts itself
leader for a little less than three seconds from the moment before it asked. Whoever stands by looks ten times a
second; a record that has stood still for three seconds by its own clock has lapsed, and is taken over under the
next generation. So no two clocks are ever compared, and nobody leads who could have been followed. A record
that was given back, or whose holder is known to have ended, is taken at once.

Generations go with every order to a worker, which obeys none older than the newest that it has heard of
(`clockwright.leadership`). A leader that was stopped, and goes on without knowing how late it is, is harmless
therefore. It leads on if it can still renew the record, for then nobody else has led; else it ends.
"""
