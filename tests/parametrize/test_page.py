"""The page about models of one's own: its code runs as it stands."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "your_own_model.md"


@pytest.mark.nightly
def test_the_code_of_the_page_can_be_pasted(capsys):
    pytest.importorskip("transformers")
    names: dict[str, object] = {}
    # GPT-2's defaults are 12 layers and 50 k words.
    page = PAGE.read_text().replace("GPT2Config(", "GPT2Config(n_layer=1, vocab_size=64, ")
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        exec(block, names)
    said = capsys.readouterr().out
    assert "model.layers.1.mlp.down_proj.weight" in said
    assert re.search(r"^no layer grows with width", said, re.M), said
