"""The kinds of devices that a worker may have, as help and messages name them. `worker.process` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device: what stands before the colon of `--device`."""

    #: How the flag is written; empty if help and messages do not name the kind.
    usage: str
    #: A regular expression of what stands after the colon.
    argument: str
    #: What it does, in words that follow `usage`.
    help: str = ""


#: By kind.
DEVICE_KINDS: Final = {
    "cpu": DeviceKind("cpu", ""),
    "cuda": DeviceKind("cuda:N", r"\d+", " or cuda (a worker process for each GPU)"),
    "modelled": DeviceKind("modelled:PROFILE", ".+", ", which only spends time"),
    "container": DeviceKind(
        "container:FOLDER", ".+", ", which runs the code of the model in that folder"
    ),
    # The GPU engine on the processor, for tests.
    "torch": DeviceKind("", "cpu"),
}
#: What `--device` may be, for its help.
DEVICE_HELP: Final = "; ".join(
    kind.usage + kind.help for kind in DEVICE_KINDS.values() if kind.usage
)
