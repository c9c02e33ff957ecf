"""What Triton's clients can ask for and is not here, in the words of both doors: what there is instead."""

from __future__ import annotations

from typing import Final

NO_TRACES: Final = "trace settings are not supported while the server runs: it is started with --trace-to and --trace-share"
NO_LOGGING: Final = "log settings are not supported while the server runs: it is started with --verbose and --log-format"
NO_CUDA: Final = "CUDA shared memory is not supported; system shared memory is"

#: Words by path of the method in gRPC.
METHODS: Final = {
    f"/inference.GRPCInferenceService/{name}": words
    for name, words in (
        ("TraceSetting", NO_TRACES),
        ("LogSettings", NO_LOGGING),
        ("CudaSharedMemoryRegister", NO_CUDA),
    )
}
