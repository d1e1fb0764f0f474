"""/tokenize and /detokenize: what a completion would begin with, and back."""

import pytest

MODEL = "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "One two <|im_end|> three"}]


def post(ready, path, body, status=200):
    response = ready.client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def test_a_texts_tokens_are_those_that_a_completion_counts_and_spell_it_again(ready):
    text = "Grüße, 世界! <|im_end|> is only text here"
    answer = post(ready, "/tokenize", {"model": MODEL, "prompt": text})
    tokens = answer["tokens"]
    assert answer["count"] == len(tokens) > 5
    (model,) = ready.client.get("/v1/models").json()["data"]
    assert answer["max_model_len"] == model["max_model_len"]
    assert answer["token_strs"] is None
    body = {"model": MODEL, "prompt": text, "max_tokens": 1}
    usage = post(ready, "/v1/completions", body)["usage"]
    assert usage["prompt_tokens"] == len(tokens)
    assert post(ready, "/detokenize", {"tokens": tokens}) == {"prompt": text}


def test_a_conversations_tokens_are_the_templates_with_special_ones(ready):
    answer = post(ready, "/tokenize", {"messages": MESSAGES, "return_token_strs": True})
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1}
    usage = post(ready, "/v1/chat/completions", body)["usage"]
    assert usage["prompt_tokens"] == answer["count"] == len(answer["token_strs"])
    text = post(ready, "/detokenize", {"tokens": answer["tokens"]})["prompt"]
    assert text == "".join(answer["token_strs"])
    assert text.endswith("<|im_start|>assistant\n")
    # The template's own end of a message is a token, the user's spelling of one is not.
    assert answer["token_strs"].count("<|im_end|>") == text.count("<|im_end|>") - 1


def test_without_special_tokens_a_text_is_only_itself(ready):
    whole = post(ready, "/tokenize", {"prompt": "a b"})["tokens"]
    bare = post(ready, "/tokenize", {"prompt": "a b", "add_special_tokens": False})["tokens"]
    assert whole[len(whole) - len(bare) :] == bare


def test_nothing_is_fine(ready):
    assert post(ready, "/detokenize", {"tokens": []}) == {"prompt": ""}
    assert post(ready, "/tokenize", {"prompt": ""})["count"] == 0


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "colour": "red"}, "colour"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "1"}, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_field(ready, path, body, words):
    assert words in post(ready, path, body, 400)["error"]["message"]
