"""Our stubs of the Open Inference Protocol beside those of a client, in one process.

Every client registers the package `inference` in protobuf's default pool, where a second registration
is fatal. Ours has a pool of its own; a process of its own for each order of imports shows it.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

OURS = "import clockwright.client.client, controller.front.services.inference"
THEIRS = "import tritonclient.grpc, tritonclient.grpc.aio"
BOTH_WORK = """
from clockwright.v1 import inference_pb2 as ours
from tritonclient.grpc import service_pb2 as theirs
request = theirs.ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"abc"])
request.parameters["slo_ms"].int64_param = 25
parsed = ours.ModelInferRequest.FromString(request.SerializeToString())
assert parsed.model_name == "m" and parsed.parameters["slo_ms"].int64_param == 25
assert theirs.ModelInferRequest.FromString(parsed.SerializeToString()) == request
"""


@pytest.mark.parametrize("order", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours", "theirs"])
def test_a_client_may_be_imported_before_or_after(order: tuple[str, str]) -> None:
    program = "\n".join([*order, BOTH_WORK])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_our_messages_have_tritons_field_numbers_and_types() -> None:
    program = """
from clockwright.v1 import inference_pb2 as ours
from tritonclient.grpc import model_config_pb2, service_pb2

theirs = {
    **service_pb2.DESCRIPTOR.message_types_by_name,
    **model_config_pb2.DESCRIPTOR.message_types_by_name,
}

def fields(message):
    own = {f.number: (f.name, f.type, f.is_repeated) for f in message.fields}
    for nested in message.nested_types:
        own |= {(nested.name, number): field for number, field in fields(nested).items()}
    return own

config = {each for each in theirs if each in model_config_pb2.DESCRIPTOR.message_types_by_name}
for name, message in ours.DESCRIPTOR.message_types_by_name.items():
    own, their = fields(message), fields(theirs[name])
    # Of a configuration we have what we fill and read, and there are no regions of CUDA memory.
    is_part = name in config or name == "CudaSharedMemoryStatusResponse"
    assert own.items() <= their.items() if is_part else own == their, name
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
