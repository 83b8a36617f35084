"""Corpora: what is read, in which order, and what is refused in which words."""

import shutil
from pathlib import Path

import pytest

from mup_tpu.config import DataConfig
from mup_tpu.data import load
from mup_tpu.data.corpus import grouped, is_held_out, read_documents
from mup_tpu.errors import DataError


def test_embedded_corpus_is_249_addresses():
    documents = list(read_documents(DataConfig()))
    assert len(documents) == 249
    assert documents[0].name.startswith("1790") and documents[0].text.startswith("Fellow")
    assert 12_000_000 < sum(len(d.text.encode()) for d in documents) < 12_400_000


def test_folder_is_a_document_a_file_in_sorted_order(tmp_path):
    """Also one that is linked into itself."""
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("three")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "notes.md").write_text("no")
    assert [(d.name, d.text) for d in read_documents(DataConfig(corpus=str(tmp_path)))] == [
        ("a.txt", "one"), ("b.txt", "two"), ("sub/a.txt", "three"),
    ]  # fmt: skip


def test_single_file_is_cut_at_blank_lines_and_loses_nothing(tmp_path):
    text = "\n\n".join(f"paragraph {i} " + "word " * 60 for i in range(100))
    (tmp_path / "book.txt").write_text(text)
    documents = list(read_documents(DataConfig(corpus=str(tmp_path / "book.txt"))))
    assert len(documents) > 5
    assert "\n\n".join(d.text for d in documents) == text


def test_items_are_grouped_up_to_the_first_that_makes_the_size():
    assert list(grouped("abcdefg", lambda letter: 2, 4)) == [["a", "b"], ["c", "d"], ["e", "f"], ["g"]]
    assert list(grouped([9, 1, 2], lambda size: size, 3)) == [[9], [1, 2]]


def test_split_is_by_document_and_adding_documents_moves_none(corpus, tmp_path):
    documents = list(read_documents(DataConfig(corpus=str(corpus))))
    held_out = {d.name for d in documents if is_held_out(d, 0.2)}
    assert 0.1 < len(held_out) / len(documents) < 0.3
    more = shutil.copytree(corpus, tmp_path / "more")
    (more / "000.txt").write_text("a new document, first of all by its name")
    assert {d.name for d in read_documents(DataConfig(corpus=str(more))) if is_held_out(d, 0.2)} - {
        "000.txt"
    } == held_out


@pytest.mark.parametrize(
    ("files", "corpus", "sentence"),
    [
        ({}, "nothing.txt", "neither 'sotu' nor an existing file or folder"),
        ({"notes.md": b"x"}, "", r"holds no \*\.txt, "),
        ({"a.txt": b""}, "a.txt", "is empty"),
        ({"a.txt": b" \n", "b.txt": b""}, "", "is empty"),
        ({"a.txt": b"caf\xe9 au lait"}, "a.txt", r"a\.txt is not UTF-8 at byte 3"),
        ({"a.txt": b"all work and no play " * 2000}, "a.txt", "has 0 held-out tokens"),
        ({"a.txt": b"too short"}, "a.txt", r"\d+ training tokens, but batch_size 16 x .* 128 needs 2177"),
    ],
)
def test_unusable_corpora_are_refused_in_one_sentence(files, corpus, sentence, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=sentence) as caught:
        load(DataConfig(corpus=str(tmp_path / corpus), validation_fraction=1e-9))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("nowhere"), Path.mkdir])
def test_what_is_no_file_is_refused_by_name(make, tmp_path):
    (tmp_path / "a.txt").write_text("one")
    make(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"corpus file .*/b\.txt is not a file"):
        load(DataConfig(corpus=str(tmp_path)))
