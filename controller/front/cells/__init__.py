"""Several controllers side by side: what each says of itself, and which of them gets a request. No I/O, no clock.

    rows      what a controller writes into the directory, and its bytes
    choice    which controller gets a request

A *cell* is a controller with its workers, which no other one uses. Each cell writes a row into a directory ten times a
second. A front, or an endpoint picker for a gateway, reads all rows and chooses a cell: the fullest one that
still makes the deadline. So load has a slope, and the cell at its lower end can be switched off. No request crosses from
cell to cell, and no cell knows of another.

The directory lies where a lease may lie (`controller.process.lease.places`), and `controller.process.cells` writes and
reads it.
"""
