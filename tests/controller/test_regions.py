"""Clients' own shared memory: Triton's client leaves tensors there and finds them, and nobody else is harmed."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, shared_memory

from clockwright.errors import (
    BadRequestError,
    NameTakenError,
    NoRoomError,
    NotAllowedError,
    UnknownRegionError,
)
from clockwright.v1 import inference_pb2 as pb
from controller.front.admission.limits import AdmissionLimits
from controller.front.http.calls import check_local
from controller.front.methods import INFERENCE, METHODS
from controller.front.oip.protocol import SharedPart
from controller.front.oip.regions import REGIONS_MAX, Regions
from controller.links.slabs import Slabs
from tests.kit.front_end import FrontEndInThread, serving_in_thread

SLO = {"slo_ms": 30_000}
ROW = np.array([[1, 2, 3]], np.float32)
#: Bytes of `ROW`, of what `double` takes and gives.
SIZE = 12


class Memory:
    """A shared memory object as Triton's client makes it, until the `with` block ends."""

    def __init__(self, num_bytes: int = 4096) -> None:
        self.key = f"/clockwright-test-{os.getpid()}-{os.urandom(4).hex()}"
        self.path = Path("/dev/shm") / self.key[1:]
        self.handle = shared_memory.create_shared_memory_region(
            "r", self.key[1:], num_bytes, create_only=True
        )

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        shared_memory.destroy_shared_memory_region(self.handle)

    def put(self, values: np.ndarray[Any, Any], offset: int = 0) -> None:
        shared_memory.set_shared_memory_region(self.handle, [values], offset)

    def row(self, offset: int = 0) -> list[float]:
        found = shared_memory.get_contents_as_numpy(self.handle, np.float32, [3], offset)
        values: list[float] = found.tolist()
        del found
        return values


@pytest.fixture
def memory() -> Iterator[Memory]:
    with Memory() as memory:
        yield memory


@pytest.fixture
def regions() -> Iterator[Regions]:
    slabs = Slabs(8 << 20)
    yield Regions(slabs, num_bytes_max=1 << 20, request_bytes_max=1 << 20)
    slabs.close()


def open_files() -> int:
    """Files, pipes and shared memory that are open; sockets of servers of earlier tests may still go."""
    gc.collect()  # what earlier tests left open
    kept = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            kept += not os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "anon_inode:"))
    return kept


# --- what is registered ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key",
    [
        "", "/", ".", "..", "/..", "a/b", "../etc/passwd", "/../etc/passwd", "a\0b", "x" * 256,
        "ü" * 200, "no-such-object",
    ],
)  # fmt: skip
def test_a_key_that_names_no_object_is_refused(regions: Regions, key: str) -> None:
    with pytest.raises(BadRequestError, match="key: found"):
        regions.register("r", key, 0, 1)
    assert regions.list("") == []


def test_what_is_no_object_is_refused_and_nothing_is_followed_or_waited_for(
    tmp_path: Path,
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(100))
    objects = tmp_path / "objects"
    objects.mkdir()
    (objects / "link").symlink_to(secret)
    (objects / "folder").mkdir()
    os.mkfifo(objects / "pipe")
    regions = Regions(Slabs(0), num_bytes_max=1000, request_bytes_max=1000, objects=objects)
    before = open_files()
    for key in ("link", "folder", "pipe", "../secret", "folder/../../secret"):
        with pytest.raises(BadRequestError, match="key: found"):
            regions.register("r", key, 0, 1)
    assert open_files() == before


def test_another_users_object_is_refused_and_one_that_becomes_so_too(
    regions: Regions, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions.register("mine", memory.key, 0, SIZE)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(BadRequestError, match=f"of user {uid}, expected one of the server's own"):
        regions.register("theirs", memory.key, 0, SIZE)
    with pytest.raises(BadRequestError, match="expected one of the server's own"):
        regions.read(SharedPart("mine", 0, SIZE))


def test_a_region_larger_than_its_object_is_refused(regions: Regions, memory: Memory) -> None:
    for offset, size in ((0, 4097), (4096, 1), (2**63, 1), (0, 0)):
        with pytest.raises(BadRequestError, match="expected"):
            regions.register("r", memory.key, offset, size)
    regions.register("r", memory.key, 4095, 1)


def test_no_tenant_takes_all_regions_or_their_bytes_and_whoever_comes_finds_room(
    tmp_path: Path,
) -> None:
    (tmp_path / "object").write_bytes(bytes(1 << 20))
    regions = Regions(Slabs(0), num_bytes_max=1 << 20, request_bytes_max=1, objects=tmp_path)

    def fill(owner: str, num_bytes: int) -> int:
        """Number of regions that an owner gets who wants all."""
        for number in range(REGIONS_MAX):
            try:
                regions.register(str(number), "object", 0, num_bytes, owner=owner)
            except NoRoomError:
                return number
        return REGIONS_MAX

    owners = [f"tenant {number}" for number in range(4)]
    assert [fill(owner, 1) for owner in owners] == [128, 64, 32, 16]
    for owner in owners:
        regions.unregister("", owner=owner)
    # The same by bytes, of which a region may have many.
    assert [fill(owner, 1 << 14) for owner in owners] == [32, 16, 8, 4]
    for owner in owners:
        regions.unregister("", owner=owner)
    # Nobody else is there where nobody has to say who he is.
    assert fill("", 1 << 12) == REGIONS_MAX
    regions.unregister("")


def test_names_are_bounded_and_taken_once(regions: Regions, memory: Memory) -> None:
    for name in ("", "n" * 100_000):
        with pytest.raises(BadRequestError, match="name"):
            regions.register(name, memory.key, 0, 1)
    regions.register("r", memory.key, 0, 1)
    with pytest.raises(NameTakenError, match="there is a region 'r' already"):
        regions.register("r", memory.key, 0, 1)


def test_regions_are_bounded_in_number_and_bytes_and_leave_no_file_open(memory: Memory) -> None:
    before = open_files()
    regions = Regions(Slabs(0), num_bytes_max=4096 + 300, request_bytes_max=1)
    regions.register("large", memory.key, 0, 4096)
    with pytest.raises(NoRoomError, match="found 301 besides 4096 of other regions"):
        regions.register("more", memory.key, 0, 301)
    for number in range(REGIONS_MAX - 1):
        regions.register(str(number), memory.key, 0, 1)
    for number in range(1000):
        with pytest.raises(NoRoomError, match="regions already"):
            regions.register(f"further-{number}", memory.key, 0, 1)
    assert open_files() <= before + REGIONS_MAX
    regions.unregister("")
    assert (regions.list(""), open_files()) == ([], before)


def test_a_region_that_is_unregistered_lives_on_for_who_has_found_it(
    regions: Regions, memory: Memory
) -> None:
    before = open_files()
    regions.register("r", memory.key, 0, SIZE)
    stretch = regions.find(SharedPart("r", 0, SIZE))
    regions.unregister("r")
    with pytest.raises(UnknownRegionError):
        regions.find(SharedPart("r", 0, SIZE))
    stretch.write(ROW.tobytes())
    assert memory.row() == [1, 2, 3]
    del stretch
    assert open_files() == before


def test_a_region_is_its_owners_and_nobody_elses(regions: Regions, memory: Memory) -> None:
    regions.register("r", memory.key, 0, SIZE, owner="tenant gold")
    whole = SharedPart("r", 0, SIZE)
    for owner in ("", "tenant silver", "caller gold"):
        with pytest.raises(UnknownRegionError):
            regions.find(whole, owner=owner)
        with pytest.raises(UnknownRegionError):
            regions.read(whole, owner=owner)
        with pytest.raises(UnknownRegionError):
            regions.unregister("r", owner=owner)
        regions.unregister("", owner=owner)
        assert regions.list("", owner=owner) == []
    # Another may have one of the same name.
    regions.register("r", memory.key, 0, 1, owner="tenant silver")
    assert regions.find(whole, owner="tenant gold").num_bytes == SIZE
    regions.unregister("", owner="tenant gold")
    assert [region.num_bytes for region in regions.list("", owner="tenant silver")] == [1]


def test_parts_stay_inside_their_region(regions: Regions, memory: Memory) -> None:
    regions.register("r", memory.key, 100, 50)
    memory.put(np.arange(4096, dtype=np.uint8))
    assert bytes(regions.read(SharedPart("r", 10, 40))) == bytes(range(110, 150))
    for offset, size in ((10, 41), (51, 0), (2**62, 1), (0, 2**62)):
        with pytest.raises(BadRequestError, match="region 'r': found 50 bytes"):
            regions.read(SharedPart("r", offset, size))


def test_an_object_that_becomes_shorter_at_any_time_costs_an_error_and_no_more(
    regions: Regions,
) -> None:
    size = 512 << 10
    with Memory(size) as memory:
        regions.register("r", memory.key, 0, size)
        part = SharedPart("r", 0, size)
        over = threading.Event()

        def flicker() -> None:
            while not over.is_set():
                os.truncate(memory.path, 0)
                os.truncate(memory.path, size)

        thread = threading.Thread(target=flicker)
        thread.start()
        outcomes = set()
        try:
            for _ in range(300):
                try:
                    outcomes.add(len(regions.read(part)))
                    regions.find(part).write(bytes(size))
                except BadRequestError as error:
                    outcomes.add("as when it was registered" in str(error))
        finally:
            over.set()
            thread.join()
        os.truncate(memory.path, 1)
        with pytest.raises(BadRequestError, match="found 1 bytes"):
            regions.read(part)
        with pytest.raises(BadRequestError, match="found 1 bytes"):
            regions.find(part).write(b"12")
        assert memory.path.stat().st_size == 1
        assert outcomes <= {size, True}
        os.truncate(memory.path, size)


# --- through the front ends -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=["here", "apart"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FrontEndInThread]:
    directory = tmp_path_factory.mktemp("models")
    with serving_in_thread(directory, front=request.param, client_shm=True) as front_end:
        yield front_end


@pytest.fixture
def client(server: FrontEndInThread) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address) as client:
        yield client
        client.unregister_system_shared_memory()


def shared_input(region: str, size: int = SIZE, offset: int = 0) -> triton.InferInput:
    tensor = triton.InferInput("x", [1, 3], "FP32")
    tensor.set_shared_memory(region, size, offset)
    return tensor


def shared_output(region: str, size: int = SIZE, offset: int = 0) -> triton.InferRequestedOutput:
    output = triton.InferRequestedOutput("y")
    output.set_shared_memory(region, size, offset)
    return output


def plain_input() -> triton.InferInput:
    tensor = triton.InferInput("x", [1, 3], "FP32")
    tensor.set_data_from_numpy(ROW)
    return tensor


def test_tritons_client_leaves_inputs_and_finds_outputs(
    client: triton.InferenceServerClient, memory: Memory
) -> None:
    assert "system_shared_memory" in client.get_server_metadata().extensions
    client.register_system_shared_memory("in", memory.key, 100, offset=8)
    client.register_system_shared_memory("out", memory.key, 1000, offset=1024)
    for number in range(3):
        memory.put(ROW + number, 8 + 4)
        result = client.infer(
            "double", [shared_input("in", offset=4)], outputs=[shared_output("out", 500, 20)],
            parameters=SLO,
        )  # fmt: skip
        assert memory.row(1024 + 20) == [2 + 2 * number, 4 + 2 * number, 6 + 2 * number]
        [output] = result.get_response().outputs
        assert (output.name, list(output.shape)) == ("y", [1, 3])
        told = {name: getattr(p, p.WhichOneof("parameter_choice")) for name, p in output.parameters.items()}  # fmt: skip
        assert told == {
            "shared_memory_region": "out",
            "shared_memory_byte_size": SIZE,
            "shared_memory_offset": 20,
        }
        assert list(result.get_response().raw_output_contents) == [b""]


def test_each_way_goes_with_the_other_being_plain(
    client: triton.InferenceServerClient, memory: Memory
) -> None:
    client.register_system_shared_memory("r", memory.key, 4096)
    memory.put(ROW)
    for _ in range(2):  # The second plain request takes the way of those that are known.
        result = client.infer("double", [shared_input("r")], parameters=SLO)
        np.testing.assert_array_equal(result.as_numpy("y"), 2 * ROW)
        result = client.infer("double", [plain_input()], parameters=SLO)
        np.testing.assert_array_equal(result.as_numpy("y"), 2 * ROW)
        client.infer(
            "double", [plain_input()], outputs=[shared_output("r", offset=64)], parameters=SLO
        )
        assert memory.row(64) == [2, 4, 6]


def test_tensors_of_one_request_may_lie_in_different_places(
    client: triton.InferenceServerClient, memory: Memory
) -> None:
    a, b = np.array([[5, 6]], np.int64), np.ones((1, 2, 2), np.float32)
    plain = [triton.InferInput("a", [1, 2], "INT64"), triton.InferInput("b", [1, 2, 2], "FP32")]
    plain[0].set_data_from_numpy(a)
    plain[1].set_data_from_numpy(b)
    expected = client.infer("mixed", plain, parameters=SLO).get_response()
    client.register_system_shared_memory("r", memory.key, 4096)
    memory.put(a, 32)
    shared = triton.InferInput("a", [1, 2], "INT64")
    shared.set_shared_memory("r", 16, 32)
    for inputs in ([shared, plain[1]], [plain[1], shared]):
        found = client.infer("mixed", inputs, parameters=SLO).get_response()
        assert found.raw_output_contents == expected.raw_output_contents
    first, *others = (output.name for output in expected.outputs)
    wanted = triton.InferRequestedOutput(first)
    wanted.set_shared_memory("r", 100, 512)
    outputs = [wanted, *map(triton.InferRequestedOutput, others)]
    found = client.infer("mixed", plain, outputs=outputs, parameters=SLO).get_response()
    # An output has the same position among the raw contents as among the outputs.
    assert list(found.raw_output_contents) == [b"", *expected.raw_output_contents[1:]]
    written = memory.handle._mpsm_handle.buf[512 : 512 + len(expected.raw_output_contents[0])]
    assert bytes(written) == expected.raw_output_contents[0]
    written.release()


def test_streams_may_use_regions(client: triton.InferenceServerClient, memory: Memory) -> None:
    client.register_system_shared_memory("r", memory.key, 4096)
    memory.put(ROW)
    answers: list[Any] = []
    came = threading.Semaphore(0)

    def take(result: Any, error: Any) -> None:  # noqa: ANN401
        answers.append(error or result)
        came.release()

    client.start_stream(take)
    outputs = [shared_output("r", offset=64)]
    client.async_stream_infer("double", [shared_input("r")], outputs=outputs, parameters=SLO)
    client.async_stream_infer("double", [shared_input("nowhere")], parameters=SLO)
    for _ in range(2):
        assert came.acquire(timeout=60)
    client.stop_stream()
    assert memory.row(64) == [2, 4, 6]
    [error] = [answer for answer in answers if isinstance(answer, InferenceServerException)]
    assert "there is no region 'nowhere'" in str(error)


def test_regions_are_listed_and_forgotten(
    client: triton.InferenceServerClient, memory: Memory
) -> None:
    client.register_system_shared_memory("one", memory.key, 10, offset=5)
    client.register_system_shared_memory("two", memory.key, 20)
    status = client.get_system_shared_memory_status(as_json=True)["regions"]
    assert status["one"] == {
        "name": "one", "key": memory.key, "offset": "5", "byte_size": "10",
    }  # fmt: skip
    assert set(status) == {"one", "two"}
    assert set(client.get_system_shared_memory_status("two", as_json=True)["regions"]) == {"two"}
    client.unregister_system_shared_memory("one")
    for ask in (client.get_system_shared_memory_status, client.unregister_system_shared_memory):
        with pytest.raises(InferenceServerException, match="there is no region 'one'") as caught:
            ask("one")
        assert caught.value.status() == "StatusCode.NOT_FOUND"
    client.unregister_system_shared_memory()
    assert not client.get_system_shared_memory_status(as_json=True)


@pytest.mark.parametrize(
    ("inputs", "outputs", "code", "words"),
    [
        ([shared_input("x")], [], "NOT_FOUND", "there is no region 'x'"),
        ([plain_input()], [shared_output("x")], "NOT_FOUND", "there is no region 'x'"),
        ([shared_input("r", 11)], [], "INVALID_ARGUMENT", "byte_size 11, expected 12"),
        ([shared_input("r", -1)], [], "INVALID_ARGUMENT", "found -1, expected 0 or more"),
        ([shared_input("r", offset=-1)], [], "INVALID_ARGUMENT", "found -1, expected 0 or more"),
        ([shared_input("r", offset=4085)], [], "INVALID_ARGUMENT", "expected 4097 or more"),
        ([plain_input()], [shared_output("r", 11)], "INVALID_ARGUMENT", "11, expected 12 or more"),
        ([plain_input()], [shared_output("r", 4097)], "INVALID_ARGUMENT", "expected 4097 or more"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    server: FrontEndInThread,
    client: triton.InferenceServerClient,
    memory: Memory,
    inputs: list[Any],
    outputs: list[Any],
    code: str,
    words: str,
) -> None:
    client.register_system_shared_memory("r", memory.key, 4096)
    with pytest.raises(InferenceServerException, match=words) as caught:
        client.infer("double", inputs, outputs=outputs or None, parameters=SLO)
    assert caught.value.status() == f"StatusCode.{code}"
    assert server.do(lambda front_end: front_end.runtime.num_waiting) == 0


def test_parameters_of_regions_are_read_strictly(
    server: FrontEndInThread, client: triton.InferenceServerClient, memory: Memory
) -> None:
    client.register_system_shared_memory("r", memory.key, 4096)
    good = {"shared_memory_region": "r", "shared_memory_byte_size": SIZE}
    Parameter = pb.InferParameter
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({**good, "shared_memory_region": 7}, {}, "expected a name in string_param"),
        ({**good, "shared_memory_region": ""}, {}, "expected a name in string_param"),
        ({**good, "shared_memory_region": "r" * 70_000}, {}, "found 70000 characters"),
        ({**good, "shared_memory_byte_size": "12"}, {}, "found string_param, expected int64"),
        ({"shared_memory_region": "r"}, {}, "found no shared_memory_byte_size"),
        ({"shared_memory_offset": 1}, {}, "shared_memory_offset without shared_memory_region"),
        (good, {"raw_input_contents": [bytes(12)]}, "found 1 entries, expected one for each of"),
        (good, {"contents": [1.0, 2.0, 3.0]}, "found contents as well"),
    ]
    with grpc.insecure_channel(server.address) as channel:
        stub: Any = channel
        infer = stub.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for parameters, others, words in cases:
            message = pb.ModelInferRequest(model_name="double")
            message.parameters["slo_ms"].int64_param = 30_000
            tensor = message.inputs.add(name="x", datatype="FP32", shape=[1, 3])
            for name, value in parameters.items():
                kind = "string_param" if isinstance(value, str) else "int64_param"
                tensor.parameters[name].CopyFrom(Parameter(**{kind: value}))
            tensor.contents.fp32_contents.extend(others.get("contents", ()))
            message.raw_input_contents.extend(others.get("raw_input_contents", ()))
            with pytest.raises(grpc.RpcError, match=words) as caught:
                infer(message.SerializeToString())
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_object_that_shrinks_while_it_is_served_ends_that_request_only(
    server: FrontEndInThread, client: triton.InferenceServerClient, memory: Memory
) -> None:
    client.register_system_shared_memory("r", memory.key, 4096)
    memory.put(ROW)
    os.truncate(memory.path, 4)
    outputs = [shared_output("r", offset=64)]
    for inputs, wanted in (([shared_input("r")], None), ([plain_input()], outputs)):
        with pytest.raises(InferenceServerException, match=r"found 4 bytes in .*, expected"):
            client.infer("double", inputs, outputs=wanted, parameters=SLO)
    os.truncate(memory.path, 4096)
    memory.put(ROW)
    client.infer("double", [shared_input("r")], outputs=outputs, parameters=SLO)
    assert memory.row(64) == [2, 4, 6]


def test_bytes_of_regions_count_at_the_door_and_leave_it(tmp_path: Path) -> None:
    message = pb.ModelInferRequest(model_name="double")
    message.parameters["slo_ms"].int64_param = 30_000
    # More than what a message counts besides its bytes while its parts come.
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[64, 3])
    tensor.parameters["shared_memory_region"].string_param = "r"
    tensor.parameters["shared_memory_byte_size"].int64_param = 64 * SIZE
    request = message.SerializeToString()
    door = AdmissionLimits(max_requests=10, max_bytes=len(request) + 64 * SIZE)
    with (
        serving_in_thread(tmp_path, client_shm=True, door=door) as server,
        triton.InferenceServerClient(server.address) as client,
        grpc.insecure_channel(server.address) as channel,
        Memory() as memory,
    ):
        stub: Any = channel
        infer = stub.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError, match="there is no region 'r'"):
            infer(request)
        client.register_system_shared_memory("r", memory.key, 4096)
        infer(request)
        server.until(lambda _: (door.num_requests, door.num_bytes) == (0, 0))
        door.max_bytes -= 1
        with pytest.raises(grpc.RpcError, match="the front is full"):
            infer(request)
        server.until(lambda _: (door.num_requests, door.num_bytes) == (0, 0))


def test_one_request_takes_no_more_from_regions_than_a_message_may_hold(tmp_path: Path) -> None:
    with (
        serving_in_thread(tmp_path, client_shm=True) as server,
        triton.InferenceServerClient(server.address) as client,
        Memory() as memory,
    ):
        client.register_system_shared_memory("r", memory.key, 4096)
        regions = server.do(lambda front_end: front_end.regions)
        regions.request_bytes_max = SIZE
        client.infer("double", [shared_input("r")], parameters=SLO)
        regions.request_bytes_max = SIZE - 1
        with pytest.raises(InferenceServerException, match="found 12 bytes of inputs in shared"):
            client.infer("double", [shared_input("r")], parameters=SLO)


def test_without_the_flag_regions_are_refused_and_not_announced(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(serving_in_thread(tmp_path))
        client = stack.enter_context(triton.InferenceServerClient(server.address))
        memory = stack.enter_context(Memory())
        assert "system_shared_memory" not in client.get_server_metadata().extensions
        for ask in (
            lambda: client.register_system_shared_memory("r", memory.key, 10),
            lambda: client.unregister_system_shared_memory("r"),
            client.get_system_shared_memory_status,
            lambda: client.infer("double", [shared_input("r")]),
            lambda: client.infer("double", [plain_input()], outputs=[shared_output("r")]),
        ):
            with pytest.raises(InferenceServerException, match="without --allow-client-shm") as no:
                ask()
            assert no.value.status() == "StatusCode.PERMISSION_DENIED"


@pytest.mark.parametrize(
    ("peer", "is_here"),
    [
        ("ipv4:127.0.0.1:5000", True), ("ipv6:[::1]:5000", True), ("unix:", True),
        ("ipv6:[::ffff:127.0.0.1]:5000", True), ("ipv4:10.0.0.1:5000", False),
        ("ipv6:[fe80::1%eth0]:5000", False), ("vsock:2:1", False),
    ],
)  # fmt: skip
def test_only_clients_of_this_machine_may_register(peer: str, is_here: bool) -> None:
    refused = pytest.raises(NotAllowedError, match="Register is for clients on this machine")
    with nullcontext() if is_here else refused:
        check_local(peer, "Register")
    paths = [path for path, method in METHODS.items() if method.local_only]
    assert paths == [
        f"/{INFERENCE}/SystemSharedMemory{what}" for what in ("Status", "Register", "Unregister")
    ]
