"""A SentencePiece BPE vocabulary with scores, as the equivalent model of the tokenizers library.

SentencePiece merges the adjacent pair whose union has the best score, leftmost first. A merge
list ranked by the union's score does the same.
"""

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer, decoders, models, normalizers

SPACE_SIGN: Final = "\u2581"


def sentencepiece_tokenizer(
    tokens: Sequence[str],
    *,
    scores: Sequence[float],
    mergeable: Sequence[bool],
    unknown_token_id: int | None,
    adds_space_prefix: bool,
) -> Tokenizer:
    """Build the tokenizer; only `mergeable` tokens can come from text without a marker.

    Control tokens must not be mergeable, else a user's text that spells one would become it.
    """
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = None if unknown_token_id is None else tokens[unknown_token_id]
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _ranked_merges(tokens, scores, mergeable),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_signs = normalizers.Replace(" ", SPACE_SIGN)
    to_text: list[decoders.Decoder] = [
        decoders.Replace(SPACE_SIGN, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if adds_space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_SIGN), to_signs])
        to_text.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = to_signs
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _ranked_merges(
    tokens: Sequence[str], scores: Sequence[float], mergeable: Sequence[bool]
) -> list[tuple[str, str]]:
    ranks = {
        token: (-score, token_id)
        for token_id, (token, score, is_mergeable) in enumerate(
            zip(tokens, scores, mergeable, strict=True)
        )
        if is_mergeable
    }
    merges = [
        (rank, ranks[token[:cut]], (token[:cut], token[cut:]))
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    merges.sort()
    return [pair for _, _, pair in merges]
