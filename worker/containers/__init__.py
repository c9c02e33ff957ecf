"""Models that are code, each in a process of its own.

`device` is the worker's side of the contract, `container` the process seen from here, `container_process`
the program that runs in it. No code comes over the link: the operator places it on this machine.
"""
