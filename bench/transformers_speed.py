"""Tokens per second of Hugging Face transformers on the same model, device and prompts: plain
`generate`, with prompt lookup, and assisted by a smaller model.

    python -m bench.transformers_speed PROMPTS.jsonl MODEL [--assistant MODEL] [--device cuda]

MODEL: a directory of safetensors (`python -m bench.widen DIR --factor 1` writes the default model
as one). One sequence, greedy, every answer of the full length, the modes taking turns prompt by
prompt.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.cluster import first_turns
from outrider.serving.tokenizer import load_tokenizer

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    model = _loaded(options.model, device, dtype)
    modes: dict[str, dict[str, Any]] = {"plain": {}}
    modes["prompt lookup"] = {"prompt_lookup_num_tokens": options.lookup_length}
    if options.assistant is not None:
        modes["assisted"] = {"assistant_model": _loaded(options.assistant, device, dtype)}
    vocabulary = load_tokenizer(options.model)
    prompts = [
        vocabulary.encode(text, parse_special=False, add_bos=False)
        for text in first_turns(options.prompts, options.count)
    ]
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    differ = dict.fromkeys(modes, 0)
    for settings in modes.values():  # kernels are compiled, caches grow
        _generated(model, prompts[0], 16, settings, device)
    for token_ids in prompts:
        plain: list[int] = []
        for mode, settings in modes.items():
            started = time.monotonic()
            answer = _generated(model, token_ids, options.max_tokens, settings, device)
            seconds[mode].append(time.monotonic() - started)
            plain = plain or answer
            differ[mode] += answer != plain
    for mode, each in seconds.items():
        rates = [options.max_tokens / one for one in each]
        total = options.max_tokens * len(each) / sum(each)
        print(
            f"{mode}: {total:.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f}, median "
            f"{statistics.median(rates):.1f}) over {len(each)} prompts, "
            f"{differ[mode]} texts other than plain"
        )
    return 0


def _loaded(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def _generated(
    model: Any, token_ids: Sequence[int], count: int, settings: dict[str, Any], device: torch.device
) -> list[int]:
    """Greedy, exactly so many tokens."""
    inputs = torch.tensor([list(token_ids)], device=device)
    with torch.inference_mode():
        output = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
            **settings,
        )
    answer: list[int] = output[0, len(token_ids) :].tolist()
    return answer


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.transformers_speed")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--assistant", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--count", type=int, default=10, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--lookup-length", type=int, default=5)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
