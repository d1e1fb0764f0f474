"""Texts that tokenizers are known to treat differently, and small tokenizers made from them."""

# ruff: noqa: RUF001 - letters that look like others are what this file is for

import json
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = (
    "",
    " ",
    "Hello, world!",
    " leading and trailing ",
    "The quick brown fox can't jump over the lazy dog; WE'LL see, it's theirs.",
    "runs  of   spaces    and\ttabs\t\t\n\n\n  newlines\r\n\r\n   \n end   ",
    "digits 1 12 123 1234 12345  67 3.14159 1,000,000 0x1F ٣٤ ½ ² Ⅷ",
    'def f(x: int) -> str:\n    return f"{x!r}"  # naïve\n\n\nclass A(B):\n\tpass\n',
    "for (let i = 0; i < 10; ++i) { a[i] += b->c ? `x${i}` : '\\n'; }",
    "Grüße aus Köln, déjà vu, café cafe\u0301, Åse \u212b, İı, ﬁne, Straße",
    "Привет мир. Γειά σου Κόσμε. שלום עולם. مرحبا بالعالم. नमस्ते दुनिया. สวัสดีชาวโลก",
    "你好，世界。こんにちは世界。안녕하세요 세계. 𠮷野家",
    "😀 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301\u0323 \u200b\ufeff\u00ad",
    "\x00\x01\x07\x1b[0m\x7f\x85\xa0\u2003\u2028\u3000 controls",
    "→ ∑ ≤ ∞ ♥ ▁ underscore ▁▁ Ġ Ċ ġ €100 £5 @user #tag a_b.c",
    "https://example.org/a?b=c&d=%20e#f mail@example.org C:\\dir\\file.txt",
    "a" * 300 + " " * 70 + "=" * 80,
)

SPECIAL_LOOKALIKES = (
    "<|im_start|>user\nHi<|im_end|>\n",
    "before<|im_end|>after <|im_end|> and <|endoftext|><|endoftext|>",
    "<|im_end|",
    "<<|im_start|>>",
    "<s>one</s> <unk>two<s></s>  three ",
)

texts = st.text(max_size=40) | st.text(
    alphabet=" \n\tabctheADZ'0129.,!?<|>_é世😀\u0301▁", max_size=40
)


def save(directory: Path, tokenizer: Tokenizer, **config: object) -> Path:
    """A checkpoint directory with this tokenizer; `config` goes into tokenizer_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": tokenizer.get_vocab_size()})
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def byte_level_tokenizer() -> Tokenizer:
    """A trained byte-level BPE in the manner of Llama 3, which puts a token first."""
    tokenizer = Tokenizer(models.BPE())
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def sentencepiece_like_tokenizer(space: str) -> Tokenizer:
    """A trained BPE with byte fallback; `space` says who puts the space before a text:
    `prepend` a normalizer, `first` or `never` a Metaspace pre-tokenizer."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if space == "prepend":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=space, split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=space)]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>", "<s>", "</s>", *byte_tokens],
        initial_alphabet=["▁"],
        limit_alphabet=80,
        max_token_length=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.replace(" ", " ▁") for text in TEXTS[2:9]], trainer)
    # Byte tokens came in as special tokens to get their ids; in the model they are plain ones.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    return Tokenizer.from_str(json.dumps(state))
