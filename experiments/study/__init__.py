"""The frame of every study: `study` asks, writes and records, `pictures` draws, `results_page` puts all records on a page.

Numbers of a record whose key begins with `paper_` are the paper's, as its text states them; all others are computed here.
Devices of the Clockwork paper's figures are modelled on its Table 1, so the policies meet on equal terms; what differs from the
paper's testbed is named next to each number that it affects.
"""
