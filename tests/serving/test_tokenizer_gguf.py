"""Tokenizers built from GGUF metadata, against tokenizer.json files and SentencePiece's rule."""

import json
from itertools import pairwise

import gguf
import pytest
from hypothesis import given
from tokenizer_corpus import TEXTS, byte_level_tokenizer, save, sentencepiece_like_tokenizer, texts

from outrider.serving.tokenizer import load_tokenizer
from outrider.serving.tokenizer_parts import UnsupportedTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write(path, *, model, tokens, types, merges=None, scores=None, pre=None, **more):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    for key, value in more.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_uint32
        add(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def written_byte_level(path, tokenizer, **more):
    state = json.loads(tokenizer.to_str())
    tokens = [text for text, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    special = {token["id"]: token["special"] for token in state["added_tokens"]}
    types = [
        NORMAL if i not in special else CONTROL if special[i] else USER_DEFINED
        for i in range(len(tokens))
    ]
    merges = [" ".join(pair) for pair in state["model"]["merges"]]
    return write(path, model="gpt2", tokens=tokens, types=types, merges=merges, **more)


@pytest.fixture(scope="module")
def byte_level_pair(tmp_path_factory):
    """One Llama-3-like tokenizer, as a GGUF file and as a directory."""
    directory = tmp_path_factory.mktemp("byte_level")
    tokenizer = byte_level_tokenizer()
    path = written_byte_level(
        directory / "model.gguf",
        tokenizer,
        pre="llama-bpe",
        bos_token_id=0,
        eos_token_id=1,
        eot_token_id=3,
    )
    return load_tokenizer(path), load_tokenizer(save(directory, tokenizer, bos_token="<s>"))


def test_a_gguf_file_gives_the_same_ids_as_the_tokenizer_json_it_came_from(byte_level_pair):
    from_gguf, from_json = byte_level_pair
    for text in TEXTS:
        ids = from_json.encode(text, parse_special=True, add_bos=True)
        assert from_gguf.encode(text, parse_special=True, add_bos=True) == ids
        assert from_gguf.decode(ids, skip_special=True) == text


def test_the_hash_does_not_depend_on_the_file_format(byte_level_pair):
    from_gguf, from_json = byte_level_pair
    assert from_gguf.sha256 == from_json.sha256


def test_special_ids_come_from_the_metadata(byte_level_pair):
    from_gguf, _ = byte_level_pair
    assert (from_gguf.bos_token_id, from_gguf.eos_token_ids) == (0, (1, 3))
    # Llama 3's family puts the token first where the file does not say.
    assert from_gguf.adds_bos


SPM = json.loads(sentencepiece_like_tokenizer("prepend").to_str())["model"]
SPM_TOKENS = sorted(SPM["vocab"], key=SPM["vocab"].get)
SPM_TYPES = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(SPM_TOKENS) - 259)
# As in real files, a token made earlier has the better score; single characters come after.
SPM_SCORES = [0.0] * 259 + [-float(i) for i in range(len(SPM_TOKENS) - 259)]


def sentencepiece_ids(text: str) -> list[int]:
    """Join the adjacent pair whose union scores best, leftmost first, until none is a token."""
    normal = {t: i for i, t in enumerate(SPM_TOKENS) if SPM_TYPES[i] == NORMAL}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [
            (-SPM_SCORES[normal[a + b]], index)
            for index, (a, b) in enumerate(pairwise(parts))
            if a + b in normal
        ]
        if not joins:
            break
        _, index = min(joins)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    ids = []
    for part in parts:
        ids.extend([normal[part]] if part in normal else [3 + byte for byte in part.encode()])
    return ids


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    path = tmp_path_factory.mktemp("spm") / "model.gguf"
    return load_tokenizer(
        write(path, model="llama", tokens=SPM_TOKENS, types=SPM_TYPES, scores=SPM_SCORES)
    )


def test_sentencepiece_ids_follow_its_rule_on_the_corpus(sentencepiece):
    for text in TEXTS:
        assert sentencepiece.encode(text, parse_special=True, add_bos=False) == sentencepiece_ids(
            text
        ), text


@given(text=texts)
def test_sentencepiece_ids_follow_its_rule_on_random_text(sentencepiece, text):
    ids = sentencepiece.encode(text, parse_special=False, add_bos=False)
    assert ids == sentencepiece_ids(text)
    if "▁" not in text:
        assert sentencepiece.decode(ids, skip_special=True) == text


def test_sentencepiece_defaults_are_those_of_llama(sentencepiece):
    assert (sentencepiece.bos_token_id, sentencepiece.eos_token_ids) == (1, (2,))
    assert sentencepiece.encode("a", parse_special=True, add_bos=True)[0] == 1


def test_text_that_spells_a_control_token_cannot_become_it(tmp_path):
    extra = [token for token in ("<", "/", "s", ">", "</", "s>") if token not in SPM_TOKENS]
    tokens = [*SPM_TOKENS, *extra]
    vocabulary = load_tokenizer(
        write(
            tmp_path / "model.gguf",
            model="llama",
            tokens=tokens,
            types=[*SPM_TYPES, *[NORMAL] * len(extra)],
            scores=[*SPM_SCORES, *map(float, range(len(extra)))],
        )
    )
    ids = vocabulary.encode("a</s>", parse_special=False, add_bos=False)
    assert [tokens[token_id] for token_id in ids[-2:]] == ["</", "s>"]
    assert vocabulary.encode("a</s>", parse_special=True, add_bos=False)[-1] == 2


def test_a_file_without_space_prefix_keeps_the_first_space(tmp_path):
    vocabulary = load_tokenizer(
        write(
            tmp_path / "model.gguf",
            model="llama",
            tokens=SPM_TOKENS,
            types=SPM_TYPES,
            scores=SPM_SCORES,
            add_space_prefix=False,
            add_bos_token=False,
        )
    )
    for text in ("The fox", " The fox", "  x"):
        ids = vocabulary.encode(text, parse_special=False, add_bos=True)
        assert vocabulary.decode(ids, skip_special=True) == text


def test_a_first_word_keeps_its_space_where_it_continues_a_text(sentencepiece):
    ids = sentencepiece.encode("The fox", parse_special=False, add_bos=False)
    assert sentencepiece.decode(ids, skip_special=True) == "The fox"
    assert sentencepiece.decode(ids, skip_special=True, continues_text=True) == " The fox"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "rwkv"}, "'rwkv' is not implemented; known: gpt2, llama"),
        ({"pre": "unheard-of"}, r"pre-tokenizer 'unheard-of' .* known: .*llama-bpe.*smollm"),
        ({"merges": ["ab"]}, "'ab', which is no pair"),
        ({"merges": ["a zz"]}, "that the vocabulary has not"),
        ({"merges": None}, r"tokenizer\.ggml\.merges should be a list, is None"),
        ({"types": [1]}, "token_type has 1 entries .* vocabulary has 3"),
        ({"eos_token_id": 3}, "eos_token_id is 3, outside the vocabulary of 3"),
        ({"model": "llama"}, r"tokenizer\.ggml\.scores should be a list"),
    ],
)
def test_metadata_that_cannot_be_used_is_refused_by_key_and_value(tmp_path, changes, words):
    usable = {
        "model": "gpt2",
        "tokens": ["a", "b", "ab"],
        "types": [1, 1, 1],
        "merges": ["a b"],
        "pre": "gpt-2",
    }
    load_tokenizer(write(tmp_path / "good.gguf", **usable))
    with pytest.raises(UnsupportedTokenizer, match=words):
        load_tokenizer(write(tmp_path / "bad.gguf", **(usable | changes)))
