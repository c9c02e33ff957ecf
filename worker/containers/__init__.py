"""Models that are code, each in a process of its own, and models of other servers.

`device` is the worker's side of the contract, `container` what it runs: a `program`, whose bytes `frames` reads and
writes, or an `oip_server`. `container_process` is the program that runs Python. No code comes over the link: the operator
places it on this machine.
"""
