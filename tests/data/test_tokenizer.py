"""Pretrained tokenizers from a local folder, and what is said of those that cannot be used."""

import functools
import shutil

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mup_tpu.config import DataConfig
from mup_tpu.data.cache import fingerprint, load_cache
from mup_tpu.data.corpus import ByteTokenizer, SubwordTokenizer, is_held_out, read_documents, save_stock
from mup_tpu.errors import DataError


@pytest.fixture(scope="module")
def gpt2_folder(corpus, tmp_path_factory):
    """A tokenizer like GPT-2's as transformers saves one; its end of text is its last token, not token 0."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2TokenizerFast

    folder = tmp_path_factory.mktemp("gpt2")
    trained = ByteLevelBPETokenizer()
    trained.train([str(file) for file in sorted(corpus.glob("*.txt"))[:20]], 700, show_progress=False)
    trained.add_special_tokens(["<|endoftext|>"])
    trained.save(str(folder / "trained.json"))
    GPT2TokenizerFast(
        tokenizer_file=str(folder / "trained.json"), eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    ).save_pretrained(folder)
    (folder / "trained.json").unlink()
    return folder


def test_tokens_are_those_of_transformers_and_documents_end_with_its_end_of_text(gpt2_folder, corpus):
    from transformers import AutoTokenizer

    config = DataConfig(corpus=str(corpus), tokenizer=str(gpt2_folder), validation_fraction=0.2)
    cache = load_cache(config)
    reference = AutoTokenizer.from_pretrained(gpt2_folder)
    held_out = [d.text for d in read_documents(config) if is_held_out(d, 0.2)]
    expected = [t for text in held_out for t in [*reference(text)["input_ids"], reference.eos_token_id]]
    assert np.array_equal(cache.tokens["validation"], expected)
    assert cache.tokenizer.vocab_size == len(reference)
    assert cache.tokenizer.separator == reference.eos_token_id != 0
    assert cache.tokenizer.decode(cache.tokens["validation"][:50]) == reference.decode(expected[:50])


def test_fingerprint_is_that_of_the_tokenizer_not_of_its_folder(gpt2_folder, corpus, tmp_path):
    copy = shutil.copytree(gpt2_folder, tmp_path / "copy")
    names = {
        fingerprint(DataConfig(corpus=str(corpus), tokenizer=name))
        for name in (str(gpt2_folder), str(copy), "bytes")
    }
    assert len(names) == 2


def test_a_folder_without_a_tokenizer(corpus, tmp_path):
    with pytest.raises(DataError, match="tokenizer .* cannot be loaded") as caught:
        load_cache(DataConfig(corpus=str(corpus), tokenizer=str(tmp_path)))
    assert "\n" not in str(caught.value)


STOCK = functools.cache(lambda: ByteTokenizer().stock())


@given(st.text())
@example("".join(map(chr, range(0x180))))  # all letters of ByteLevel's alphabet, and byte 0
def test_stock_byte_tokenizer_has_the_ids_of_training(text):
    ids = STOCK().encode(text).ids
    assert ids == ByteTokenizer().encode([text])[0].tolist()
    assert STOCK().decode(ids, skip_special_tokens=False) == text


def test_stock_byte_tokenizer_has_a_token_for_every_byte():
    """Those of ByteLevel's alphabet: in any order a text comes back as it was, though not by the same ids."""
    assert STOCK().get_vocab_size() == len({STOCK().id_to_token(b) for b in range(256)}) == 256
    every = bytes(range(256))
    assert STOCK().decode(list(every), skip_special_tokens=False) == every.decode(errors="replace")


def test_a_saved_stock_tokenizer_has_the_ids_of_training_whatever_a_pretrained_one_adds(corpus, tmp_path):
    """As those of Llama do, which put a token before each text, and training does not."""
    from tokenizers import processors
    from transformers import AutoTokenizer

    trained = SubwordTokenizer.train([file.read_text() for file in sorted(corpus.glob("*.txt"))[:20]], 300)
    adds = trained.stock()
    adds.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    pretrained = SubwordTokenizer(adds, separator=0)
    save_stock(pretrained, 32, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert adds.encode("None of it").ids[0] == 0
    ids = loaded("None of it")["input_ids"]
    assert ids == pretrained.encode(["None of it"])[0].tolist() and 0 not in ids
    ends = (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id)
    assert ends == (0, 0, 0) and loaded.model_max_length == 32
