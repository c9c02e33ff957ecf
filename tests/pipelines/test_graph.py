"""Pipelines on paper: declarations, graphs that fit or not, times, progress. No server."""

from __future__ import annotations

import struct
import tomllib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clockwright.errors import BadRequestError, ModelError
from clockwright.wire.tensors import TensorSpec, Variable
from clockwright.wire.texts import cut_texts, join_texts
from controller.stages.pipelines.core.backlog import Backlog
from controller.stages.pipelines.core.declaration import (
    PipelineSpec,
    TensorSource,
    behind,
    parse_pipeline,
)
from controller.stages.pipelines.core.graph import PipelineGraph, fit
from controller.stages.pipelines.core.run import PipelineRun, StageTime, ends_ns, kept_ns, plan
from tests.kit.examples import examples


@dataclass
class Model:
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    version: str = "1"


def spec(name: str, *shape: int, datatype: str = "FP32", axis: int | None = 0) -> TensorSpec:
    return TensorSpec(name, datatype, shape, axis)


def text(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "BYTES", shape, vary=Variable(1000 + 8 * (2 + len(shape)), ()))


#: What the stages of the examples are.
MODELS = {
    "scale": Model((spec("x", 3),), (spec("y", 3),)),
    "score": Model((spec("x", 3),), (spec("score"), spec("label", datatype="INT64"))),
    "sum": Model((spec("a", 3), spec("b", 3)), (spec("y", 3),)),
    "wide": Model((spec("x", 4),), (spec("y", 4),)),
}

CASCADE = """
inputs = ["image"]
outputs = { score = "detect.score", label = "classify.label" }
[[stages]]
name = "classify"
model = "score"
inputs = { x = "clean.y" }
[[stages]]
name = "clean"
model = "scale"
inputs = { x = "image" }
[[stages]]
name = "detect"
model = "score"
inputs = { x = "image" }
end_if = "score < 0.5"
"""

DIAMOND = """
inputs = ["x"]
outputs = { y = "join.y" }
[[stages]]
name = "a"
model = "scale"
inputs = { x = "x" }
[[stages]]
name = "left"
model = "scale"
inputs = { x = "a.y" }
[[stages]]
name = "right"
model = "scale"
inputs = { x = "a.y" }
[[stages]]
name = "join"
model = "sum"
inputs = { a = "left.y", b = "right.y" }
"""


def declared(text: str) -> PipelineSpec:
    return parse_pipeline(tomllib.loads(text))


def fitted(text: str, models: Mapping[str, Model] = MODELS) -> PipelineGraph:
    pipeline = declared(text)
    return fit(pipeline, [models[stage.model] for stage in pipeline.stages])


def chain(*stages: str, **further: Any) -> str:  # noqa: ANN401
    """The declaration of stages behind each other, each `model` or `name:model`."""
    lines = ['inputs = ["x"]', f'outputs = {{ y = "{stages[-1].partition(":")[0]}.y" }}']
    before = "x"
    for each in stages:
        name, _, model = each.partition(":")
        lines += ["[[stages]]", f'name = "{name}"', f'model = "{model or name}"']
        lines += [f'inputs = {{ x = "{before}" }}', *further.get(name, ())]
        before = f"{name}.y"
    return "\n".join(lines)


# --- declarations ---------------------------------------------------------------------------------


def test_stages_stand_behind_those_whose_outputs_they_take() -> None:
    found = declared(CASCADE)
    assert [stage.name for stage in found.stages] == ["detect", "clean", "classify"]
    assert found.stages[2].inputs == {"x": TensorSource(1, "y")}
    assert found.outputs == {"score": TensorSource(0, "score"), "label": TensorSource(2, "label")}
    assert str(found.stages[0].end_if) == "score < 0.5"


def test_a_stage_is_called_like_its_model_unless_it_has_a_name() -> None:
    found = declared(chain("scale").replace('name = "scale"\n', ""))
    assert [stage.name for stage in found.stages] == ["scale"]


def test_all_that_is_wrong_with_a_declaration_is_said_at_once() -> None:
    with pytest.raises(ModelError) as caught:
        declared(
            """
            inputs = ["image", "unused"]
            outputs = { label = "classify.label", same = "image" }
            extra = 1
            [[stages]]
            model = "detect.v2"
            inputs = { x = "image" }
            [[stages]]
            name = "classify"
            model = "score"
            inputs = { x = "detekt.y" }
            end_if = "score is small"
            """
        )
    for words in (
        "pipeline: unknown key 'extra'; known are inputs, outputs, stages",
        "'detect.v2', whose name has other characters than a stage's; add a `name`",
        "stage 'classify': inputs.x is 'detekt.y', expected one of image, unused,",
        "end_if is 'score is small', expected one output of the stage, a comparison",
        "pipeline.outputs.same is 'image', expected \"STAGE.OUTPUT\", not an input",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (('x = "image" }', 'x = "classify.score" }'), "a circle of stages: "),
        (('score = "detect.score", ', ""), ""),
        (('end_if = "score < 0.5"', ""), ""),
        (('inputs = ["image"]', 'inputs = ["image", "mask"]'), "no stage takes 'mask'"),
        (('name = "detect"', 'name = "clean"'), "found 'clean' twice"),
        (('end_if = "score < 0.5"', 'end_if = "score < x"'), "and a number"),
    ],
)
def test_a_declaration_is_judged_without_its_models(changed: tuple[str, str], words: str) -> None:
    text = CASCADE.replace(*changed)
    if not words:
        declared(text)
        return
    with pytest.raises(ModelError, match=words):
        declared(text)


def test_a_circle_is_named_by_its_stages() -> None:
    with pytest.raises(ModelError) as caught:
        declared(DIAMOND.replace('x = "x" }', 'x = "join.y" }').replace('["x"]', '["z"]'))
    assert "a takes from join takes from left takes from a" in str(caught.value)


def test_a_stage_that_nothing_takes_from_is_refused() -> None:
    text = DIAMOND.replace('b = "right.y"', 'b = "left.y"')
    with pytest.raises(ModelError, match="stage 'right': nothing takes its outputs; leave it out"):
        declared(text)


def test_a_stage_that_may_end_the_pipeline_holds_up_all_that_it_does_not_need() -> None:
    text = CASCADE.replace(
        'inputs = { x = "clean.y" }', 'inputs = { x = "clean.y" }\nend_if = "label == 3"'
    )
    stages = declared(text).stages
    assert [stage.name for stage in stages] == ["clean", "classify", "detect"]
    assert behind(stages) == [set(), {0}, {1}]
    assert behind(declared(CASCADE).stages) == [set(), {0}, {0, 1}]


# --- fitting --------------------------------------------------------------------------------------


def test_a_pipeline_takes_what_its_first_stages_take_and_gives_what_is_named() -> None:
    graph = fitted(CASCADE)
    assert graph.inputs == (spec("image", 3),)
    assert graph.outputs == (spec("score"), spec("label", datatype="INT64"))
    assert not graph.one_row


def test_all_that_does_not_fit_is_said_at_once() -> None:
    text = CASCADE.replace('x = "clean.y"', 'x = "clean.z", w = "image"').replace(
        "score < 0.5", "chance < 0.5"
    )
    with pytest.raises(ModelError) as caught:
        fitted(text)
    assert (
        "stage 'classify': inputs has 'w', expected the inputs of model score: x FP32 [3]"
        in str(caught.value)
    )
    with pytest.raises(ModelError) as caught:
        fitted(text.replace(', w = "image"', ""))
    assert "found 'clean.z', expected an output of model scale: y FP32 [3]" in str(caught.value)
    assert "end_if looks at 'chance', expected an output of model score" in str(caught.value)


def test_a_shape_that_does_not_fit_is_refused_with_both_shapes() -> None:
    with pytest.raises(ModelError) as caught:
        fitted(chain("scale", "wide"))
    assert (
        "stage 'wide': input 'x' takes FP32 [-1, 4], and scale.y is FP32 [-1, 3]; put a stage between them"
        in str(caught.value)
    )


def test_an_input_of_a_model_that_gets_nothing_is_named() -> None:
    text = DIAMOND.replace('a = "left.y", ', "").replace(
        'outputs = { y = "join.y" }', 'outputs = { y = "join.y", z = "left.y" }'
    )
    with pytest.raises(
        ModelError, match=r"'join': inputs lacks a FP32 \[3\] of model sum; add a line"
    ):
        fitted(text)


def test_shapes_that_are_equal_as_a_whole_fit_with_one_row() -> None:
    fixed = Model((spec("x", 1, 3, axis=None),), (spec("y", 1, 3, axis=None),))
    graph = fitted(chain("scale", "fixed"), {**MODELS, "fixed": fixed})
    assert graph.one_row
    assert graph.outputs[0].shape(1) == (1, 3)


def test_a_version_that_is_not_served_is_refused() -> None:
    text = chain("scale", scale=["version = 2"])
    with pytest.raises(ModelError, match="found version 1 of model scale, expected 2"):
        fitted(text)


def test_text_in_and_numbers_out_carry_their_sizes_to_clients_only() -> None:
    tokens = Model((text("t"),), (TensorSpec("ids", "INT64", (2,), vary=Variable(40)),))
    ids = Model((spec("x", 2, datatype="INT64"),), (spec("y", 3),))
    graph = fitted(
        """
        inputs = ["text"]
        outputs = { y = "ids.y" }
        [[stages]]
        model = "tokens"
        inputs = { t = "text" }
        [[stages]]
        model = "ids"
        inputs = { x = "tokens.ids" }
        """,
        {"tokens": tokens, "ids": ids},
    )
    assert graph.inputs[0].vary
    assert graph.outputs[0].vary
    content = join_texts([b"ab"])
    run = PipelineRun(graph, [graph.inputs[0].header((1,), len(content)) + content], 1)
    assert run.next() == [0]
    carried = tokens.outputs[0].header((1, 2), 16) + struct.pack("<2q", 5, 6)
    run.answered(0, [carried])
    assert run.next() == [1]
    assert bytes(run.inputs(1)[0]) == struct.pack("<2q", 5, 6)
    run.answered(1, [struct.pack("<3f", 1, 2, 3)])
    sized, found = graph.outputs[0].unpack(run.results()[0])
    assert (sized.row_shape, bytes(found)) == ((1, 3), struct.pack("<3f", 1, 2, 3))


def test_text_that_is_too_long_for_the_next_stage_is_an_error_of_the_request() -> None:
    long = TensorSpec("y", "BYTES", (), vary=Variable(5000))
    texts = Model((text("x"),), (long,))
    graph = fitted(
        chain("texts", "short:shorts"),
        {"texts": texts, "shorts": Model((text("x"),), (text("y"),))},
    )
    run = PipelineRun(graph, [b""], 1)
    run.next()
    content = join_texts([b"a" * 3000])
    run.answered(0, [long.header((1,), len(content)) + content])
    run.next()
    with pytest.raises(ValueError, match=r"tensor 'y' has .* bytes, of which 'x' takes"):
        run.inputs(1)


def open_spec(name: str, *shape: int, symbols: tuple[str, ...] = ("n",)) -> TensorSpec:
    """A row of work is 4 of the 16 elements that a row has at most."""
    vary = Variable(100, symbols, (16,) * len(symbols), unit=4)
    return TensorSpec(name, "FP32", shape, vary=vary)


def carried(spec: TensorSpec, *shape: int) -> bytes:
    content = bytes(4 * int(np.prod(shape)))
    return spec.header(shape, len(content)) + content


def test_open_sizes_come_to_the_rows_of_work_of_each_stage() -> None:
    model = Model((open_spec("x", -1),), (open_spec("y", -1),))
    graph = fitted(chain("open", "more:open"), {"open": model})
    [x] = graph.inputs
    assert x.vary is not None
    assert (x.vary.symbols, x.vary.unit, x.vary.unit_bytes) == (("open.n",), 0, 400)
    run = PipelineRun(graph, [carried(x, 2, 5)], 2)
    run.next()
    inputs = run.inputs(0)
    assert graph.stages[0].work(inputs, 2, 8) == 3
    with pytest.raises(BadRequestError, match="found rows x n = 10, expected 8 at most"):
        graph.stages[0].work(inputs, 2, 2)
    # The next stage takes what came, and not what went in.
    run.answered(0, [carried(model.outputs[0], 2, 16)])
    run.next()
    assert graph.stages[1].work(run.inputs(1), 2, 8) == 8
    run.answered(1, [carried(model.outputs[0], 2, 16)])
    sized, _ = graph.outputs[0].unpack(run.results()[0])
    assert sized.row_shape == (2, 16)


def test_sizes_of_one_name_in_a_stage_that_differ_are_an_error_of_the_request() -> None:
    both = Model((open_spec("a", -1), open_spec("b", -1)), (spec("y"),))
    one = Model((open_spec("x", -1),), (open_spec("y", -1),))
    graph = fitted(
        """
        inputs = ["x"]
        outputs = { y = "both.y" }
        [[stages]]
        model = "one"
        inputs = { x = "x" }
        [[stages]]
        model = "both"
        inputs = { a = "x", b = "one.y" }
        """,
        {"one": one, "both": both},
    )
    run = PipelineRun(graph, [carried(graph.inputs[0], 1, 4)], 1)
    run.next()
    run.answered(0, [carried(one.outputs[0], 1, 5)])
    run.next()
    with pytest.raises(
        BadRequestError, match=r"input 'b': found n 5 .* expected 4 as in input 'a'"
    ):
        graph.stages[1].work(run.inputs(1), 1, 8)


def test_an_open_size_that_a_fixed_one_does_not_take_is_an_error_of_the_request() -> None:
    models = {"open": Model((open_spec("x", -1),), (open_spec("y", -1),)), "scale": MODELS["scale"]}
    graph = fitted(chain("open", "then:scale"), models)
    y = models["open"].outputs[0]
    for size in (3, 4):
        run = PipelineRun(graph, [carried(graph.inputs[0], 1, size)], 1)
        run.next()
        run.answered(0, [carried(y, 1, size)])
        run.next()
        if size == 3:
            assert bytes(run.inputs(1)[0]) == bytes(12)
            continue
        with pytest.raises(
            ValueError, match=r"'y' has shape \[1, 4\], expected \[1, 3\] for 1 rows"
        ):
            run.inputs(1)


def test_an_input_of_two_stages_has_the_size_that_is_fixed() -> None:
    models = {"open": Model((open_spec("x", -1),), (open_spec("y", -1),)), "scale": MODELS["scale"]}
    for order in (("open", "scale"), ("scale", "open")):
        stages = "".join(
            f"[[stages]]\nmodel = '{name}'\ninputs = {{ x = 'x' }}\n" for name in order
        )
        outputs = "outputs = { a = 'open.y', b = 'scale.y' }"
        graph = fitted(f"inputs = ['x']\n{outputs}\n{stages}", models)
        assert graph.inputs[0].row_shape == (3,)


def test_a_text_of_other_rows_than_the_request_is_an_error_of_the_request() -> None:
    texts = Model((text("x"),), (text("y"),))
    graph = fitted(chain("texts", "more:texts"), {"texts": texts})
    run = PipelineRun(graph, [b""], 2)
    run.next()
    content = join_texts([b"a"])
    run.answered(0, [texts.outputs[0].header((1,), len(content)) + content])
    run.next()
    with pytest.raises(ValueError, match=r"'y' has shape \[1\], expected \[2\] for 2 rows"):
        run.inputs(1)


def test_texts_of_stages_that_did_not_run_are_empty() -> None:
    gate = Model((text("x"),), (TensorSpec("go", "BOOL", (), vary=Variable(17)),))
    texts = Model((text("x"),), (text("y", 3),))
    graph = fitted(
        """
        inputs = ["x"]
        outputs = { y = "texts.y" }
        [[stages]]
        model = "gate"
        inputs = { x = "x" }
        end_if = "go == false"
        [[stages]]
        model = "texts"
        inputs = { x = "x" }
        """,
        {"gate": gate, "texts": texts},
    )
    run = PipelineRun(graph, [b""], 2)
    assert run.next() == [0]
    run.answered(0, [gate.outputs[0].header((2,), 2) + bytes(2)])
    assert run.ended_by == 0
    sized, content = graph.outputs[0].unpack(run.results()[0])
    assert sized.row_shape == (2, 3)
    assert cut_texts(content) == [b""] * 6


# --- progress -------------------------------------------------------------------------------------

ROW = struct.pack("<3f", 1, 2, 3)


def test_stages_that_do_not_need_each_other_run_at_once() -> None:
    run = PipelineRun(fitted(DIAMOND), [ROW], 1)
    assert run.next() == [0]
    assert run.next() == []
    run.answered(0, [ROW])
    assert run.next() == [1, 2]
    run.answered(2, [ROW])
    assert run.next() == []
    run.answered(1, [ROW])
    assert run.next() == [3]
    assert not run.is_over
    run.answered(3, [ROW[::-1]])
    assert run.is_over
    assert run.results() == [ROW[::-1]]


def test_outputs_are_let_go_when_no_stage_needs_them() -> None:
    run = PipelineRun(fitted(DIAMOND), [ROW], 1)
    outputs = [np.frombuffer(ROW, np.uint8).copy() for _ in range(4)]
    kept = [weakref.ref(each) for each in outputs]
    for index in range(4):
        run.next()
        run.inputs(index)
        run.answered(index, [outputs.pop(0).data])
    assert [each() is None for each in kept] == [True, True, True, False]


@pytest.mark.parametrize(
    ("scores", "ends"), [((0.4,), True), ((0.6,), False), ((0.1, 0.2), True), ((0.1, 0.9), False)]
)
def test_a_condition_ends_a_pipeline_if_it_holds_in_every_row(
    scores: tuple[float, ...], ends: bool
) -> None:
    rows = len(scores)
    run = PipelineRun(fitted(CASCADE), [ROW * rows], rows)
    # Only `detect`: all others wait for what it says.
    assert run.next() == [0]
    packed = struct.pack(f"<{rows}f", *scores)
    run.answered(0, [packed, bytes(8 * rows)])
    assert run.is_over == ends
    if ends:
        assert run.ended_by == 0
        assert run.results() == [packed, bytes(8 * rows)]
    else:
        assert run.next() == [1]


# --- times ----------------------------------------------------------------------------------------


def test_the_longest_way_through_the_stages_counts() -> None:
    times = [StageTime(10, 10), StageTime(30, 30), StageTime(5, 5), StageTime(2, 2)]
    found = plan(fitted(DIAMOND), times)
    assert (found.total_ns, found.least_ns) == (42, 42)
    assert found.ahead_ns == (32, 2, 2, 0)
    assert found.path == (0, 1, 3)


def test_a_load_behind_an_earlier_stage_is_free_as_far_as_that_takes() -> None:
    chained = fitted(chain("a:scale", "b:scale"))
    # The second stage would be answered after 35 if it was asked now, 30 of it the load.
    found = plan(chained, [StageTime(20, 20), StageTime(5, 35)])
    assert (found.total_ns, found.least_ns) == (35, 25)
    assert found.path == (1,)
    found = plan(chained, [StageTime(40, 40), StageTime(5, 35)])
    assert found.total_ns == 45
    assert found.path == (0, 1)
    assert found.ahead_ns == (5, 0)


def test_later_stages_get_what_they_need_and_a_part_of_the_slack() -> None:
    # The slack is 60, of which 40 would be an even share of two stages out of three.
    assert kept_ns(90, own_ns=10, ahead_ns=20) == 20 + 20
    assert kept_ns(90, own_ns=30, ahead_ns=0) == 0
    # Too little for all: the stage is refused, or begins at once.
    assert kept_ns(25, own_ns=10, ahead_ns=20) == 20


def test_stages_are_due_one_after_the_other_and_the_last_at_the_end() -> None:
    times = [StageTime(10), StageTime(10), StageTime(30), StageTime(10)]
    ends = ends_ns(fitted(DIAMOND), times, (40, 10, 10, 0), 100)
    assert ends == [40, 80, 88, 100]
    # The slack begins behind the load.
    loading = [StageTime(10, 60, 50), *times[1:]]
    assert ends_ns(fitted(DIAMOND), loading, (40, 10, 10, 0), 100)[0] == 60


def test_the_backlog_is_what_is_due_before_a_time_on_the_same_workers() -> None:
    backlog, ms = Backlog(), 1_000_000
    backlog.add("gpus", 100 * ms, 5)
    backlog.add("gpus", 200 * ms, 7)
    backlog.add("cpus", 100 * ms, 11)
    assert [backlog.ahead_ns("gpus", at * ms) for at in (50, 100, 150, 300)] == [0, 5, 5, 12]
    backlog.remove("gpus", 100 * ms, 5)
    backlog.remove("gpus", 200 * ms, 7)
    assert backlog.ahead_ns("gpus", 300 * ms) == 0
    assert backlog.ahead_ns("cpus", 300 * ms) == 11


@examples(60)
@given(data=st.data())
def test_any_graph_runs_each_stage_once_behind_what_it_needs(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    lines = [
        'inputs = ["x"]',
        "outputs = { " + ", ".join(f'o{n} = "s{n}.y"' for n in range(count)) + " }",
    ]
    needs: dict[str, set[str]] = {}
    gates = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    for n in data.draw(st.permutations(range(count))):
        sources = [data.draw(st.sampled_from(["x", *(f"s{m}.y" for m in range(n))])) for _ in "ab"]
        needs[f"s{n}"] = {each.partition(".")[0] for each in sources} - {"x"}
        lines += ["[[stages]]", f'name = "s{n}"', 'model = "sum"']
        lines.append(f'inputs = {{ a = "{sources[0]}", b = "{sources[1]}" }}')
        lines += ['end_if = "y > 9"'] if n in gates else []
    graph = fitted("\n".join(lines))
    run = PipelineRun(graph, [ROW], 1)
    under_way, over = list[int](), set[str]()
    times = [StageTime(data.draw(st.integers(1, 9))) for _ in graph.stages]
    while not run.is_over:
        begun = run.next()
        for index in begun:
            assert needs[graph.stages[index].name] <= over
            run.inputs(index)
        under_way += begun
        index = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
        run.answered(index, [ROW])
        over.add(graph.stages[index].name)
    assert over == needs.keys()
    assert run.results() == [ROW] * count
    found = plan(graph, times)
    walked = sum(times[index].step_ns for index in found.path)
    assert walked == found.total_ns == found.least_ns
    assert max(a + t.step_ns for a, t in zip(found.ahead_ns, times, strict=True)) == found.total_ns
    ends = ends_ns(graph, times, found.ahead_ns, 1000)
    for index, stage in enumerate(graph.stages):
        begin = max((ends[each] for each in stage.behind), default=0)
        assert begin + times[index].step_ns <= ends[index] <= 1000
