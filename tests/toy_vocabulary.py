"""A vocabulary of 24 ids: a few characters of JSON, some of them together, two special tokens and
one id that has no token.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.serving.tokenizer import Vocabulary, load_tokenizer

SIGNS = ("{", "}", '"', ":", ",", "a", "b", "c", "1", "2", "-", "[", "]", "Ġ", "Ċ")
PAIRS = (("{", '"'), ('"', ":"), ("a", "b"), ("1", "2"), ('"', ","), ('"', "}"))
EOS_TOKEN_ID = len(SIGNS) + len(PAIRS)
VOCAB_SIZE = 24


def toy_vocabulary(directory: Path) -> Vocabulary:
    """Reads it from files that it writes."""
    tokens = (*SIGNS, *map("".join, PAIRS))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(PAIRS)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", "<x>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "eos_token_id": EOS_TOKEN_ID}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return load_tokenizer(directory)
