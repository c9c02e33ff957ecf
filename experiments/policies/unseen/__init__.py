"""Workloads and faults that the policies were not tuned to, each a family with its seeds.

A family is a row of a module's table, and every module next to this one is read. `experiments.policies.load` makes rows:
`alike` (equal models, with a fault or without), `mixture` (groups whose rates change), `asked_at_random` (a case).
"""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from experiments.policies.load import Load

#: Every module next to this one has families.
MODULES = tuple(
    import_module(f"{__name__}.{found.name}")
    for found in iter_modules(__path__)
    if found.name != "__main__"
)
FAMILIES: Mapping[str, Load] = {load.name: load for module in MODULES for load in module.FAMILIES}
