"""Workloads and faults that nobody tuned the policies to, each a family with its seeds."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from experiments.policies.load import Load

#: Every module beside this one has families.
MODULES = tuple(
    import_module(f"{__name__}.{found.name}")
    for found in iter_modules(__path__)
    if found.name != "__main__"
)
FAMILIES: Mapping[str, Load] = {load.name: load for module in MODULES for load in module.FAMILIES}
