"""Profiles: Table 1, files, and bare durations."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clockwright.errors import ConfigError, ModelError
from clockwright.units import PAGE_BYTES
from modelzoo.profile import Noise, Profile, ProfileRow, load_profile, save_profile


def document() -> dict[str, Any]:
    row = {"name": "a", "weights_bytes": 100, "load_ns": 5, "exec_ns": {"2": 30, "1": 20}}
    return {"name": "mine", "rows": [row]}


def written(path: Path, content: object) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_table_1_is_carried_whole_and_in_decimal_units() -> None:
    table1 = load_profile("table1")
    assert len(table1.rows) == 64
    assert table1.rows["resnet50_v1b"] == ProfileRow(
        name="resnet50_v1b",
        weights_bytes=102_100_000,
        load_ns=8_330_000,
        exec_ns={1: 2_770_000, 2: 3_950_000, 4: 5_880_000, 8: 9_780_000, 16: 16_580_000},
        input_bytes=602_000,
        output_bytes=4_000,
    )
    assert round(sum(row.weights_bytes for row in table1.rows.values()) / 1e6) == 8_323
    assert table1.noise == Noise()


def test_table_1_keeps_what_is_printed_even_where_it_is_likely_a_misprint() -> None:
    assert load_profile("table1").rows["winograd_resnet152_v2"].exec_ns[16] == 28_920_000


def test_in_table_1_every_larger_batch_takes_longer_and_less_per_row_than_batch_1() -> None:
    for row in load_profile("table1").rows.values():
        assert list(row.exec_ns) == [1, 2, 4, 8, 16]
        assert list(row.exec_ns.values()) == sorted(row.exec_ns.values())
        assert all(ns < size * row.exec_ns[1] for size, ns in row.exec_ns.items() if size > 1)


@pytest.mark.parametrize(
    ("spec", "exec_ns", "load_ns"),
    [
        ("10ms", 10_000_000, 1_000_000),
        ("250us", 250_000, 1_000_000),
        ("1.5ms", 1_500_000, 1_000_000),
        ("0us", 0, 0),
    ],
)
def test_a_duration_is_a_profile_of_one_row_for_every_model(
    spec: str, exec_ns: int, load_ns: int
) -> None:
    row = load_profile(spec).row_for("anything at all-3")
    assert row.exec_ns == {1: exec_ns}
    assert row.load_ns == load_ns
    assert row.weights_bytes == PAGE_BYTES


@pytest.mark.parametrize("spec", ["0.5ns", "2000000s"])
def test_a_duration_is_a_whole_number_of_nanoseconds_and_at_most_an_hour(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"whole number of ns, at most 3600 s"):
        load_profile(spec)


@pytest.mark.parametrize("spec", ["", "table2", "-5ms", "10 m", "no/such/file.json", "a\0b"])
def test_what_is_no_profile_is_refused_by_name(spec: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="profile"):
        load_profile(spec)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(str(tmp_path))


def test_a_file_is_read_with_its_noise_and_its_batches_in_order(tmp_path: Path) -> None:
    content = document() | {"noise": {"exec_sigma": 0.01, "load_sigma": 0.02}, "seed": 1}
    profile = load_profile(written(tmp_path / "p.json", content))
    assert profile.noise == Noise(exec_sigma=0.01, load_sigma=0.02)
    assert profile.seed == 1
    assert list(profile.rows["a"].exec_ns.items()) == [(1, 20), (2, 30)]


def test_a_batch_may_be_faster_than_a_smaller_one(tmp_path: Path) -> None:
    content = document()
    content["rows"][0]["exec_ns"] = {"1": 30, "2": 20}
    assert load_profile(written(tmp_path / "p.json", content)).rows["a"].exec_ns == {1: 30, 2: 20}


@pytest.mark.parametrize("key", ["name", "weights_bytes", "load_ns", "exec_ns"])
def test_a_missing_key_of_a_row_is_named(key: str, tmp_path: Path) -> None:
    content = document()
    del content["rows"][0][key]
    with pytest.raises(ConfigError, match=rf"required field `{key}` - at `\$\.rows\[0\]`"):
        load_profile(written(tmp_path / "p.json", content))


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("name", "", "length >= 1 - at `$.rows[0].name`"),
        ("name", 3, "Expected `str`, got `int` - at `$.rows[0].name`"),
        ("weights_bytes", 0, "Expected `int` >= 1 - at `$.rows[0].weights_bytes`"),
        ("weights_bytes", 1.5e6 + 0.5, "Expected `int`, got `float`"),
        ("load_ns", 0, "Expected `int` >= 1 - at `$.rows[0].load_ns`"),
        ("load_ns", True, "Expected `int`, got `bool`"),
        ("load_ns", 10**30, "at `$.rows[0].load_ns`"),
        ("load_ns", 3_600 * 10**9 + 1, "Expected `int` <= 3600000000000"),
        ("exec_ns", {}, "length >= 1 - at `$.rows[0].exec_ns`"),
        ("exec_ns", [1], "Expected `object`, got `array` - at `$.rows[0].exec_ns`"),
        ("exec_ns", {"1": 0}, "Expected `int` >= 1 - at `$.rows[0].exec_ns[...]`"),
        ("exec_ns", {"1": -4}, "Expected `int` >= 1 - at `$.rows[0].exec_ns[...]`"),
        ("exec_ns", {"0": 4}, "Expected `int` >= 1 - at `key` in `$.rows[0].exec_ns`"),
        ("exec_ns", {"65537": 4}, "Expected `int` <= 65536 - at `key` in `$.rows[0].exec_ns`"),
        ("exec_ns", {"two": 4}, "Expected `int`, got `str` - at `key` in `$.rows[0].exec_ns`"),
        ("exec_ns", {"1": "x" * 999}, "Expected `int`, got `str`"),
        ("input_bytes", -1, "Expected `int` >= 0 - at `$.rows[0].input_bytes`"),
        ("exec_ms", 4, "unknown field `exec_ms` - at `$.rows[0]`"),
    ],
)
def test_an_illegal_row_is_refused_with_its_place_and_what_is_expected(
    key: str, value: object, complaint: str, tmp_path: Path
) -> None:
    content = document()
    content["rows"][0][key] = value
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        load_profile(written(tmp_path / "p.json", content))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not JSON"),
        ("9" * 5000, "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "found 0 models of a server and no predicted run"),
        ("{}", "missing required field `name`"),
        ('{"name": "a", "rows": []}', r"length >= 1 - at `\$\.rows`"),
        ('{"name": "a", "rows": [4]}', r"Expected `object`, got `int` - at `\$\.rows\[0\]`"),
        ('{"name": "a", "name": "b"}', "two keys 'name'"),
        ('{"name": "a", "nose": {}, "rows": []}', "unknown field `nose`"),
    ],
)
def test_an_illegal_document_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load_profile(str(path))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(str(path))


@pytest.mark.parametrize("sigma", [-0.1, 1.5, float("nan"), float("inf"), "0.1", None, True])
def test_illegal_noise_is_refused(sigma: object, tmp_path: Path) -> None:
    content = document() | {"noise": {"load_sigma": sigma}}
    with pytest.raises(ConfigError, match=r"Expected `float`.* - at `\$\.noise\.load_sigma`"):
        load_profile(written(tmp_path / "p.json", content))


def test_two_rows_of_one_name_are_refused(tmp_path: Path) -> None:
    content = document()
    content["rows"] *= 2
    with pytest.raises(ConfigError, match=r"rows\[1\]: a second row named 'a'"):
        load_profile(written(tmp_path / "p.json", content))


def test_a_copy_of_an_architecture_finds_its_row() -> None:
    table1 = load_profile("table1")
    assert table1.row_for("resnet50_v1b").name == "resnet50_v1b"
    assert table1.row_for("resnet50_v1b-17").name == "resnet50_v1b"


def test_an_exact_name_comes_before_the_suffix_and_the_star_last() -> None:
    rows = {
        name: ProfileRow(name=name, weights_bytes=1, load_ns=1, exec_ns={1: 1})
        for name in ("mlp-64-10", "mlp-64", "*")
    }
    profile = Profile(name="p", rows=rows)
    assert profile.row_for("mlp-64-10").name == "mlp-64-10"
    assert profile.row_for("mlp-64-10-0").name == "mlp-64-10"
    assert profile.row_for("mlp-64-11").name == "mlp-64"
    assert profile.row_for("other").name == "*"


def test_a_model_without_a_row_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ModelError, match=r"'table1' has no row .*'resnet51_v1b' \(nearest: 'resnet"
    ):
        load_profile("table1").row_for("resnet51_v1b")


def test_a_saved_profile_is_read_back_equal(tmp_path: Path) -> None:
    table1 = load_profile("table1")
    profile = Profile(
        name="mine", rows=table1.rows, origin="a test", noise=Noise(exec_sigma=0.5), seed=7
    )
    path = tmp_path / "new folder" / "p.json"
    save_profile(profile, path)
    assert load_profile(str(path)) == profile
    assert [entry.name for entry in path.parent.iterdir()] == ["p.json"]


def test_a_profile_that_could_not_be_read_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Expected `int` >= 1"):
        save_profile(load_profile("0us"), tmp_path / "p.json")
    assert list(tmp_path.iterdir()) == []


def test_reading_profiles_imports_neither_onnx_nor_numpy() -> None:
    program = (
        "import sys, modelzoo.profile\n"
        "modelzoo.profile.load_profile('table1')\n"
        "print(sorted({'onnx', 'onnxruntime', 'numpy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
