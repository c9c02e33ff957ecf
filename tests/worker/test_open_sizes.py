"""Models with open dimensions: what they take, which requests run together, and that each has its own answer."""

from __future__ import annotations

import resource
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clockwright.elements import Array
from clockwright.errors import ModelError, RefusedError
from clockwright.wire.tensors import TensorSpec, Variable
from experiments.bench.open_models import build, encoder
from worker.compiling.cache import CompileCache
from worker.compiling.compile import compile_model, profile_model, read_weights
from worker.compiling.open_sizes import SizeSearch, at_sizes, symbols_of
from worker.devices.host_io import read_outputs, write_inputs
from worker.devices.sized_io import run_carrying
from worker.engines import open_kernel
from worker.engines.onnxruntime import open_session, release_memory
from worker.engines.open_kernel import Answer, OpenKernel
from worker.models.groups import group_requests
from worker.models.model_files import (
    GRAPH_FILE,
    MODEL_FILE,
    CompiledModel,
    Limits,
    ModelSource,
    OpenSizes,
)
from worker.models.served_model import IoLayout

LIMITS = Limits(arena_bytes=64 << 20, num_pages=8, io_bytes=32 << 20)
NO_LIMIT = 1 << 62


def prepare(
    model: onnx.ModelProto,
    folder: Path,
    dimensions: Mapping[str, int] | None = None,
    batch_sizes: tuple[int, ...] = (1, 2),
) -> CompiledModel:
    (folder / "model").mkdir(parents=True)
    (folder / "out").mkdir()
    (folder / "model" / MODEL_FILE).write_bytes(model.SerializeToString())
    source = ModelSource(folder / "model", dimensions or {}, batch_sizes)
    return compile_model(source, folder / "out", LIMITS, lambda _: None)


def kernel_of(folder: Path, compiled: CompiledModel) -> OpenKernel:
    session = open_session(str(folder / "out" / GRAPH_FILE))
    weights = read_weights(folder / "out", compiled)
    kernel = OpenKernel(session, compiled, weights)
    kernel.keep = weights  # type: ignore[attr-defined]
    return kernel


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenKernel]:
    found = {}
    for name in ("encoder", "wide", "one_scale", "table", "halves"):
        folder = tmp_path_factory.mktemp(name)
        model = encoder(layers=1) if name == "encoder" else build(name)
        found[name] = kernel_of(folder, prepare(model, folder))
    return found


def test_a_model_with_open_dimensions_is_found_again_in_the_cache(tmp_path: Path) -> None:
    compiled = prepare(build("wide"), tmp_path)
    cache = CompileCache(tmp_path / "cache", target="here")
    cache.publish(tmp_path / "out", "key")
    found = CompileCache(tmp_path / "cache", target="here").find("key")
    assert found is not None
    assert found[1] == compiled


def requests_of(
    kernel: OpenKernel, sizes: Sequence[tuple[int, int]], seed: int
) -> list[list[Array]]:
    random = np.random.default_rng(seed)
    requests = []
    for rows, length in sizes:
        request: list[Array] = []
        for tensor in kernel.compiled.inputs:
            shape = [length if size < 0 else size for size in tensor.spec.shape(rows)]
            if tensor.spec.datatype == "INT64":
                request.append(random.integers(0, 2, shape).view(np.uint64))
            else:
                request.append(random.standard_normal(shape).astype(np.float32).view(np.uint32))
        requests.append(request)
    return requests


def assert_same(one: Answer, other: Answer, outputs: Sequence[Any]) -> None:
    assert not isinstance(one, str)
    assert not isinstance(other, str)
    for a, b in zip(one, other, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a.view(np.float32), b.view(np.float32), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["encoder", "wide", "one_scale", "table", "halves"])
@pytest.mark.parametrize("run_elements", [0, 20, NO_LIMIT])
def test_answers_together_are_those_alone(
    name: str, run_elements: int, kernels: dict[str, OpenKernel]
) -> None:
    kernel = kernels[name]
    kernel.run_elements = run_elements
    random = np.random.default_rng(run_elements % 7)
    for trial in range(5):
        sizes = [(int(r), int(n)) for r, n in random.integers(1, [4, 48], (9, 2))]
        requests = requests_of(kernel, sizes, trial)
        together = kernel.run(requests, NO_LIMIT if trial else 1)
        for request, answer in zip(requests, together, strict=True):
            (alone,) = kernel.run([request], NO_LIMIT)
            assert_same(alone, answer, kernel.compiled.outputs)


def test_a_mask_of_zeros_is_not_padded(kernels: dict[str, OpenKernel]) -> None:
    kernel = kernels["encoder"]
    kernel.run_elements = NO_LIMIT
    assert kernel.compiled.open is not None
    assert kernel.compiled.open.guarded == (False, True)
    requests = requests_of(kernel, [(1, 8), (1, 40)], 0)
    requests[0][1] = np.zeros_like(requests[0][1])
    (alone,) = kernel.run(requests[:1], NO_LIMIT)
    assert_same(alone, kernel.run(requests, NO_LIMIT)[0], kernel.compiled.outputs)


def test_rows_that_influence_each_other_are_found_though_a_batch_is_one_row(
    tmp_path: Path,
) -> None:
    # It is one row of the largest, and so many smaller ones.
    kernel = kernel_of(tmp_path, prepare(build("one_scale"), tmp_path, batch_sizes=(1,)))
    requests = requests_of(kernel, [(1, 8), (1, 8)], 0)
    together = kernel.run(requests, NO_LIMIT)
    for request, answer in zip(requests, together, strict=True):
        assert_same(kernel.run([request], NO_LIMIT)[0], answer, kernel.compiled.outputs)


def test_padding_is_proven_not_assumed(kernels: dict[str, OpenKernel]) -> None:
    pads = {name: k.compiled.open.pads for name, k in kernels.items() if k.compiled.open}
    assert pads == {
        "encoder": True,
        "wide": False,
        "one_scale": False,
        "table": True,
        "halves": False,
    }


def test_padding_is_tried_under_a_bound_that_is_smaller_than_what_is_usually_tried(
    tmp_path: Path,
) -> None:
    compiled = prepare(encoder(layers=1), tmp_path, {"sequence": -12})
    assert compiled.open is not None
    assert compiled.open.pads


#: Models of whose answers padding changes some only: of quiet rows, negative ones, very large or very short ones.
NEARLY = {
    "most": "g (float[n,length,3] x) => (float[n,3] y) { y = ReduceMax<axes=[1],keepdims=0>(x) }",
    "one_most": "g (float[n,length] x) => (float[n] y) { y = ReduceMax<axes=[1],keepdims=0>(x) }",
    "least": "g (float[n,length] x) => (float[n] y) { y = ReduceMin<axes=[1],keepdims=0>(x) }",
    "place": "g (float[n,length] x) => (int64[n] y) { y = ArgMax<axis=1,keepdims=0>(x) }",
    "three": """g (float[n,length] x) => (float[n,3] y) {
        k = Constant<value_ints=[3]>()
        y, place = TopK<axis=1>(x, k)
    }""",
    "loud": """g (float[n,length] x) => (float[n,1] y) {
        bound = Constant<value_float=50.0>()
        axes = Constant<value_ints=[1]>()
        most = ReduceMax<axes=[1]>(x)
        is_loud = Greater(most, bound)
        mean = ReduceMean<axes=[1]>(x)
        sum = ReduceSum(x, axes)
        y = Where(is_loud, mean, sum)
    }""",
}


@pytest.mark.parametrize("name", NEARLY)
@pytest.mark.parametrize("factor", [-1.0, 1.0, 1e-3, 100.0])
def test_answers_do_not_depend_on_company_whatever_rows_contain(
    name: str, factor: float, tmp_path: Path
) -> None:
    model = onnx.parser.parse_model('<ir_version: 8, opset_import: ["" : 17]>' + NEARLY[name])
    kernel = kernel_of(tmp_path, prepare(model, tmp_path))
    kernel.run_elements = NO_LIMIT
    assert kernel.compiled.open is not None
    # One number per row that zeros cannot beat is all that these two need.
    assert kernel.compiled.open.pads == (name in ("one_most", "place"))
    requests = requests_of(kernel, [(1, length) for length in (3, 5, 2, 30)], 0)
    for request in requests:
        request[0] = (abs(request[0].view(np.float32)) * np.float32(factor)).view(np.uint32)
    for request, answer in zip(requests, kernel.run(requests, NO_LIMIT), strict=True):
        (alone,) = kernel.run([request], NO_LIMIT)
        assert isinstance(alone, str) == isinstance(answer, str)
        if not isinstance(alone, str):
            np.testing.assert_array_equal(answer, alone)


def test_one_that_fails_leaves_the_others(kernels: dict[str, OpenKernel]) -> None:
    kernel = kernels["table"]
    requests = requests_of(kernel, [(1, 5)] * 4, 0)
    requests[2][0] = requests[2][0] + np.uint64(50)
    answers = kernel.run(requests, NO_LIMIT)
    assert [isinstance(answer, str) for answer in answers] == [False, False, True, False]
    assert "out of data bounds" in str(answers[2])


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 400),
    st.sampled_from([0, 5, 50, NO_LIMIT]),
)
def test_groups_hold_each_request_once_and_pad_no_more_than_allowed(
    requests: list[tuple[int, int, int, bool]], spare: int, run_elements: int
) -> None:
    rows = [each[0] for each in requests]
    sizes = [each[1:3] for each in requests]
    pads = [each[3] for each in requests]
    needed = sum(number * prod(size) for number, size in zip(rows, sizes, strict=True))
    groups = group_requests(
        rows, sizes, pads, elements_max=needed + spare, run_elements=run_elements
    )
    assert sorted(index for group in groups for index in group.requests) == [*range(len(rows))]
    assert sum(group.elements for group in groups) <= needed + spare
    for group in groups:
        assert group.rows == sum(rows[index] for index in group.requests)
        for index in group.requests:
            if not pads[index]:
                assert sizes[index] == group.sizes
            assert all(a <= b for a, b in zip(sizes[index], group.sizes, strict=True))
    if not run_elements:
        assert all(sizes[index] == g.sizes for g in groups for index in g.requests)


def test_batches_lie_in_a_slot_and_come_back(kernels: dict[str, OpenKernel]) -> None:
    kernel = kernels["encoder"]
    compiled = kernel.compiled
    inputs = [tensor.spec for tensor in compiled.inputs]
    outputs = [tensor.spec for tensor in compiled.outputs]
    vary = inputs[0].vary
    assert vary is not None
    sizes = [(1, 5), (3, 2), (2, 40)]
    work = [vary.work(rows, length) for rows, length in sizes]
    requests = requests_of(kernel, sizes, 3)
    payload = [
        spec.header(array.shape, array.nbytes) + array.tobytes()
        for request in requests
        for spec, array in zip(inputs, request, strict=True)
    ]
    size = sum(work) + 3
    model = SimpleNamespace(
        inputs=inputs, outputs=outputs, layouts={size: IoLayout.of(inputs, outputs, size)}
    )
    action = SimpleNamespace(batch_size=size, rows=tuple(work))
    step: Any = SimpleNamespace(action=action, model=model, io_offset=64)
    pool = np.full(model.layouts[size].num_bytes + 128, 7, np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("worker.devices.host_io.Infer", SimpleNamespace)
        patch.setattr("worker.devices.host_io.ServedModel", SimpleNamespace)
        write_inputs(pool, step, payload)
        answers = kernel.run(requests, NO_LIMIT)
        too_large = [np.zeros((1, 500, 32), np.uint32), np.zeros((1, 3), np.uint32)]

        def run(read: list[list[Array]]) -> list[Answer]:
            for request, found in zip(requests, read, strict=True):
                for array, same in zip(request, found, strict=True):
                    assert np.array_equal(array, same.view(array.dtype))
            return [answers[0], "it broke", too_large]

        offsets = model.layouts[size]
        places = [
            [(spec, 64 + offset) for spec, offset in zip(specs, at, strict=True)]
            for specs, at in ((inputs, offsets.input_offsets), (outputs, offsets.output_offsets))
        ]
        run_carrying(pool, places[0], places[1], work, run)
        found_outputs = read_outputs(pool, step, None)
    assert pool[:64].tolist() == [7] * 64
    assert pool[-64:].tolist() == [7] * 64
    assert not isinstance(answers[0], str)
    for spec, raw, array in zip(outputs, found_outputs, answers[0], strict=False):
        sized, content = spec.unpack(raw)
        assert sized.row_shape == array.shape
        assert bytes(content) == array.tobytes()
    for spec, raw in zip(outputs, found_outputs[2:4], strict=True):
        with pytest.raises(RefusedError, match="it broke"):
            spec.unpack(raw)
    with pytest.raises(RefusedError, match=r"has 64000 bytes .* at most, as seen when"):
        outputs[0].unpack(found_outputs[4])


def test_steps_too_few_for_a_gru_fail_alone(tmp_path: Path) -> None:
    kernel = kernel_of(tmp_path, prepare(build("changes"), tmp_path))
    assert kernel.compiled.open is not None
    assert min(kernel.compiled.open.taken) == (2,)
    few, enough = (np.ones((1, 2, time), np.uint32) for time in (1, 9))
    failed, answer = kernel.run([[few], [enough]], NO_LIMIT)
    assert isinstance(failed, str)
    assert not isinstance(answer, str)


# --- sizes ----------------------------------------------------------------------------------------


def search(takes: Any, symbols: tuple[str, ...] = ("s",), **bounds: int) -> SizeSearch:  # noqa: ANN401
    spec = TensorSpec("x", "FP32", (1,))

    def run(sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        if not takes(**sizes):
            raise ModelError(f"cannot do {dict(sizes)}")
        return [(1, *sizes.values())]

    return SizeSearch(run, symbols, bounds, 1 << 30, [spec], ["FP32"])


@pytest.mark.parametrize("most", [1, 7, 48, 77, 512, 514])
def test_the_largest_size_is_found(most: int) -> None:
    found = search(lambda s: s <= most)
    found.find()
    assert max(found.taken) == (most,)


def test_sizes_are_found_one_by_one_where_they_differ() -> None:
    found = search(lambda a, b: a <= 100 and b <= 300, ("a", "b"))
    found.find()
    sizes = found.open_sizes()
    assert sizes.taken[-1] == (100, 100)
    assert {(16, 300), (100, 16), (1, 100), (1, 1)} <= set(sizes.taken)


def test_multiples_are_found_where_a_model_takes_no_others() -> None:
    found = search(lambda s: s % 32 == 0, s=320)
    assert found.find() == (32,)
    assert found.open_sizes().taken[-1] == (320,)


def test_a_model_that_takes_one_size_is_told_to_have_it_declared() -> None:
    with pytest.raises(
        ModelError, match=r"fails at all sizes .* 's'.*cannot do.*dimensions = { s = SIZE }"
    ):
        search(lambda s: s == 81).find()


def test_a_size_that_is_a_sum_follows_from_the_others() -> None:
    past, total = (
        TensorSpec(name, "FP32", (-1,), vary=Variable(0, (symbol,)))
        for name, symbol in (("past", "p"), ("mask", "p + s + 1"))
    )
    own = TensorSpec("x", "FP32", (-1,), vary=Variable(0, ("s",)))
    specs = (past, total, own)
    assert symbols_of(specs) == ("p", "s")
    assert at_sizes(total, {"p": 3, "s": 4}).row_shape == (8,)
    assert symbols_of((total,)) == ("p + s + 1",), "one that says nothing of the others is a name"

    def run(sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        if not sizes["s"]:
            raise ModelError("no step")
        return [(1, sizes["p"] + sizes["s"])]

    found = SizeSearch(run, ("p", "s"), {"p": 64, "s": 64}, 1 << 30, specs, ["FP32"])
    found.find()
    sizes = found.open_sizes()
    assert sizes.empty == ("p",)
    assert sizes.taken[-1] == (64, 64)
    assert all(min(each) for each in sizes.taken)
    # A step after a long past is less than as many steps after none.
    assert sizes.elements((63, 1)) == 65
    assert sizes.elements((0, 63)) == 63 * 64


def test_a_declared_size_that_fails_is_named() -> None:
    with pytest.raises(
        ModelError, match="'s' goes up to 90, but 60 is the largest size that works"
    ):
        search(lambda s: s <= 60, s=90).find()


def test_work_of_batches_is_a_few_sizes() -> None:
    sizes = OpenSizes(4, ("s",), ((1,), (128,)))
    assert sizes.batch_sizes((1,)) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    assert sizes.batch_sizes((1, 2, 4, 8))[-1] == 128


def test_profiles_are_by_work(tmp_path: Path) -> None:
    compiled = prepare(build("same_symbol"), tmp_path, {"length": -64})
    assert compiled.open is not None
    sizes = compiled.open.batch_sizes((1,))
    durations = profile_model(tmp_path / "out", sizes, lambda _: None)
    assert durations.keys() == {0, *sizes}
    ascending = [durations[size] for size in sizes]
    assert ascending == sorted(ascending)
    assert CompiledModel.from_json((tmp_path / "out" / "model.json").read_text()) == compiled


def test_an_answer_without_its_dimensions_of_size_1_comes_back_as_it_was() -> None:
    vary = Variable(64, ("n", "s"), (8, 8), 8, may_lack=True)
    spec = TensorSpec("y", "FP32", (-1, -1), None, vary)
    for shape in ((), (3,), (2, 3), (0,)):
        raw = spec.header(shape, 4 * prod(shape)) + bytes(4 * prod(shape))
        assert spec.unpack(raw)[0].row_shape == shape
    strict = replace(spec, vary=replace(vary, may_lack=False))
    with pytest.raises(ValueError, match="found shape"):
        strict.unpack(strict.header((3,), 12) + bytes(12))


@pytest.mark.parametrize("length", [40 << 20, (40 << 20) + 1], ids=["answered", "failed"])
def test_the_memory_of_a_large_answer_is_given_back(length: int, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (int64 n) => (int64[k,2] y)
        <int64 zero = {0}, int64 one = {1}, int64[2] pairs = {-1, 2}> {
        all = Range(zero, n, one) y = Reshape(all, pairs) }"""
    )
    kernel = kernel_of(tmp_path, prepare(model, tmp_path))

    def held_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    release_memory()
    before = held_bytes()
    [answer] = kernel.run([[np.array(length, np.int64)]], NO_LIMIT)
    assert isinstance(answer, str) == bool(length % 2)
    assert isinstance(answer, str) or answer[0].nbytes == 320 << 20
    del answer
    assert held_bytes() - before < 64 << 20


def test_an_answer_that_cannot_be_copied_is_gone_when_memory_is_given_back(
    kernels: dict[str, OpenKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernels["wide"]
    values: list[weakref.ref[object]] = []
    alive: list[bool] = []

    def fails(_spec: TensorSpec, value: object) -> None:
        values.append(weakref.ref(value))
        raise MemoryError

    monkeypatch.setattr(open_kernel, "_copied", fails)
    monkeypatch.setattr(
        open_kernel, "release_memory", lambda: alive.append(values[-1]() is not None)
    )
    answers = kernel.run(requests_of(kernel, [(1, 4)], 0), NO_LIMIT)
    assert isinstance(answers[0], str)
    assert alive
    assert not any(alive)
