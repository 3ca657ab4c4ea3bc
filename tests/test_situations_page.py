"""Every row of docs/situations.md says what happens, and names a test that exists."""

from __future__ import annotations

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "situations.md").read_text()
ROWS = [line.split("|") for line in PAGE.splitlines() if line.startswith("| ") and "| test |" not in line]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1].strip())
def test_each_situation_has_an_answer_and_a_test_that_exists(row: list[str]) -> None:
    _, situation, answer, test, _ = row
    assert situation.strip()
    assert answer.strip()
    found = re.fullmatch(r" `(tests/[\w/]+\.py)::(test_\w+)` ", test)
    assert found is not None, test
    assert f"def {found[2]}(" in (ROOT / found[1]).read_text()
