"""Tokenizers of checkpoint directories, against transformers reading the same directory."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_corpus import (
    SPECIAL_LOOKALIKES,
    TEXTS,
    byte_level_tokenizer,
    save,
    sentencepiece_like_tokenizer,
    texts,
)
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from outrider.serving.tokenizer import load_tokenizer
from outrider.serving.tokenizer_parts import UnsupportedTokenizer

BUILDERS = {
    "byte_level": byte_level_tokenizer,
    "prepend": lambda: sentencepiece_like_tokenizer("prepend"),
    "first": lambda: sentencepiece_like_tokenizer("first"),
    "never": lambda: sentencepiece_like_tokenizer("never"),
}


@pytest.fixture(scope="module", params=BUILDERS)
def pair(request, tmp_path_factory):
    """Our vocabulary and transformers' tokenizer of one directory."""
    directory = save(
        tmp_path_factory.mktemp(request.param),
        BUILDERS[request.param](),
        bos_token="<s>",
        eos_token="</s>",
    )
    return load_tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)


def assert_equal(pair, text):
    ours, theirs = pair
    ids = ours.encode(text, parse_special=True, add_bos=True)
    assert ids == theirs(text).input_ids, text
    for skip_special in (False, True):
        assert ours.decode(ids, skip_special=skip_special) == theirs.decode(
            ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        ), text


def test_ids_and_texts_equal_transformers_on_the_corpus(pair):
    for text in (*TEXTS, *SPECIAL_LOOKALIKES, "a  <mask>  b<tool>c <mask>", "\n".join(TEXTS)):
        assert_equal(pair, text)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(texts | st.sampled_from(["<s>", "</s>", "<mask>"]), max_size=5).map("".join))
def test_ids_and_texts_equal_transformers_on_random_text(pair, text):
    assert_equal(pair, text)


@given(text=st.lists(texts | st.sampled_from(["<s>", "</s>", "<mask>"]), max_size=5).map("".join))
def test_plain_text_never_becomes_a_special_token(pair, text):
    ours, _ = pair
    ids = ours.encode(text, parse_special=False, add_bos=False)
    unknown = {ours.special.ids_by_text.get("<unk>")}
    assert (ours.special_token_ids - unknown).isdisjoint(ids)
    if "\u2581" not in text:
        assert ours.decode(ids, skip_special=True) == text or text.startswith(" ")


@given(data=st.data())
def test_any_ids_decode_as_transformers_does_where_the_bytes_are_a_text(pair, data):
    ours, theirs = pair
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=12))
    text = ours.decode(ids, skip_special=True)
    if "\ufffd" not in text:
        assert text == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("has_space_prefix", [False, True])
def test_merges_that_spell_a_special_token_are_cut_apart(tmp_path, has_space_prefix):
    tokens = ["<s>", "<", "s", ">", "s>", "a", "\u2581"]
    tokenizer = Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, [("s", ">"), ("<", "s>")])
    )
    if has_space_prefix:
        tokenizer.normalizer = normalizers.Prepend("\u2581")
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    vocabulary = load_tokenizer(save(tmp_path, tokenizer))
    first = [6] if has_space_prefix else []

    def plain(text):
        return vocabulary.encode(text, parse_special=False, add_bos=False)

    assert vocabulary.encode("a<s>", parse_special=True, add_bos=False) == [*first, 5, 0]
    assert plain("a<s>") == [*first, 5, 1, 4]
    assert plain("<s>a<s>") == [*first, 1, 4, 5, 1, 4]
    assert plain("<s>" * 5000) == [*first, *[1, 4] * 5000]


def test_end_tokens_are_the_union_of_what_all_files_say(tmp_path):
    directory = save(tmp_path, byte_level_tokenizer(), eos_token="</s>")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 9, "vocab_size": 1000}))
    vocabulary = load_tokenizer(directory)
    assert vocabulary.eos_token_ids == (7, 9, vocabulary.special.ids_by_text["</s>"])
    assert vocabulary.vocab_size == 1000
    assert vocabulary.decode([999], skip_special=False) == ""


def test_the_beginning_token_follows_the_post_processor_unless_the_settings_say_otherwise(tmp_path):
    tokenizer = byte_level_tokenizer()
    by_post_processor = load_tokenizer(save(tmp_path / "a", tokenizer, bos_token="<s>"))
    by_settings = load_tokenizer(
        save(tmp_path / "b", tokenizer, bos_token="<s>", add_bos_token=False)
    )
    assert by_post_processor.encode("a", parse_special=True, add_bos=True)[0] == 0
    assert by_post_processor.encode("a", parse_special=True, add_bos=False)[0] != 0
    assert by_settings.encode("a", parse_special=True, add_bos=True)[0] != 0


@pytest.mark.parametrize(
    "template",
    ["plain", [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "plain"}]],
)
def test_a_chat_template_is_found_in_the_settings_and_its_own_file_wins(tmp_path, template):
    directory = save(tmp_path, byte_level_tokenizer(), chat_template=template)
    assert load_tokenizer(directory).chat_template == "plain"
    (directory / "chat_template.jinja").write_text("own file")
    assert load_tokenizer(directory).chat_template == "own file"


def test_the_hash_tells_other_tokens_ids_merges_and_pre_tokenizers_apart(tmp_path):
    state = json.loads(byte_level_tokenizer().to_str())
    swapped = json.loads(json.dumps(state))
    vocabulary = swapped["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    remerged = json.loads(json.dumps(state))
    remerged["model"]["merges"] = remerged["model"]["merges"][::-1]
    resplit = json.loads(json.dumps(state))
    resplit["pre_tokenizer"] = resplit["pre_tokenizer"]["pretokenizers"][1]
    unspecial = json.loads(json.dumps(state))
    unspecial["added_tokens"][3]["special"] = False
    hashes = []
    for index, changed in enumerate((state, state, swapped, remerged, resplit, unspecial)):
        tokenizer = Tokenizer.from_str(json.dumps(changed))
        hashes.append(load_tokenizer(save(tmp_path / str(index), tokenizer)).sha256)
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 5


def test_files_that_cannot_be_used_are_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedTokenizer, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UnsupportedTokenizer, match=r"tokenizer\.json is not valid JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(UnsupportedTokenizer, match="no model with a vocabulary"):
        load_tokenizer(tmp_path)
    save(tmp_path, byte_level_tokenizer())
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UnsupportedTokenizer, match=r"config\.json holds a list"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(UnsupportedTokenizer, match="eos_token_id is 'x'"):
        load_tokenizer(tmp_path)
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        load_tokenizer(save(tmp_path, tokenizer))
