"""The models directory, and models that come and go."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from clockwright.errors import ModelError, Refusal, UnknownModelError
from clockwright.units import ModelId, WorkerId
from clockwright.wire.tensors import TensorSpec
from controller.models import catalogue
from controller.models.entry import ModelState
from controller.models.model_folder import ModelSettings, read_versions
from controller.models.state_file import StateFile
from controller.models.uploads import Uploads
from controller.models.verdicts import NOT_BEGUN
from tests.kit.catalogue_bench import SPEC, CatalogueBench, OffersMade, make_folder

# --- folders ----------------------------------------------------------------------------------


def test_the_highest_version_is_served_with_all_its_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, version="9")
    make_folder(tmp_path, "other")
    (folder / "10" / "data").mkdir(parents=True)
    (folder / "10" / "model.onnx").write_bytes(b"ten")
    (folder / "10" / "data" / "weights.bin").write_bytes(b"w" * 100)
    (folder / "notes").mkdir()
    read = read_versions(folder)[-1]
    assert read.version == "10"
    assert [(file.name, file.num_bytes, file.sha256) for file in read.files] == [
        ("data/weights.bin", 100, hashlib.sha256(b"w" * 100).hexdigest()),
        ("model.onnx", 3, hashlib.sha256(b"ten").hexdigest()),
    ]
    assert read.settings == ModelSettings()
    assert read.instance_names == ("m",)


def test_config_toml_sets_what_it_names(tmp_path: Path) -> None:
    config = """
        slo_ms = 12.5
        batch_sizes = [4, 1]
        copies = 3
        profile = "resnet50_v1"
        labels = { y = "names/y.txt" }
        [dimensions]
        height = 224
    """
    folder = make_folder(tmp_path, config=config)
    (folder / "names").mkdir()
    # As Windows writes it; a label may have what Unicode takes for the end of a line.
    (folder / "names" / "y.txt").write_bytes("\ufeffcat\r\nbär\u2028brown\r\n\r\ndog".encode())
    read = read_versions(folder)[-1]
    assert read.labels == {"y": ("cat", "bär\u2028brown", "", "dog")}
    assert read.settings == ModelSettings(
        slo_ns=12_500_000,
        batch_sizes=(1, 4),
        dimensions={"height": 224},
        copies=3,
        profile="resnet50_v1",
        labels={"y": "names/y.txt"},
    )
    assert read.instance_names == ("m-0", "m-1", "m-2")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("cache = 1", "cache is 1, expected true or false"),
        ("slo = 3", "unknown key 'slo'; known are slo_ms, batch_sizes"),
        ("slo_ms = 0", "slo_ms is 0, expected a positive number"),
        ("slo_ms = nan", "slo_ms is nan"),
        ("slo_ms = inf", "slo_ms is inf"),
        ("slo_ms = true", "slo_ms is True"),
        ("batch_sizes = []", "batch_sizes is"),
        ("batch_sizes = [1, 1]", "each size once"),
        ("batch_sizes = [0]", "batch_sizes is 0, expected a whole number from 1"),
        ("copies = -1", "copies is -1"),
        ("copies = 1.5", "copies is 1.5"),
        ("dimensions = 3", "dimensions is 3"),
        ("[dimensions]\nheight = 'x'", "dimensions.height is 'x'"),
        ("profile = 3", "profile is 3"),
        ("labels = 3", "labels is 3, expected a table of OUTPUT = FILE"),
        ("labels = { y = 1 }", "labels is {'y': 1}"),
        (
            "labels = { y = 'y.txt' }",
            "labels of output 'y': expected a line for each class in y.txt",
        ),
        ("labels = { y = '../secret' }", "../secret leads outside the model's folder"),
        (r'labels = { y = "a\u0000b" }', "expected a table of OUTPUT = FILE"),
        ("slo_ms = ", "config.toml: Invalid value"),
    ],
)
def test_a_wrong_config_names_the_key_what_was_found_and_what_is_expected(
    tmp_path: Path, config: str, message: str
) -> None:
    folder = make_folder(tmp_path, config=config)
    with pytest.raises(ModelError) as caught:
        read_versions(folder)[-1]
    assert message in str(caught.value)


def test_all_that_is_wrong_with_a_folder_is_said_at_once(tmp_path: Path) -> None:
    config = "slo_ms = -1\nbatch_sizes = []\nspeed = 9"
    folder = make_folder(tmp_path, config=config)
    (folder / "config.pbtxt").write_text('name: "other"\nmax_batch_size: -1\n')
    (folder / "1").rename(folder / "first")
    with pytest.raises(ModelError) as caught:
        read_versions(folder)[-1]
    first, *others = str(caught.value).split("; ")
    assert first.startswith("config.toml: slo_ms is -1, expected a positive number")
    assert others[0] == "batch_sizes is [], expected a list of batch sizes"
    assert others[1].startswith("unknown key 'speed'")
    assert others[-3].startswith("config.pbtxt: name is 'other', expected 'm'")
    assert others[-2] == "max_batch_size is -1, expected 0 or more"
    assert others[-1].startswith("expected a version folder with a number as its name, found conf")


def test_a_pipeline_with_a_fault_is_not_told_to_have_a_version_folder(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "config.toml").write_text("[pipeline]\ninputs = ['x']\noutputz = {}")
    with pytest.raises(ModelError) as caught:
        read_versions(tmp_path / "p")[-1]
    assert "version folder" not in str(caught.value)


def test_only_a_line_feed_ends_a_label(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, config="labels = { y = 'y.txt' }")
    (folder / "y.txt").write_text("a\u2028b\x0cc\r\nd\n\n", newline="")
    assert read_versions(folder)[-1].labels == {"y": ("a\u2028b\x0cc", "d", "")}


@pytest.mark.parametrize("name", ["config.toml", "1/model.onnx", "./1/../1/model.onnx"])
def test_labels_show_no_file_of_a_model_that_is_not_for_clients(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path, config=f"labels = {{ y = {name!r} }}")
    with pytest.raises(ModelError, match=r"expected a file next to config\.toml"):
        read_versions(folder)[-1]


def test_a_models_labels_are_bounded_together_and_each(tmp_path: Path) -> None:
    outputs = ", ".join(f"y{index} = 'y.txt'" for index in range(2_000))
    folder = make_folder(tmp_path, config=f"labels = {{ {outputs} }}")
    (folder / "y.txt").write_text("cat\n" * 1_000)
    with pytest.raises(ModelError, match="labels: found 1052000 bytes and more, expected 1048576"):
        read_versions(folder)[-1]
    # An answer may have 16,384 of them.
    (folder / "y.txt").write_text("cat\n" + "ä" * 600)
    with pytest.raises(ModelError, match="'y0': found a line of 1200 bytes"):
        read_versions(folder)[-1]


def test_a_folder_that_holds_no_model_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"version folder with a number.*found nothing"):
        read_versions(tmp_path / "empty")[-1]
    (tmp_path / "versions" / "v1").mkdir(parents=True)
    with pytest.raises(ModelError, match="found v1"):
        read_versions(tmp_path / "versions")[-1]
    (tmp_path / "torch" / "1").mkdir(parents=True)
    (tmp_path / "torch" / "1" / "model.pt").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"expected 1/model\.onnx, found model\.pt"):
        read_versions(tmp_path / "torch")[-1]
    with pytest.raises(ModelError, match=r"1/model\.onnx is empty"):
        read_versions(make_folder(tmp_path, "hollow", data=b""))[-1]
    with pytest.raises(ModelError, match="is not a folder"):
        read_versions(tmp_path / "nowhere")[-1]


@pytest.mark.parametrize("name", ["a b", "ä", "x" * 129, ".hidden", "a@2", "-rf"])
def test_a_name_that_could_not_be_a_file_or_an_id_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="model name"):
        read_versions(make_folder(tmp_path, name))[-1]


def test_links_that_lead_outside_the_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = make_folder(tmp_path)
    (folder / "1" / "inside").symlink_to("model.onnx")
    assert len(read_versions(folder)[-1].files) == 2
    (folder / "1" / "outside").symlink_to("../../secret")
    words = (
        f"outside leads outside the model's folder, to {tmp_path / 'secret'}; .* a copy .* itself"
    )
    with pytest.raises(ModelError, match=words):
        read_versions(folder)[-1]


@pytest.mark.parametrize("target", ["../../gone", "gone"])
def test_a_link_to_nothing_is_called_so(target: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "1" / "model.onnx").unlink()
    (folder / "1" / "model.onnx").symlink_to(target)
    with pytest.raises(ModelError, match=f"^model.onnx is a link to nothing: {target}$"):
        read_versions(folder)[-1]


# --- the catalogue ----------------------------------------------------------------------------


@asynccontextmanager
async def uploads_in(directory: Path) -> AsyncIterator[Uploads]:
    """Uploads of which nothing outlives the process."""
    state = StateFile(None)
    uploads = Uploads(directory / "uploads", state, bytes_max=1 << 20)
    await uploads.restore()
    yield uploads
    await state.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 300))


async def test_a_refused_or_malformed_model_does_not_hold_the_others_up(tmp_path: Path) -> None:
    make_folder(tmp_path, "fit")
    make_folder(tmp_path, "unfit")
    make_folder(tmp_path, "malformed", config="x = 1")
    (tmp_path / "README").write_text("not a folder")
    bench = await CatalogueBench.scanned(tmp_path)
    assert [model.name for model in bench.catalogue.models] == ["fit", "malformed", "unfit"]
    assert bench.state("malformed") is ModelState.UNAVAILABLE
    assert bench.state("fit") is ModelState.LOADING
    assert not bench.catalogue.ready
    bench.join("w")
    assert bench.ready("fit", "w")
    assert not bench.catalogue.ready
    bench.refuse("unfit", "w")
    assert bench.catalogue.ready
    assert bench.state("fit") is ModelState.READY
    assert bench.state("unfit") is ModelState.UNAVAILABLE
    reasons = {model.name: bench.catalogue.reason(model) for model in bench.catalogue.models}
    assert reasons["fit"] == ""
    assert reasons["unfit"] == "not ONNX"
    assert "unknown key 'x'" in reasons["malformed"]


def test_a_model_that_workers_prepare_refuse_or_left_is_refused_for_its_own_reason(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        make_folder(tmp_path, "m")
        bench = await CatalogueBench.scanned(tmp_path)
        model = bench.catalogue.find("m")
        assert model is not None

        def refusal() -> Refusal | None:
            error = bench.catalogue.refusal(model)
            return None if error is None else error.refusal

        assert refusal() is Refusal.NO_WORKER
        bench.join("a")
        assert refusal() is Refusal.LOADING
        # Workers of another kind, which may come, are to serve it.
        bench.catalogue.model_refused(
            WorkerId("a"), ModelId("m"), "it needs a container", for_others=True
        )
        assert refusal() is Refusal.NO_WORKER
        bench.join("b")
        assert refusal() is Refusal.LOADING
        bench.refuse("m", "b")
        assert refusal() is Refusal.UNFIT
        bench.join("c")
        assert bench.ready("m", "c")
        assert refusal() is None
        # It was served, so it may come back: the scheduler refuses it with NO_WORKER.
        bench.leave("c")
        assert refusal() is None
        bench.join("d")
        assert refusal() is Refusal.LOADING

    run(test)


async def test_without_models_it_is_ready_and_without_workers_it_is_not(tmp_path: Path) -> None:
    bench = await CatalogueBench.scanned(tmp_path)
    assert bench.catalogue.ready
    make_folder(tmp_path)
    await bench.catalogue.scan()
    bench.join("w")
    bench.ready("m", "w")
    assert bench.catalogue.ready
    bench.leave("w")
    assert not bench.catalogue.ready
    assert bench.state("m") is ModelState.LOADING


async def test_one_worker_that_refuses_is_outvoted_by_one_that_is_ready(tmp_path: Path) -> None:
    make_folder(tmp_path)
    bench = await CatalogueBench.scanned(tmp_path, "small")
    bench.refuse("m", "small", "too large for the cache")
    assert bench.state("m") is ModelState.UNAVAILABLE
    bench.join("large")
    assert bench.state("m") is ModelState.LOADING
    bench.ready("m", "large")
    assert bench.state("m") is ModelState.READY
    bench.leave("large")
    assert bench.state("m") is ModelState.UNAVAILABLE


async def test_a_worker_that_describes_other_tensors_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path)
    bench = await CatalogueBench.scanned(tmp_path, "a", "b")
    assert bench.ready("m", "a")
    assert not bench.ready("m", "b", (TensorSpec("x", "FP16", (4,)),))
    model = bench.catalogue.find("m")
    assert model is not None
    assert "x FP16 [4]" in model.refused_by[WorkerId("b")]
    assert model.inputs == SPEC
    assert model.largest_batch == 4


async def test_a_description_does_not_outlive_those_who_stand_for_it(tmp_path: Path) -> None:
    make_folder(tmp_path)
    bench = await CatalogueBench.scanned(tmp_path, "a", "b", "c")
    odd = (TensorSpec("z", "INT8", (1,)),)
    assert bench.ready("m", "a", odd)
    assert not bench.ready("m", "b")
    bench.refuse("m", "c")
    model = bench.catalogue.find("m")
    assert model is not None
    while not bench.offers.offered.empty():
        bench.offers.offered.get_nowait()
    bench.leave("a")
    # The one that was shut out is asked again, and no other.
    assert bench.offers.offered.get_nowait() is model
    assert bench.offers.offered.empty()
    assert bench.state("m") is ModelState.LOADING
    assert (model.inputs, model.outputs) == ((), ())
    assert bench.ready("m", "b")
    assert bench.state("m") is ModelState.READY
    assert model.inputs == SPEC
    assert set(model.refused_by) == {"c"}


async def test_a_worker_of_another_version_may_describe_anew_what_nobody_has(
    tmp_path: Path,
) -> None:
    make_folder(tmp_path)
    bench = await CatalogueBench.scanned(tmp_path, "a")
    assert bench.ready("m", "a", (TensorSpec("z", "INT8", (1,)),))
    bench.leave("a")
    bench.join("b")
    assert bench.ready("m", "b")
    model = bench.catalogue.find("m")
    assert model is not None
    assert model.inputs == SPEC


async def test_a_model_removed_while_it_loads_and_added_again_is_another_to_the_workers(
    tmp_path: Path,
) -> None:
    make_folder(tmp_path)
    bench = await CatalogueBench.scanned(tmp_path, "w")
    first = await bench.offers.offered.get()
    bench.catalogue.remove("m")
    assert bench.offers.withdrawn == [first.model_id]
    adding = asyncio.create_task(bench.catalogue.reload("m"))
    second = await bench.offers.offered.get()
    assert second.model_id != first.model_id
    # What the worker says of the first is of no account.
    assert not bench.ready(first.model_id, "w")
    assert bench.ready(second.model_id, "w")
    assert await adding == [second]
    assert bench.offers.withdrawn == [first.model_id]


async def test_names_that_are_gone_are_forgotten_and_yet_no_id_is_given_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "_NAMES_GONE_MAX", 5)
    bench = CatalogueBench(tmp_path)
    bench.join("w")
    given: list[ModelId] = []

    async def come(name: str) -> None:
        if not (tmp_path / name).exists():
            make_folder(tmp_path, name)
        adding = asyncio.create_task(bench.catalogue.add(tmp_path / name))
        model = await bench.offers.offered.get()
        given.append(model.model_id)
        bench.ready(model.model_id, "w")
        await adding

    async def come_and_go(name: str) -> None:
        await come(name)
        bench.catalogue.remove(name)

    for number in range(10):
        await come(f"stays{number}")
    for number in range(5):  # until names are forgotten
        await come_and_go("again")
        await come_and_go(f"m{number}")
    assert given[10:14] == ["again", "m0", "again@2", "m1"]
    # Those that were here all the time have low numbers, and go last.
    for number in range(10):
        bench.catalogue.remove(f"stays{number}")
    for number in range(20):
        await come_and_go(f"n{number}")
        await come_and_go("again")
    assert len(set(given)) == len(given)


async def test_many_copies_are_offered_in_slices_and_uploads_have_a_thousand_at_most(
    tmp_path: Path,
) -> None:
    async with uploads_in(tmp_path) as uploads:
        bench = CatalogueBench(tmp_path, uploads)
        bench.join("w")
        queue, most = bench.offers.offered, 0

        async def others() -> None:
            nonlocal most
            seen = 0
            while seen < 1000:
                most, seen = max(most, queue.qsize() - seen), queue.qsize()
                await asyncio.sleep(0)

        many = make_folder(tmp_path, "many", config="copies = 1000")
        adding = asyncio.create_task(bench.catalogue.add(many, upload=uploads.begin()))
        await others()
        assert 0 < most <= 64
        while not queue.empty():
            bench.ready(queue.get_nowait().model_id, "w")
        assert len(await adding) == 1000
        more = make_folder(tmp_path, "more", config="copies = 1001")
        with pytest.raises(
            ModelError, match="copies is 1001, expected a whole number from 1 to 1000"
        ):
            await bench.catalogue.add(more, upload=uploads.begin())


async def test_a_worker_that_joins_is_offered_many_models_in_slices_and_none_that_is_gone(
    tmp_path: Path,
) -> None:
    make_folder(tmp_path, "many", config="copies = 300")
    bench = await CatalogueBench.scanned(tmp_path)
    queue = bench.offers.offered
    bench.join("w")
    assert queue.qsize() == 64
    bench.catalogue.remove("many-299")
    sizes = [queue.qsize()]
    while queue.qsize() < 299:
        await asyncio.sleep(0)
        sizes.append(queue.qsize())
    assert max(b - a for a, b in itertools.pairwise(sizes)) <= 64
    await asyncio.sleep(0)
    names = [queue.get_nowait().name for _ in range(queue.qsize())]
    assert names == [f"many-{number}" for number in range(299)]

    # One that leaves meanwhile is offered no more.
    bench.join("v")
    bench.leave("v")
    for _ in range(10):
        await asyncio.sleep(0)
    assert queue.qsize() == 64


async def test_the_files_of_an_upload_go_with_the_last_of_its_models(tmp_path: Path) -> None:
    async with uploads_in(tmp_path) as uploads:
        bench = CatalogueBench(tmp_path, uploads)
        bench.join("w")
        upload = uploads.begin()
        pair = make_folder(upload.folder, "pair", config="copies = 2")
        adding = asyncio.create_task(bench.catalogue.add(pair, upload=upload))
        for _ in range(2):
            bench.ready((await bench.offers.offered.get()).model_id, "w")
        await adding
        await bench.catalogue.remove("pair-0")
        assert pair.exists()
        await bench.catalogue.remove("pair-1")
        assert not pair.exists()
        upload = uploads.begin()
        unfit = make_folder(upload.folder, "unfit")
        adding = asyncio.create_task(bench.catalogue.add(unfit, upload=upload))
        bench.refuse((await bench.offers.offered.get()).model_id, "w")
        with pytest.raises(ModelError, match="not ONNX"):
            await adding
        assert not unfit.exists()


async def test_copies_share_the_files_and_clashing_names_are_refused(tmp_path: Path) -> None:
    make_folder(tmp_path, "a", config="copies = 2")
    make_folder(tmp_path, "a-1")
    bench = await CatalogueBench.scanned(tmp_path)
    assert [model.name for model in bench.catalogue.models] == ["a-0", "a-1"]
    first, second = bench.catalogue.models
    assert first.folder is second.folder is not None


async def test_adding_waits_for_a_worker_and_then_the_name_is_there(tmp_path: Path) -> None:
    bench = CatalogueBench(tmp_path)
    bench.join("w")
    adding = asyncio.create_task(bench.catalogue.add(make_folder(tmp_path)))
    model = await bench.offers.offered.get()
    assert bench.catalogue.find("m") is None
    bench.ready(model.model_id, "w")
    assert await adding == [model]
    assert bench.catalogue.find("m") is model


async def test_a_model_that_contradicts_its_configuration_is_not_served_and_one_that_fits_is(
    tmp_path: Path,
) -> None:
    folder = make_folder(tmp_path)
    (folder / "config.pbtxt").write_text('input { name: "x" dims: [ -1, 5 ] }')
    bench = await CatalogueBench.scanned(tmp_path, "a", "b")
    assert not bench.ready("m", "a", (TensorSpec("x", "FP32", (4,)),))
    assert bench.state("m") is ModelState.LOADING
    assert bench.ready("m", "b", (TensorSpec("x", "FP32", (5,)),))
    assert bench.state("m") is ModelState.READY
    [model] = bench.catalogue.models
    assert "expected the model's [-1, 4]" in model.refused_by[WorkerId("a")]


async def test_labels_of_an_output_that_the_model_lacks_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, config="labels = { classes = 'names' }")
    (folder / "names").write_text("cat\ndog\n")
    bench = await CatalogueBench.scanned(tmp_path, "a")
    assert not bench.ready("m", "a")
    [model] = bench.catalogue.models
    assert "labels of output 'classes': expected one of" in model.refused_by[WorkerId("a")]


async def test_a_model_that_all_workers_refuse_is_not_added(tmp_path: Path) -> None:
    bench = CatalogueBench(tmp_path)
    folder = make_folder(tmp_path)
    with pytest.raises(ModelError, match="there is no worker"):
        await bench.catalogue.add(folder)
    bench.join("a")
    bench.join("b")
    adding = asyncio.create_task(bench.catalogue.add(folder))
    model = await bench.offers.offered.get()
    bench.refuse(model.model_id, "a", "unsupported operator Foo")
    bench.leave("b")
    with pytest.raises(ModelError, match="model m: unsupported operator Foo"):
        await adding
    assert bench.catalogue.models == []
    assert bench.offers.withdrawn == [model.model_id]
    assert not bench.ready(model.model_id, "a")


async def test_a_replacement_takes_over_only_once_it_is_ready(tmp_path: Path) -> None:
    make_folder(tmp_path)
    bench = await CatalogueBench.scanned(tmp_path, "w")
    old = await bench.offers.offered.get()
    bench.ready("m", "w")
    with pytest.raises(ModelError, match="there is a model m already"):
        await bench.catalogue.add(tmp_path / "m")

    refused = asyncio.create_task(bench.catalogue.reload("m"))
    bench.refuse((await bench.offers.offered.get()).model_id, "w")
    with pytest.raises(ModelError, match="not ONNX"):
        await refused
    assert bench.catalogue.find("m") is old

    replacing = asyncio.create_task(bench.catalogue.reload("m"))
    new = await bench.offers.offered.get()
    assert new.model_id not in ("m", "m@2")
    assert bench.catalogue.find("m") is old
    with pytest.raises(ModelError, match="by another call"):
        await bench.catalogue.reload("m")
    bench.ready(new.model_id, "w")
    await replacing
    assert bench.catalogue.find("m") is new
    with pytest.raises(UnknownModelError, match="no such folder"):
        await bench.catalogue.reload("unknown")


async def test_a_malformed_model_can_be_mended_and_reloaded(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, config="x = 1")
    bench = await CatalogueBench.scanned(tmp_path)
    assert bench.state("m") is ModelState.UNAVAILABLE
    (folder / "config.toml").unlink()
    bench.join("w")
    mending = asyncio.create_task(bench.catalogue.reload("m"))
    model = await bench.offers.offered.get()
    bench.ready(model.model_id, "w")
    assert await mending == [model]
    for _ in range(3):  # The malformed entry is forgotten, and the new one is not.
        await asyncio.sleep(0)
    assert bench.catalogue.find_id(model.model_id) is model
    assert [row.model_id for row in bench.runtime.statistics().models] == [model.model_id]


async def test_giving_up_on_an_addition_withdraws_it(tmp_path: Path) -> None:
    bench = CatalogueBench(tmp_path)
    bench.join("w")
    adding = asyncio.create_task(bench.catalogue.add(make_folder(tmp_path)))
    model = await bench.offers.offered.get()
    adding.cancel()
    await asyncio.gather(adding, return_exceptions=True)
    assert bench.offers.withdrawn == [model.model_id]
    again = asyncio.create_task(bench.catalogue.add(tmp_path / "m"))
    bench.ready((await bench.offers.offered.get()).model_id, "w")
    await again


async def test_a_removed_model_is_gone_and_its_name_is_free(tmp_path: Path) -> None:
    make_folder(tmp_path, config="copies = 2")
    bench = await CatalogueBench.scanned(tmp_path)
    bench.catalogue.remove("m-0")
    assert [model.name for model in bench.catalogue.models] == ["m-1"]
    bench.catalogue.remove("m")
    assert bench.catalogue.models == []
    with pytest.raises(UnknownModelError, match="there is no model m"):
        bench.catalogue.remove("m")
    await bench.catalogue.scan()
    # The new ids keep results that are still under way for the first generation from the second.
    assert [model.model_id for model in bench.catalogue.models] == ["m-0@2", "m-1@2"]


async def test_a_worker_is_offered_what_there_is_and_what_comes_until_it_leaves(
    tmp_path: Path,
) -> None:
    make_folder(tmp_path, "early")
    make_folder(tmp_path, "malformed", config="x = 1")
    bench = await CatalogueBench.scanned(tmp_path)
    first, second = OffersMade(), OffersMade()
    bench.catalogue.worker_joined(WorkerId("a"), first)
    bench.catalogue.worker_joined(WorkerId("b"), second)
    assert (await first.offered.get()).name == (await second.offered.get()).name == "early"
    bench.catalogue.worker_left(WorkerId("a"))
    adding = asyncio.create_task(bench.catalogue.add(make_folder(tmp_path, "late")))
    assert (await second.offered.get()).name == "late"
    adding.cancel()
    await asyncio.wait([adding])
    assert second.withdrawn == ["late"]
    assert first.offered.empty()
    assert first.withdrawn == []


async def test_no_model_takes_a_reserved_name_until_it_is_released(tmp_path: Path) -> None:
    make_folder(tmp_path)
    bench = CatalogueBench(tmp_path)
    bench.join("w")
    bench.catalogue.reserve("m")
    with pytest.raises(ModelError, match="there is an application m already"):
        await bench.catalogue.reload("m")
    bench.catalogue.release("m")
    adding = asyncio.create_task(bench.catalogue.reload("m"))
    bench.ready((await bench.offers.offered.get()).model_id, "w")
    await adding
    assert bench.state("m") is ModelState.READY


async def test_a_model_that_lost_its_workers_still_takes_what_it_took(tmp_path: Path) -> None:
    """Requests are refused as the scheduler says, and not for their size: that of open sizes is in no file."""
    make_folder(tmp_path, "m")
    bench = await CatalogueBench.scanned(tmp_path, "a")
    model = bench.catalogue.find("m")
    assert model is not None
    assert model.largest_batch == 0
    bench.ready("m", "a")
    bench.leave("a")
    assert not model.ready_on
    assert model.largest_batch == 4


async def test_models_under_way_at_once_say_their_stages_and_the_others_their_place(
    tmp_path: Path,
) -> None:
    for number, name in enumerate(("small", "middle", "large")):
        make_folder(tmp_path, name, data=b"x" * (number + 1))
    bench = await CatalogueBench.scanned(tmp_path, "a", "b")

    def said(name: str) -> tuple[str, int]:
        model = bench.catalogue.find(name)
        assert model is not None
        refused = bench.catalogue.refusal(model)
        assert refused is not None
        assert refused.refusal is Refusal.LOADING
        return refused.message, refused.figures["models_before"]

    assert said("middle")[0].endswith("prepared (1 model before it); try again in about 4 s")
    for worker, name, stage in (
        ("a", "small", "optimising"),
        ("a", "middle", "checking"),
        ("b", "middle", "finding sizes"),
    ):
        bench.catalogue.model_progress(WorkerId(worker), ModelId(name), stage)
    small, middle = said("small"), said("middle")
    assert small == ("model small is being prepared (optimising); try again in about 4 s", 0)
    assert middle == ("model middle is being prepared (finding sizes); try again in about 4 s", 0)
    assert said("large")[0].endswith("(2 models before it); try again in about 6 s")
    # A worker that leaves takes its stages along.
    bench.leave("b")
    assert "(checking)" in said("middle")[0]
    bench.leave("a")
    bench.join("c")
    assert "(1 model before it)" in said("middle")[0]
    large = bench.catalogue.find("large")
    assert large is not None
    assert bench.catalogue.reason(large).endswith(NOT_BEGUN)
