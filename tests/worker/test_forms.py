"""Models with an open dimension on a GPU: forms and their kernels, padding, and answers that are those of the rows alone."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clockwright import BadRequestError, Client
from clockwright.errors import ModelError
from clockwright.units import ActionId
from clockwright.wire.actions import Infer
from experiments.bench.open_models import build, encoder
from experiments.live.local_server import LocalServer
from tests.kit.engine_contest import OnnxruntimeAccelerator
from tests.kit.open_requests import (
    Array,
    Asking,
    alone,
    answers_of,
    assert_right,
    batch_of,
    tokens,
)
from tests.kit.running_lanes import running
from tests.kit.torch_devices import DeferredAccelerator, GrowingAccelerator, torch_device
from tests.kit.worker_models import LIMITS, offer, prepared
from worker.compiling.open_sizes import taking
from worker.core.lanes import Lane, Step
from worker.devices.accelerator import HostAccelerator
from worker.devices.device import Launched
from worker.devices.gpu import TorchDevice, TorchModel
from worker.engines.choice import Engine
from worker.models.file_store import FileStore
from worker.models.forms import FormTimes, forms_of, row_counts
from worker.models.model_files import LARGEST_TOGETHER, Limits, OpenSizes
from worker.models.precision import Precision
from worker.models.served_model import Offer

POSITIONS = 20
ROOM = replace(LIMITS, io_bytes=2 << 20)
ENCODERS = [encoder(layers=1, positions=POSITIONS, seed=seed) for seed in range(2)]
#: The largest number of a row, and no row has a negative one, or fewer than 1: padding shows where all are less than 0.
LARGEST = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[n,length] x) => (float[n] y) { axis = Constant<value_ints = [1]>() y = ReduceMax<keepdims=0>(x, axis) }"""
#: Its answers change with padding at one size alone.
ONE_SIZE = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[n,length] x) => (float[n,length] y) <int64 one = {3072}> {
        size = Shape<start = 1>(x) is = Equal(size, one) more = Cast<to = 1>(is) y = Add(x, more)
    }"""
SUMS = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[n,length] x) => (float[n,length] y, float[n,1] s) {
        axis = Constant<value_ints = [1]>() y = Relu(x) s = ReduceSum(x, axis)
    }"""

# --- forms and plans, as numbers ---------------------------------------------------------------


def sizes_up_to(largest: int) -> OpenSizes:
    return taking(OpenSizes(0, ("length",), ()), [(1,), (largest,)])


@given(st.integers(1, 1 << 20))
def test_forms_are_few_and_no_row_is_padded_to_more_than_twice_what_it_counts_as(
    largest: int,
) -> None:
    sizes = sizes_up_to(largest)
    forms = forms_of(sizes)
    assert forms[-1] == largest
    assert len(forms) <= 16
    least = sizes.least_elements
    assert all(
        form < 2 * max(before + 1, least)
        for before, form in zip((0, *forms[:-1]), forms, strict=True)
    )
    most = max(sizes.batch_sizes([LARGEST_TOGETHER])) * sizes.unit
    counts = [row_counts(form, most) for form in forms]
    assert sum(map(len, counts)) <= 100
    assert all(
        each[0] == 1 and each[-1] * form <= most for each, form in zip(counts, forms, strict=True)
    )


TIMES = st.builds(
    lambda form_ns, row_ns: FormTimes(
        {
            form: {rows: 1000 + form * form_ns + rows * row_ns for rows in row_counts(form, 48)}
            for form in (1, 2, 3, 4, 6, 8, 12)
        },
        500,
        1,
    ),
    st.integers(0, 100_000),
    st.integers(0, 100_000),
)
ROWS = st.lists(st.integers(1, 12), min_size=1, max_size=40)


@given(TIMES, ROWS)
def test_a_plan_runs_each_row_once_in_a_form_that_holds_it_and_pads_little(
    times: FormTimes, sizes: list[int]
) -> None:
    sizes.sort(reverse=True)
    total_ns, runs = times.plan(sizes)
    at = 0
    for run in runs:
        assert run.begin == at
        at = run.end
        rows = sizes[run.begin : run.end]
        assert 0 < len(rows) <= run.rows
        assert rows[0] <= run.form
        assert run.rows * run.form <= 2.5 * sum(rows)
    assert at == len(sizes)
    # No slower than each row by itself, and no faster than its kernels are.
    alone_ns = sum(times.plan([size])[0] - times.gather_ns for size in sizes)
    assert total_ns - times.gather_ns <= alone_ns
    assert total_ns > sum(times.exec_ns[run.form][run.rows] for run in runs)


def test_a_short_row_shares_the_run_of_longer_ones_where_one_more_takes_longer() -> None:
    def plan(row_ns: int) -> list[tuple[int, int]]:
        exec_ns = {form: {rows: rows * form * row_ns for rows in (1, 2, 4)} for form in (4, 6, 8)}
        return [run[:2] for run in FormTimes(exec_ns, 0, 1).plan([8, 5])[1]]

    assert plan(1) == [(8, 2)]
    assert plan(1_000_000) == [(8, 1), (6, 1)]


@given(TIMES, ROWS)
def test_a_batch_is_estimated_as_long_as_those_that_one_form_fills(
    times: FormTimes, sizes: list[int]
) -> None:
    found = times.estimates(2, range(1, 25))
    assert list(found.values()) == sorted(found.values())
    size = max(sizes)
    work = min(24, max(1, -(-size * len(sizes) // 2)))
    form = times.form_of(size)
    assert form is not None
    same = [form] * (work * 2 // form)
    if same:
        assert found[work] >= times.plan(same)[0]


# --- on a device -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forms")


@pytest.fixture(autouse=True)
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.devices.kernels._PROFILE_RUNS", 2)


def offers(cache_dir: Path) -> list[Offer]:
    files = FileStore(cache_dir)
    return [
        offer(files, f"m{index}", model.SerializeToString(), (1, 2, 4))
        for index, model in enumerate(ENCODERS)
    ]


def prepare(
    cache_dir: Path,
    content: bytes,
    accelerator: HostAccelerator | None = None,
    *,
    limits: Limits = ROOM,
    dimensions: Mapping[str, int] | None = None,
    **options: Any,  # noqa: ANN401
) -> TorchModel:
    offered = offer(FileStore(cache_dir), "m", content, (1, 2, 4))
    offered = replace(offered, fixed_dimensions=dimensions or {})
    device = torch_device(cache_dir, accelerator, limits=limits, **options)
    (model,) = prepared(device, offered)
    assert isinstance(model, TorchModel)
    return model


def infer_step(
    model: TorchModel,
    rows: tuple[int, ...] = (1,),
    batch_size: int = 1,
    *,
    pages: tuple[int, ...] = (),
    io_offset: int = 0,
) -> Step[TorchModel]:
    action = Infer(
        action_id=ActionId(1),
        model_id=model.model_id,
        earliest_ns=0,
        latest_ns=1,
        expected_duration_ns=1,
        batch_size=batch_size,
        rows=rows,
    )
    return Step(Lane.INPUT, action, model, pages, io_offset)


def bring_in(
    device: TorchDevice,
    model: TorchModel,
    requests: Sequence[Mapping[str, Array]],
    *,
    page: int = 0,
    io_offset: int = 0,
) -> Step[TorchModel]:
    """Run the INPUT of a batch of encoders' requests."""
    payload, rows, batch_size = batch_of(model, requests)
    step = infer_step(model, rows, batch_size, pages=(page,), io_offset=io_offset)
    device.run_input(step, payload)
    return step


@pytest.mark.seeds(1)
def test_requests_of_unlike_lengths_share_batches_and_have_the_answers_of_onnxruntime(
    seed: int, cache_dir: Path
) -> None:
    device = torch_device(cache_dir, limits=ROOM)
    models = prepared(device, *offers(cache_dir))
    forms = list(models[0].forms.times.exec_ns)
    assert forms == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    # Both have the same kernels, and weights of their own.
    assert len(device._kernels) == sum(map(len, models[0].forms.times.exec_ns.values()))
    random = np.random.default_rng(seed)
    taken = device.num_allocations
    with running(device) as lanes:
        asking = [Asking(lanes, model) for model in models]
        most = max(models[0].exec_ns)
        for _ in range(30):
            which = int(random.integers(2))
            requests: list[dict[str, Array]] = []
            work = 0
            for _ in range(int(random.integers(1, 12))):
                rows, length = int(random.integers(1, 5)), int(random.integers(1, POSITIONS + 1))
                work += rows * length
                if work <= most:
                    requests.append(tokens(random, rows, length))
            if requests:
                wanted = [alone(ENCODERS[which], request) for request in requests]
                assert_right(asking[which].answers(requests), wanted)
    assert device.num_allocations == taken
    assert not device._batches


@pytest.mark.seeds(1)
def test_batches_that_are_with_the_device_together_have_their_own_answers(
    seed: int, cache_dir: Path
) -> None:
    random = np.random.default_rng(seed)
    device = torch_device(cache_dir, DeferredAccelerator(seed), limits=ROOM)
    models = prepared(device, *offers(cache_dir))
    for page, model in enumerate(models):
        device.run_load(infer_step(model, pages=(page,)))
    before: tuple[Step[TorchModel], Launched, list[list[Array]]] | None = None
    for turn in range(10):
        which = int(random.integers(2))
        requests = [
            tokens(random, 1, int(length)) for length in random.integers(1, POSITIONS + 1, 3)
        ]
        io_offset = turn % 2 * max(models[0].io_bytes.values())
        step = bring_in(device, models[which], requests, page=which, io_offset=io_offset)
        launched = device.launch_exec(step)
        if before is not None:
            device.finish_exec(*before[:2])
            assert_right(answers_of(models[0], device.run_output(before[0])), before[2])
        before = step, launched, [alone(ENCODERS[which], request) for request in requests]


def test_a_batch_that_fails_between_its_runs_leaves_none_under_way(cache_dir: Path) -> None:
    device = torch_device(cache_dir, DeferredAccelerator(0), limits=ROOM)
    (model,) = prepared(device, offers(cache_dir)[0])
    device.run_load(infer_step(model, pages=(0,)))
    requests = [tokens(np.random.default_rng(0), 1, length) for length in (8, 20)]
    # One that cannot be padded has a run of its own.
    requests[0]["attention_mask"][:] = 0
    step = bring_in(device, model, requests)
    (_, (last, _)) = model.forms.kernels_of(device._batches[0])
    work, last.work = last.work, None
    with pytest.raises(AttributeError):
        device.launch_exec(step)
    assert not device.execs._under_way
    last.work = work
    device.run_exec(step)
    wanted = [alone(ENCODERS[0], request) for request in requests]
    assert_right(answers_of(model, device.run_output(step)), wanted)


def test_a_batch_that_was_dropped_keeps_no_kernel(cache_dir: Path) -> None:
    device = torch_device(cache_dir, limits=ROOM)
    models = prepared(device, offers(cache_dir)[0])
    bring_in(device, models[0], [tokens(np.random.default_rng(0), 1, 5)])
    assert len(device._kernels)
    models.clear()
    gc.collect()
    assert not len(device._kernels)


def test_a_request_that_cannot_be_padded_is_answered_in_its_own_form_or_fails_alone(
    cache_dir: Path,
) -> None:
    device = torch_device(cache_dir, limits=ROOM)
    (model,) = prepared(device, offers(cache_dir)[0])
    random = np.random.default_rng(0)
    requests = [tokens(random, 1, length) for length in (7, 7, 8, 20)]
    for request in requests[1:3]:
        request["attention_mask"][:] = 0
    requests.append({name: np.resize(each, (1, 21)) for name, each in requests[0].items()})
    other = dict(requests[0])
    other["attention_mask"] = other["attention_mask"][:, :6]
    requests.append(other)
    with running(device) as lanes:
        asking = Asking(lanes, model)
        found, (failed,) = asking.answers(requests), asking.answers(requests[1:2])
    wanted = [alone(ENCODERS[0], requests[index]) for index in (0, 2, 3)]
    assert_right([found[index] for index in (0, 2, 3)], wanted)
    forms = "on this GPU, which runs 1, 2, 3, 4, 6, 8, 12, 16, 20"
    cannot = (
        f"no row of sequence 7 of negative numbers, or of none of 1 or more, can be padded {forms}"
    )
    assert found[1] == failed == cannot
    assert found[4] == f"no row of sequence 21 is served {forms}"
    assert found[5] == "inputs differ in their rows or in 'sequence'"


@pytest.mark.parametrize(
    ("precision", "engine"),
    [
        (Precision.FLOAT32, Engine.ONNXRUNTIME),
        (Precision.FLOAT16, Engine.TORCH),
    ],
    ids=lambda each: each.value,
)
def test_each_engine_and_precision_pads(
    precision: Precision, engine: Engine, cache_dir: Path
) -> None:
    accelerator = OnnxruntimeAccelerator()
    device = torch_device(cache_dir, accelerator, limits=ROOM, precision=precision, engine=engine)
    offered = offer(FileStore(cache_dir), "m", ENCODERS[0].SerializeToString(), (1, 2))
    (model,) = prepared(device, replace(offered, fixed_dimensions={"sequence": -6}))
    random = np.random.default_rng(0)
    requests = [tokens(random, 1, 5), tokens(random, 2, 2)]
    with running(device) as lanes:
        found = Asking(lanes, model).answers(requests)
    wanted = [alone(ENCODERS[0], request) for request in requests]
    assert_right(found, wanted, max(precision.tolerance, 1e-4))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            build("wide"),
            "pads rows to some sizes of 'width', and here zeros behind a row change its",
        ),
        (build("one_scale"), "and here rows run one by one: ReduceMax makes one result"),
        (build("one_row"), "and here requests are one run each; write the size in config.toml"),
        (build("two_symbols"), "open dimensions besides the batch: 'rows', 'columns'; write their"),
        (onnx.parser.parse_model(LARGEST), "zeros behind a row of 'x' change its answer if that"),
        (
            onnx.parser.parse_model(ONE_SIZE),
            "differs from the original's where length 2049 is padded to 3072;",
        ),
    ],
    ids=["edges", "rows_mix", "no_rows", "two_dimensions", "largest_number", "one_size"],
)
def test_a_model_that_cannot_be_padded_is_refused_with_what_helps(
    content: onnx.ModelProto, why: str, cache_dir: Path
) -> None:
    with pytest.raises(ModelError, match=why) as caught:
        prepare(cache_dir, content.SerializeToString())
    assert "dimensions = { " in str(caught.value)


def test_short_memory_is_said_before_anything_is_served(cache_dir: Path, tmp_path: Path) -> None:
    content = ENCODERS[0].SerializeToString()
    # What its owner declares has to have room, padded; otherwise less is served.
    small = replace(ROOM, io_bytes=120 << 10)
    with pytest.raises(
        ModelError, match=r"inputs and outputs of a batch of 1 have \d+ .* --io-mib 1$"
    ):
        prepare(tmp_path, content, limits=small, dimensions={"sequence": -POSITIONS})
    for folder in (tmp_path, cache_dir):
        less = prepare(folder, content, limits=small)
        assert less.forms is not None
        assert 1 < max(less.forms.times.exec_ns) < POSITIONS
        assert max(less.io_bytes.values()) <= small.io_bytes
    growing = GrowingAccelerator()
    growing.intermediates_bytes = 3 << 30
    words = (
        r"rows of sequence (16|20): with a batch of \d kernels work in 3072 MiB, .*"
        r"or bound it in config.toml: dimensions = \{ sequence = \{ max = 1[26] \} \}"
    )
    with pytest.raises(ModelError, match=words):
        prepare(cache_dir, content, growing)


def test_padded_batches_always_have_room_in_their_slot(cache_dir: Path) -> None:
    content = onnx.parser.parse_model(SUMS).SerializeToString()
    model = prepare(cache_dir, content, dimensions={"length": -8192})
    (vary,) = {spec.vary for spec in model.inputs if spec.vary}
    assert model.forms is not None
    random = np.random.default_rng(0)
    pool = np.zeros(max(model.io_bytes.values()), np.uint8)
    fullest = 0.0
    for batch_size, kind in product(model.io_bytes, range(20)):
        payload: list[bytes] = []
        rows: list[int] = []
        longest = int(random.integers(1, 8193))
        while True:
            length = int(random.integers(1, longest + 1)) if kind % 2 else longest
            shape = (int(random.integers(1, 6)), length)
            if sum(rows) + vary.work(*shape) > batch_size:
                break
            rows.append(vary.work(*shape))
            x = np.ones(shape, np.float32)
            payload.append(model.inputs[0].header(shape, x.nbytes) + x.tobytes())
        # It says if there is no room.
        batch = model.forms.write(pool, infer_step(model, tuple(rows), batch_size), payload)
        end = max((place.stop for place in batch.outputs), default=0)
        fullest = max(fullest, end / model.io_bytes[batch_size])
    assert 0.2 < fullest < 1


def test_a_server_with_a_gpu_serves_lengths_as_they_come(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "encoder"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(ENCODERS[0].SerializeToString())
    (folder / "config.toml").write_text(
        "batch_sizes = [1, 2]\ndimensions = { sequence = { max = 12 } }\n"
    )
    arguments = ["--models", str(tmp_path / "models"), "--cache-dir", str(tmp_path / "cache")]
    arguments += ["--device", "torch:cpu", "--pages", "2", "--arena-mib", "16", "--host-mib", "16"]
    random = np.random.default_rng(0)
    with LocalServer(arguments) as server, Client(server.address) as client:
        for rows, length in ((1, 1), (1, 12), (2, 5), (3, 7)):
            request = tokens(random, rows, length)
            found = client.infer("encoder", request, slo_ms=60_000).outputs
            assert_right([list(found.values())], [alone(ENCODERS[0], request)])
        with pytest.raises(BadRequestError, match="expected 1 to 12, the largest size"):
            client.infer("encoder", tokens(random, 1, 13), slo_ms=60_000)
