"""YAML of others: plain values of files with programs' tags, and a sentence for the rest."""

import pytest

from mup_tpu.analysis.ingest.files import read_yaml


def bomb(line):
    """Nine levels, each of which holds the one before nine times."""
    levels = "bcdefghi"
    return "a: &a {x: 1}\n" + "".join(
        line.format(name=name, nine=",".join([f"*{before}"] * 9))
        for before, name in zip("a" + levels, levels, strict=False)
    )


@pytest.mark.parametrize(
    "text, sentence",
    [
        (bomb("{name}: &{name} [{nine}]\n"), "more than 200,000 values with its aliases written out"),
        (bomb("{name}: &{name}\n  <<: [{nine}]\n"), "more than 200,000 values"),
        ("a: &a [*a]", "more than 200,000 values"),
        ("- " * 1500, "nested too deeply"),
        ("a: b: c", r"mapping values are not allowed here .*line 1"),
        ("a: 1\na: 2", "duplicate key"),
        ("a: \x00", "special characters are not allowed"),
    ],
)
def test_yaml_that_cannot_be_read_gets_a_sentence(text, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        read_yaml(text)
    assert "\n" not in str(error.value)


def test_tags_of_programs_are_read_as_their_contents_and_nothing_is_called():
    text = (
        "a: !!python/tuple [1, 2]\nb: !!python/object:x.Y {z: 1e-3}\nc: !!python/object/apply:os.abort []\n"
    )
    assert read_yaml(f"{text}d: &d !Name text\ne: *d\n") == {
        "a": [1, 2], "b": {"z": 0.001}, "c": [], "d": "text", "e": "text"
    }  # fmt: skip
