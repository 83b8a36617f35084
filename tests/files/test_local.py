"""Local folders: short ones for sockets, and a checkout that its own commands need."""

import tempfile
from pathlib import Path

import pytest

from mup_tpu.files.local import for_sockets, is_needed


@pytest.mark.parametrize(("letters", "is_short"), [(20, True), (21, False)])
def test_sockets_lie_in_the_default_place_unless_its_path_is_long(letters, is_short, monkeypatch):
    place = "/" + "x" * (letters - 1)
    monkeypatch.setattr(tempfile, "tempdir", place)
    with for_sockets():
        assert tempfile.gettempdir() == (place if is_short else "/tmp")
    assert tempfile.gettempdir() == place


def test_the_folder_of_this_package_is_needed_and_no_other(tmp_path):
    checkout = Path(__file__).parents[2]
    assert is_needed(str(checkout))
    assert not is_needed(str(checkout.parent)) and not is_needed(str(tmp_path))
