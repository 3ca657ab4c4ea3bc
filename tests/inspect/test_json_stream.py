"""Reading traces event by event: both forms, every way to be cut off, and memory that does not follow the file."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fsdp_passes.errors import TraceFileError
from fsdp_passes.inspect import json_stream
from fsdp_passes.inspect.json_stream import read_trace
from fsdp_passes.inspect.trace_rank import read_rank

EVENTS = [{"name": f'kernel {{{i}}} \\ " é\u2028', "args": {"list": [[i], {}]}, "ts": i / 3} for i in range(50)]


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    metadata: dict[str, Any] = {}
    return list(read_trace(path, metadata)), metadata


@pytest.mark.parametrize("chunk_chars", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_events_and_metadata_are_those_of_json_wherever_the_window_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_chars: int, indent: int | None
) -> None:
    monkeypatch.setattr(json_stream, "CHUNK_CHARS", chunk_chars)
    before = {"schemaVersion": 12345, "distributedInfo": {"rank": 3}}
    trace = {**before, "traceEvents": EVENTS, "baseTime": 1234567890123}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace, indent=indent))
    assert read(path) == (EVENTS, {**before, "baseTime": 1234567890123})


def test_a_bare_list_of_events_is_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(EVENTS))
    assert read(path) == (EVENTS, {})


def test_gzip_is_told_by_the_content_and_not_by_the_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    assert read(path)[0] == EVENTS


def test_a_comma_behind_the_last_event_is_forgiven(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"a": 1}, ], }')
    assert read(path)[0] == [{"a": 1}]


COMPRESSED = gzip.compress(json.dumps({"traceEvents": EVENTS}).encode())
BAD = {
    "empty": (b"", "an empty file"),
    "text": (b"hello\n", "a file that begins with 'h'"),
    "other JSON": (b'{"model": 1, "layers": []}', "JSON without traceEvents (it has model, layers)"),
    "no events": (b'{"traceEvents": []}', "a trace without events"),
    "cut off in an event": (b'{"traceEvents": [{"a": 1}, {"b', "a trace that is cut off or damaged"),
    "cut off behind an event": (b'{"traceEvents": [{"a": 1}', "a trace that is cut off"),
    "no colon": (b'{"traceEvents" [1]}', "'[' where ':' belongs"),
    "cut off gzip": (COMPRESSED[: len(COMPRESSED) // 2], "a gzip file that is cut off or damaged"),
    "damaged gzip": (COMPRESSED[:40] + b"\0\0\0\0\0\0" + COMPRESSED[46:], "damaged"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_line_that_says_what_to_do(tmp_path: Path, name: str) -> None:
    content, found = BAD[name]
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceFileError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: expected a Chrome trace of torch.profiler, found ")
    assert found in message
    assert "\n" not in message
    assert message.endswith(".")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match=r"no such file\. Check the path"):
        read(tmp_path / "none.json")
    with pytest.raises(TraceFileError, match=r"a folder\. Name the files in it"):
        read(tmp_path)


def test_a_trace_without_work_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1, "cat": "python_function"}]}')
    with pytest.raises(TraceFileError, match=r"no kernel and no operator in it. Record with ProfilerActivity"):
        read_rank(path, 0)


def test_an_event_with_impossible_values_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [{"ph": "X", "name": "a", "ts": "soon", "cat": "kernel"}]}')
    with pytest.raises(TraceFileError, match="could not convert string to float"):
        read_rank(path, 0)


def write_big_trace(path: Path, num_mib: int, *, is_gpu: bool = True) -> int:
    """A trace as the profiler writes one: operators with shapes and, on a GPU, a launch and a kernel of each. Returns
    the number of kernels, on the CPU of outermost operators."""
    shapes = [[8, 4096, 4096], [4096, 4096], [], [], []]
    number = 0
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [\n')
        while file.tell() < num_mib << 20:
            lines = []
            for _ in range(1000):
                number += 1
                at = 10.0 * number
                for name in ("aten::linear", "aten::addmm", "aten::t"):
                    arguments = {"External id": number, "Record function id": 0, "Input Dims": shapes, "Ev Idx": number}
                    lines.append({"ph": "X", "cat": "cpu_op", "name": name, "ts": at, "dur": 8.0, "pid": 1, "tid": 1,
                                  "args": arguments})  # fmt: skip
                if not is_gpu:
                    continue
                lines.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at + 1, "dur": 2.0,
                              "pid": 1, "tid": 1, "args": {"correlation": number, "cbid": 211}})  # fmt: skip
                lines.append({"ph": "X", "cat": "kernel", "name": "gemm", "ts": at + 5, "dur": 9.0, "pid": 0, "tid": 7,
                              "args": {"correlation": number, "stream": 7, "grid": [128, 8, 1], "block": [128, 1, 1],
                                       "registers per thread": 255, "shared memory": 98304}})  # fmt: skip
            file.write(",\n".join(json.dumps(line) for line in lines) + ",\n")
        file.write('{"ph": "M"}]}')
    return number


@pytest.mark.parametrize("is_gpu", [True, False])
def test_memory_stays_bounded_while_the_file_grows(tmp_path: Path, is_gpu: bool) -> None:
    """A file four times as long needs the flat arrays of its kernels more, and nothing that follows its text."""
    peaks, kernels = [], []
    for num_mib in (8, 32):
        path = tmp_path / f"{num_mib}.json"
        kernels.append(write_big_trace(path, num_mib, is_gpu=is_gpu))
        tracemalloc.start()
        trace = read_rank(path, 0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(trace.compute) == kernels[-1]
        del trace
    assert peaks[1] < 16 << 20  # half the file, and mostly the fixed window
    assert (peaks[1] - peaks[0]) / (kernels[1] - kernels[0]) < 320  # bytes a kernel; its text has about 1,200
