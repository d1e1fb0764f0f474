import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from gateway.detokenizer import Detokenizer
from outrider.serving.model_source import DEFAULT_MODEL, resolve_model
from outrider.serving.tokenizer import Vocabulary, load_tokenizer

PIECES = ["▁", "▁a", "b", "▁▁", "é", "▁世", "界", "😀", "<", "s", ">"]


def sentencepiece_like(directory, decoder) -> Vocabulary:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    tokenizer = Tokenizer(
        models.BPE(
            {token: token_id for token_id, token in enumerate(tokens)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(f'{{"vocab_size": {len(tokens) + 5}}}')
    return load_tokenizer(directory)


def decoder_that_strips():
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


@pytest.fixture(scope="module", params=["byte_level", "strip", "metaspace", "kept"])
def vocabulary(request, tmp_path_factory) -> Vocabulary:
    if request.param == "byte_level":
        return load_tokenizer(resolve_model(DEFAULT_MODEL).path)
    decoder = {
        "strip": decoder_that_strips(),
        "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        "kept": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()]),
    }[request.param]
    return sentencepiece_like(tmp_path_factory.mktemp(request.param), decoder)


def deltas(vocabulary, pushes, **options):
    detokenizer = Detokenizer(vocabulary, **options)
    return [*(detokenizer.push(ids) for ids in pushes), detokenizer.finish()]


@given(data=st.data(), skip_special=st.booleans(), continues_text=st.booleans())
def test_deltas_of_any_ids_in_any_pushes_join_to_the_whole_text(
    vocabulary, data, skip_special, continues_text
):
    # Low ids are special tokens and single bytes, which is where the cuts inside characters are.
    ids = st.integers(0, vocabulary.vocab_size - 1) | st.integers(0, 260)
    pushes = data.draw(st.lists(st.lists(ids, max_size=5), max_size=12))
    whole = vocabulary.decode(
        [token_id for push in pushes for token_id in push],
        skip_special=skip_special,
        continues_text=continues_text,
    )
    options = {"skip_special": skip_special, "continues_text": continues_text}
    assert "".join(deltas(vocabulary, pushes, **options)) == whole


@given(text=st.text(max_size=30))
def test_no_delta_of_a_text_has_half_a_character(vocabulary, text):
    ids = vocabulary.encode(text, parse_special=False, add_bos=False)
    whole = vocabulary.decode(ids, skip_special=True, continues_text=True)
    if "\ufffd" in whole:
        return
    parts = deltas(
        vocabulary, [[token_id] for token_id in ids], skip_special=True, continues_text=True
    )
    assert all("\ufffd" not in part for part in parts)
    assert "".join(parts) == whole


def test_a_character_of_several_tokens_comes_with_its_last_token():
    vocabulary = load_tokenizer(resolve_model(DEFAULT_MODEL).path)
    ids = vocabulary.encode("🧬", parse_special=False, add_bos=False)
    assert len(ids) > 1
    parts = deltas(vocabulary, [[i] for i in ids], skip_special=True, continues_text=False)
    assert parts == [*[""] * (len(ids) - 1), "🧬", ""]


def test_a_text_that_ends_inside_a_character_ends_with_a_replacement_character():
    vocabulary = load_tokenizer(resolve_model(DEFAULT_MODEL).path)
    ids = vocabulary.encode("ok 🧬", parse_special=False, add_bos=False)[:-1]
    parts = deltas(vocabulary, [[i] for i in ids], skip_special=True, continues_text=False)
    assert parts[-1] == "\ufffd"
    assert "\ufffd" not in "".join(parts[:-1])


def test_special_tokens_are_left_out_or_shown_as_asked():
    vocabulary = load_tokenizer(resolve_model(DEFAULT_MODEL).path)
    ids = vocabulary.encode("a<|im_end|>b", parse_special=True, add_bos=False)
    assert deltas(vocabulary, [ids], skip_special=True, continues_text=False) == ["ab", ""]
    shown = deltas(vocabulary, [ids], skip_special=False, continues_text=False)
    assert shown == ["a<|im_end|>b", ""]


def test_the_first_words_space_goes_unless_the_ids_continue_a_text(tmp_path):
    vocabulary = sentencepiece_like(tmp_path, decoder_that_strips())
    ids = vocabulary.encode(" ab a", parse_special=False, add_bos=False)
    first = deltas(vocabulary, [[i] for i in [1, *ids]], skip_special=True, continues_text=False)
    later = deltas(vocabulary, [[i] for i in [1, *ids]], skip_special=True, continues_text=True)
    assert "".join(first) == "ab a"
    assert "".join(later) == " ab a"


def test_an_id_outside_the_vocabulary_is_refused(vocabulary):
    detokenizer = Detokenizer(vocabulary, skip_special=True, continues_text=False)
    with pytest.raises(ValueError, match="is not in the vocabulary of"):
        detokenizer.push([vocabulary.vocab_size])
