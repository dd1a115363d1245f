"""The package's folders: which imports which. `make rooms` prints the picture and writes docs/development/rooms.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs import rooms


@pytest.fixture(scope="module")
def imports() -> rooms.Imports:
    return rooms.read_imports()


def test_every_folder_with_code_has_its_place_in_the_order(imports: rooms.Imports) -> None:
    found = {rooms.room_of(module, imports) for module in imports}
    assert found == set(rooms.ORDER)


def test_no_import_goes_up(imports: rooms.Imports) -> None:
    assert rooms.upward(imports) == []


def test_no_modules_import_one_another_in_a_circle(imports: rooms.Imports) -> None:
    assert rooms.circles(imports) == []


def test_no_folders_import_one_another_in_a_circle(imports: rooms.Imports) -> None:
    below: dict[str, set[str]] = {room: set() for room in rooms.ORDER}
    for here, there in rooms.arrows(imports):
        below[here].add(there)
    assert rooms.circles(below) == []


def test_the_page_shows_the_imports_as_they_are(imports: rooms.Imports) -> None:
    print(rooms.picture(imports))
    assert rooms.FILE.read_text() == rooms.page(imports), "make rooms"


def test_an_import_that_goes_up_and_a_circle_are_found(tmp_path: Path) -> None:
    for name, text in {
        "__init__.py": "", "low/__init__.py": "", "high/__init__.py": "",
        "low/a.py": "def f():\n    from pack.high import b\n",
        "low/c.py": "from pack.low.a import f\n",
        "high/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.low.c import f\n",
    }.items():  # fmt: skip
        (tmp_path / "pack" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pack" / name).write_text(text)
    found = rooms.read_imports(tmp_path / "pack")
    assert rooms.upward(found, ("slurm_watchdog", "low", "high")) == ["pack.low.a -> pack.high.b"]
    assert rooms.circles(found) == [["pack.high.b", "pack.low.a", "pack.low.c"]]
    assert rooms.circles({"a": ["b"], "b": ["c"], "c": []}) == []
