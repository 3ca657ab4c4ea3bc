"""Reading a Chrome trace event by event: memory for one event, however long the file."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from fsdp_passes.errors import TraceFileError

CHUNK_CHARS = 1 << 20
MAX_VALUE_CHARS = 1 << 26  # an event has a few hundred characters; this bounds what a malformed file can make us read
RECORD_AGAIN = "Write one with torch.profiler's export_chrome_trace(), and copy it only once the program has ended."

_BLANKS = re.compile(r"[ \t\r\n]*")
_decode = json.JSONDecoder(strict=False).raw_decode  # names of kernels may hold raw control characters


def read_trace(path: str | Path, metadata: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every event of the trace in `path`, in the file's order.

    Chrome's two forms are read, {"traceEvents": […], …} and a bare list, plain or gzipped (told by the content, not by
    the name). What else the object holds is put into `metadata` as it comes by, some of it behind the events.

    Raises:
        TraceFileError: there is no such file, it is no trace, it is cut off, or it holds no event.
    """
    try:
        with _open(Path(path)) as file:
            num_events = 0
            for event in _Reader(file, str(path)).events(metadata):
                num_events += 1
                yield event
            if num_events == 0:
                raise TraceFileError(path, "a trace without events", "Call the profiler's step() after each step.")
    except (EOFError, zlib.error) as error:
        raise TraceFileError(path, f"a gzip file that is cut off or damaged ({error})", RECORD_AGAIN) from error
    except gzip.BadGzipFile as error:
        raise TraceFileError(path, f"a damaged gzip file ({error})", RECORD_AGAIN) from error
    except FileNotFoundError as error:
        raise TraceFileError(path, "no such file", "Check the path; each rank writes a file of its own.") from error
    except IsADirectoryError as error:
        raise TraceFileError(path, "a folder", "Name the files in it, for example trace/*.json.gz.") from error
    except OSError as error:
        raise TraceFileError(path, f"an unreadable file ({error.strerror})", "Check its permissions.") from error


def _open(path: Path) -> IO[str]:
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    if is_gzip:
        return cast(IO[str], gzip.open(path, "rt", encoding="utf-8", errors="replace"))
    return path.open(encoding="utf-8", errors="replace")


class _Reader:
    """A window on the text, and the position in it."""

    def __init__(self, file: IO[str], path: str) -> None:
        self._file = file
        self._path = path
        self._text = ""
        self._position = 0
        self._is_at_end = False

    def events(self, metadata: dict[str, Any]) -> Iterator[dict[str, Any]]:
        first = self._next_char()
        if first == "":
            raise TraceFileError(self._path, "an empty file", RECORD_AGAIN)
        if first not in "{[":
            raise TraceFileError(self._path, f"a file that begins with {first!r}", RECORD_AGAIN)
        self._position += 1
        if first == "[":
            yield from self._list()
            return
        has_events = False
        while self._take("}", ",") != "}":
            if self._next_char() == "}":  # a comma behind the last entry
                continue
            key = self._value()
            self._take(":")
            if key == "traceEvents" and self._next_char() == "[":
                self._position += 1
                has_events = True
                yield from self._list()
            else:
                metadata[str(key)] = self._value()
        if not has_events:
            keys = ", ".join(list(metadata)[:4]) or "nothing"
            raise TraceFileError(self._path, f"JSON without traceEvents (it has {keys})", RECORD_AGAIN)

    def _list(self) -> Iterator[dict[str, Any]]:
        while self._take("]", ",") != "]":
            if self._next_char() == "]":
                continue
            event = self._value()
            if isinstance(event, dict):
                yield event

    def _take(self, *expected: str) -> str:
        """Step over one of `expected`; "," may be missing, as it is before a first entry."""
        char = self._next_char()
        if char in expected and char:
            self._position += 1
            return char
        if char == "":
            raise TraceFileError(self._path, "a trace that is cut off", RECORD_AGAIN)
        if "," not in expected:
            raise TraceFileError(self._path, f"{char!r} where {expected[0]!r} belongs", RECORD_AGAIN)
        return ","

    def _next_char(self) -> str:
        """The next character that is not blank, "" at the end of the file."""
        while True:
            blanks = _BLANKS.match(self._text, self._position)
            assert blanks is not None
            self._position = blanks.end()
            if self._position < len(self._text):
                return self._text[self._position]
            if self._is_at_end:
                return ""
            self._read_on()

    def _read_on(self) -> None:
        """Drop what is behind us and read on, at least as much as is left: a long value takes O(log n) attempts."""
        left = self._text[self._position :]
        more = self._file.read(max(CHUNK_CHARS, len(left)))
        self._is_at_end = not more
        self._text = left + more
        self._position = 0

    def _value(self) -> Any:
        self._next_char()
        while True:
            try:
                value, end = _decode(self._text, self._position)
            except ValueError as error:  # cut off at the window's end, or no JSON
                if self._is_at_end or len(self._text) - self._position > MAX_VALUE_CHARS:
                    at_end = self._is_at_end and len(self._text) - self._position < CHUNK_CHARS
                    found = "a trace that is cut off or damaged" if at_end else "damaged JSON"
                    raise TraceFileError(self._path, f"{found} ({error})", RECORD_AGAIN) from error
            else:
                # A number at the window's end may go on behind it.
                if end < len(self._text) or self._is_at_end or isinstance(value, dict | list | str):
                    self._position = end
                    return value
            self._read_on()
