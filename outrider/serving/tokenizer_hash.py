"""One hash for a tokenizer, by which two services know that their token ids mean the same.

Covered: the text and id of every token (without the `[PAD<id>]` rows with which GGUF files fill
a vocabulary up to the size of the embedding); which of them are special; what normalizer,
pre-tokenizer and merges together make of a fixed probe text. File formats are not covered, so
the same tokenizer in a GGUF file and in tokenizer.json may hash equal; chat templates and end
tokens are not covered either.
"""

import hashlib
import json
from typing import Final

from tokenizers import Tokenizer

from outrider.serving.special_tokens import SpecialTokens

_VERSION: Final = "outrider-tokenizer-1"

# Words, case, contractions, numbers, white space, code, scripts, composed and decomposed letters,
# symbols: whatever pre-tokenizers and normalizers are known to treat differently.
_PROBE: Final = (
    "The quick brown fox can't jump over 13 lazy dogs; WE'LL see, it's 1234567.89 or 1,000!?\n"
    "  leading, trailing  \n\n\n\t\ttabs\r\nand   runs        of spaces \u00a0\u2003 end\n"
    'def f(x: int) -> str:\n    return f"{x!r}" if x >= 0x1F else [a_b.c for _ in range(10)]\n'
    "caf\u00e9 cafe\u0301 \u00c5ngstr\u00f6m \u212b na\u00efve stra\u00dfe \u0130\u0131 \ufb01\n"
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u4f60\u597d\uff0c\u4e16\u754c\u3002 "
    "\u3053\u3093\u306b\u3061\u306f \uc548\ub155 \u0645\u0631\u062d\u0628\u0627 "
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
    "\u0663\u0664 \u00bd\n"
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2192 \u2211 \x00\x07\x1b~`@#$%^&*()+="
)


def tokenizer_sha256(tokenizer: Tokenizer, special: SpecialTokens) -> str:
    """The hash of a tokenizer whose special tokens are not parsed; 64 hexadecimal digits."""
    tokens = sorted(
        (token_id, text)
        for text, token_id in tokenizer.get_vocab(with_added_tokens=True).items()
        if text != f"[PAD{token_id}]"
    )
    covered = [
        _VERSION,
        tokens,
        sorted(special.ids_by_text.values()),
        tokenizer.encode(_PROBE, add_special_tokens=False).ids,
    ]
    text = json.dumps(covered, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
