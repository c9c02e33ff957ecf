from __future__ import annotations

import gzip
import lzma
from pathlib import Path

import numpy as np
import pytest

from clockwright.errors import ConfigError, TraceFormatError
from clockwright.units import NS_PER_MS, NS_PER_S
from traces.arrivals import NS_PER_MINUTE, EvenReplay, TraceReplay
from traces.azure import read_azure_2019, read_azure_2021
from traces.minutes import FunctionKey, MinuteTrace, assign

SAMPLES = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_samples = pytest.mark.skipif(
    not SAMPLES.is_dir(), reason="the samples of the Azure traces are not beside the checkout"
)

HEADER = "HashOwner,HashApp,HashFunction,Trigger,1,2,3"
GOOD = f"{HEADER}\no,a,f,http,1,0,2\no,a,g,timer,1,1,1\n"


def write(directory: Path, text: str, name: str = "day.csv") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_a_day_is_read_as_it_stands(tmp_path: Path) -> None:
    trace = read_azure_2019(write(tmp_path, GOOD))
    assert trace.functions == (
        FunctionKey("o", "a", "f", "http"),
        FunctionKey("o", "a", "g", "timer"),
    )
    assert trace.counts.tolist() == [[1, 0, 2], [1, 1, 1]]
    assert trace.totals.tolist() == [3, 3]
    # Label c is minute c - 1.
    assert trace.first_minute == 0
    assert trace.num_minutes == 3


def test_some_minutes_of_a_day_are_read(tmp_path: Path) -> None:
    text = GOOD.replace(",1,2,3", ",480,481,482")
    assert read_azure_2019(write(tmp_path, text)).first_minute == 479


def test_compressed_files_and_other_line_ends_are_read(tmp_path: Path) -> None:
    expected = read_azure_2019(write(tmp_path, GOOD)).counts.tolist()
    xz, gz = tmp_path / "day.csv.xz", tmp_path / "day.csv.gz"
    xz.write_bytes(lzma.compress(GOOD.encode()))
    gz.write_bytes(gzip.compress(GOOD.replace("\n", "\r\n").encode()))
    assert read_azure_2019(xz).counts.tolist() == expected
    assert read_azure_2019(gz).counts.tolist() == expected
    assert read_azure_2019(write(tmp_path, GOOD.rstrip("\n"))).counts.tolist() == expected


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", 1, "the file is empty"),
        (HEADER, 2, "a header and no functions"),
        ("o,a,f,http,1,0,2\n", 1, "missing 'HashOwner', 'HashApp', 'HashFunction', 'Trigger'"),
        (GOOD.replace(",Trigger", ""), 1, "missing 'Trigger'"),
        (GOOD.replace("HashOwner,HashApp", "HashApp,HashOwner"), 1, "found 'HashApp', 'HashOwner'"),
        (GOOD.replace(",1,2,3\n", "\n"), 1, "no minute columns"),
        (GOOD.replace(",1,2,3\n", ",1,3,4\n"), 1, "minute 2 is missing: found column 3"),
        (GOOD.replace(",1,2,3\n", ",1,2,2\n"), 1, "minute 3 is missing: found column 2"),
        (GOOD.replace(",1,2,3\n", ",0,1,2\n"), 1, "found column '0'"),
        (GOOD.replace(",1,2,3\n", ",1439,1440,1441\n"), 1, "found column '1441'"),
        (GOOD.replace(",1,2,3\n", ",1,2,total\n"), 1, "found column 'total'"),
        (GOOD.replace("timer,1,1,1", "timer,1,-7,1"), 3, "column 2 is '-7', expected a whole"),
        (GOOD.replace("timer,1,1,1", "timer,1,1.5,1"), 3, "column 2 is '1.5'"),
        (GOOD.replace("timer,1,1,1", "timer,1,,1"), 3, "column 2 is ''"),
        (GOOD.replace("timer,1,1,1", "timer,1,1,"), 3, "column 3 is ''"),
        (GOOD.replace("timer,1,1,1", "timer,1,1,nan"), 3, "column 3 is 'nan'"),
        (GOOD.replace("timer,1,1,1", "timer,1,1,3000000000"), 3, "column 3 is '3000000000'"),
        (GOOD.replace("timer,1,1,1", "timer,1,1,99999999999999999999"), 3, "column 3 is"),
        (GOOD.replace("http,1,0,2", "http,1,0"), 2, "found 6 cells, expected 7"),
        (GOOD.replace("http,1,0,2", "http,1,0,2,4"), 2, "found 8 cells, expected 7"),
        (GOOD.replace("\no,a,g", "\n\no,a,g"), 3, "empty line"),
    ],
)
def test_a_bad_day_is_refused_with_file_and_line(
    tmp_path: Path, text: str, line: int, problem: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceFormatError) as caught:
        read_azure_2019(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert problem in str(caught.value)


def test_a_file_that_cannot_be_decoded_is_refused_with_its_line(tmp_path: Path) -> None:
    binary = tmp_path / "day.csv"
    binary.write_bytes(GOOD.encode() + b"\xff\xfe,\n")
    cut = tmp_path / "day.csv.xz"
    cut.write_bytes(lzma.compress(GOOD.encode() * 1000)[:-40])
    for path in (binary, cut):
        with pytest.raises(TraceFormatError, match="cannot be read from here on"):
            read_azure_2019(path)


def test_a_file_that_is_not_there_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_azure_2019(tmp_path / "none.csv")


INVOCATIONS = "app,func,end_timestamp,duration\na,f,10.5,0.5\na,g,12.0,4.0\nb,f,11.25,1.0\n"


def test_invocations_start_before_they_end_and_come_in_order(tmp_path: Path) -> None:
    trace = read_azure_2021(write(tmp_path, INVOCATIONS))
    assert trace.functions == (("a", "f"), ("a", "g"), ("b", "f"))
    assert trace.function.tolist() == [1, 0, 2]
    assert trace.start_ns.tolist() == [0, 2 * NS_PER_S, 2250 * NS_PER_MS]
    assert trace.duration_ns.tolist() == [4 * NS_PER_S, 500 * NS_PER_MS, NS_PER_S]


def test_invocations_become_requests_at_their_times(tmp_path: Path) -> None:
    trace = read_azure_2021(write(tmp_path, INVOCATIONS + "a,g,30.0,1.0\n"))
    asked = [request[:3] for request in trace.workload(["m0", "m1"], slo_ns=5)]
    # Function (a, g) is the most popular one; the contiguous halves are 2 and 1 functions.
    assert asked == [
        (0, 0, 5),
        (2 * NS_PER_S, 0, 5),
        (2250 * NS_PER_MS, 1, 5),
        (21 * NS_PER_S, 0, 5),
    ]
    striped = list(trace.workload(["m0", "m1"], slo_ns=5, striped=True))
    assert [request.model for request in striped] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", 1, "the file is empty"),
        ("app,func,end_timestamp,duration\n", 2, "a header and no invocations"),
        (INVOCATIONS.replace("duration", "length"), 1, "missing 'duration'"),
        (INVOCATIONS.replace("11.25,1.0", "11.25,-1.0"), 4, "duration is -1.0"),
        (INVOCATIONS.replace("12.0,4.0", "noon,4.0"), 3, "end_timestamp is 'noon'"),
        (INVOCATIONS.replace("12.0,4.0", "nan,4.0"), 3, "end_timestamp is 'nan'"),
        (INVOCATIONS.replace("12.0,4.0", "12.0"), 3, "found 3 cells, expected 4"),
    ],
)
def test_bad_invocations_are_refused_with_file_and_line(
    tmp_path: Path, text: str, line: int, problem: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceFormatError) as caught:
        read_azure_2021(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert problem in str(caught.value)


def test_contiguous_assignment_is_that_of_clockworks_client() -> None:
    totals = np.array([1, 50, 3, 40, 5, 30, 7])
    # By total: functions 1, 3, 5, 6, 4, 2, 0; three models of seven functions: floor(3 i / 7).
    assert assign(totals, 3, "contiguous").tolist() == [2, 0, 2, 0, 1, 0, 1]
    assert assign(totals, 3, "striped").tolist() == [0, 0, 2, 1, 1, 2, 0]


def test_more_models_than_functions_leave_models_without_any() -> None:
    assert assign(np.array([9, 5]), 4, "contiguous").tolist() == [0, 2]


def trace_of(*rows: list[int]) -> MinuteTrace:
    keys = tuple(FunctionKey("o", "a", str(n), "timer" if n % 2 else "http") for n in range(4))
    return MinuteTrace(keys[: len(rows)], np.array(rows, np.int32), 100)


def test_minutes_can_be_cut_out() -> None:
    trace = trace_of([1, 2, 3, 4], [5, 6, 7, 8]).between(101, 103)
    assert trace.counts.tolist() == [[2, 3], [6, 7]]
    assert trace.first_minute == 101
    with pytest.raises(ValueError, match="the trace has 101 to 103"):
        trace.between(100, 102)


def test_a_trace_becomes_one_poisson_process_per_function() -> None:
    workload = trace_of([600] * 10, [1200] * 10).workload(["a", "b"], slo_ns=7, scale=0.5, seed=3)
    assert [type(source) for source in workload.sources] == [TraceReplay]
    per_model = np.bincount([request.model for request in workload])
    # The busier function goes to the first model.
    assert per_model == pytest.approx([6000, 3000], rel=0.08)
    assert workload.end_ns == 10 * NS_PER_MINUTE


def test_timers_can_fire_on_the_minute() -> None:
    workload = trace_of([0, 0], [1, 2]).workload(["a"], slo_ns=7, timers="even")
    poisson, even = workload.sources
    assert isinstance(poisson, TraceReplay)
    assert isinstance(even, EvenReplay)
    assert [request.time_ns // NS_PER_S for request in workload] == [0, 60, 90]


@needs_samples
def test_the_published_sample_is_read_whole() -> None:
    trace = read_azure_2019(SAMPLES / "azure2019_500fn_min480-959_invocations.csv.xz")
    assert trace.counts.shape == (500, 480)
    assert trace.totals.sum() == 3_037_902
    # 07:59; the hourly spike is at 08:00.
    assert trace.first_minute == 479
    assert np.count_nonzero(trace.counts[:, 1]) > 1.5 * np.count_nonzero(trace.counts[:, 2])


@needs_samples
def test_the_published_invocations_are_read_whole() -> None:
    trace = read_azure_2021(SAMPLES / "azure2021_first5000_invocations.csv.xz")
    assert len(trace.function) == 5000
    assert len(trace.functions) == 55
