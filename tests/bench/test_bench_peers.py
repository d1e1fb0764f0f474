"""The peers' harness: servers that come up or do not, and transformers behind the OpenAI API."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from bench.peers import contenders
from bench.peers.__main__ import differing_prompts, plans_of
from bench.peers.checkpoints import unpacked
from bench.peers.contenders import Contender, StartError, running
from bench.peers.transformers_server import Texts, serve
from outrider.bench.load import Load
from outrider.bench.measure import Measured, Plan, measure

PLAN = Plan(
    prompts=["one", "two", "three", "four", "five"],
    loads=[Load(concurrency=1), Load(concurrency=4)],
    requests=4,
    warm_up=0,
    max_tokens=6,
    temperature=0.0,
    is_chat=True,
    ignores_eos=True,
    seed=0,
    model="",
)


class Counting:
    """A Generator that says numbers, and how many may be at it at once."""

    model = "counting"

    def __init__(self) -> None:
        self.running = self.most_running = 0

    def prompt_token_ids(self, body: dict[str, Any]) -> list[int]:
        return [0] * len(body["messages"][0]["content"])

    def generate(
        self, prompt: list[int], max_tokens: int, *, ignores_eos: bool, emit: Callable[[str], None]
    ) -> int:
        assert ignores_eos
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        for index in range(max_tokens):
            emit(f"{index} ")
        self.running -= 1
        return max_tokens


@pytest.fixture
def counting() -> Iterator[tuple[Counting, str]]:
    generator = Counting()
    server = serve(generator, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield generator, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def measured_at(url: str, plan: Plan) -> list[Measured]:
    def heard(load: str) -> None: ...

    return asyncio.run(measure(url, plan, name="counting", repetition=0, advance=heard))


def test_a_generator_is_measured_like_any_server_and_answers_one_request_at_a_time(
    counting: tuple[Counting, str],
) -> None:
    generator, url = counting
    alone, together = measured_at(url, PLAN)
    for one in (alone, together):
        assert one.figures.errors == 0, one.figures.first_error
        assert one.figures.output_tokens == 4 * 6
        assert one.figures.inter_token_seconds is not None
    asked = [prompt for prompt in PLAN.prompts]
    assert alone.figures.prompt_tokens <= sum(map(len, asked))
    assert generator.most_running == 1


def test_what_it_cannot_do_is_refused(counting: tuple[Counting, str]) -> None:
    with pytest.raises(Exception, match="only streamed requests at temperature 0"):
        measured_at(counting[1], replace(PLAN, temperature=0.5))


def test_text_is_handed_out_when_its_bytes_are_whole() -> None:
    """Tokens are bytes here; decoding looks at all of a line."""
    pieces: list[str] = []
    texts = Texts(lambda ids: bytes(ids).decode(errors="replace"), pieces.append)
    texts.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for token in "a\u00e9\nb\u20ac".encode():
        texts.put(torch.tensor([token]))
    texts.put(torch.tensor([[ord("c"), ord("d")]]))  # accepted together
    texts.end()
    assert pieces == ["a", "\u00e9", "\n", "b", "\u20ac", "cd"]
    assert texts.num_tokens == 10


def test_a_line_that_ends_inside_a_character_is_not_lost() -> None:
    pieces: list[str] = []
    texts = Texts(lambda ids: bytes(ids).decode(errors="replace"), pieces.append)
    texts.put(torch.tensor([]))
    texts.put(torch.tensor([ord("x"), 0xC3]))
    texts.end()
    assert "".join(pieces) == "x\ufffd"


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(contenders, "FOLDER", tmp_path)
    return tmp_path


def contender(script: str) -> Contender:
    return Contender(
        name="a server",
        command=lambda port: [sys.executable, "-c", script, str(port)],
        ready_path="/",
    )


SLOW_TO_COME_UP = """
import http.server, sys, time
time.sleep(0.3)
http.server.HTTPServer(
    ("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler
).serve_forever()
"""


def test_a_server_runs_from_when_it_answers_until_it_is_stopped(logs: Path) -> None:
    with running(contender(SLOW_TO_COME_UP)) as url:
        assert url.startswith("http://127.0.0.1:")
    assert (logs / "a-server.log").exists()


def test_a_server_that_dies_is_told_with_its_last_words(logs: Path) -> None:
    with (
        pytest.raises(StartError, match=r"a server exited with 3:\nno such model"),
        running(contender("print('no such model'); raise SystemExit(3)")),
    ):
        pass


def test_every_load_has_prompts_of_its_own_as_far_as_there_are_enough() -> None:
    alone, together = plans_of(PLAN)
    assert (alone.loads, together.loads) == ([PLAN.loads[0]], [PLAN.loads[1]])
    assert sorted([*alone.prompts, *together.prompts]) == sorted(PLAN.prompts)
    assert [one.prompts for one in plans_of(replace(PLAN, prompts=["one"]))] == [["one"], ["one"]]


def test_servers_that_saw_other_prompts_are_named(counting: tuple[Counting, str]) -> None:
    (one,) = measured_at(counting[1], replace(PLAN, loads=[Load(concurrency=1)]))
    same = replace(one, name="same")
    other = replace(
        one, name="other", figures=replace(one.figures, prompt_tokens=one.figures.prompt_tokens + 1)
    )
    assert not differing_prompts([one, same])
    (line,) = differing_prompts([one, same, other])
    assert line.startswith("1 at once, run 1: the prompts have ")
    assert line.endswith(f"{other.figures.prompt_tokens} tokens for other")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("bfloat16", 2**-8)])
def test_unpacked_weights_are_the_packed_ones(
    dtype: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.peers.checkpoints.FOLDER", tmp_path)
    packed = tmp_path / "packed.gguf"
    weights = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1
    writer = gguf.GGUFWriter(packed, "llama")
    writer.add_block_count(3)
    writer.add_tensor("blk.0.attn_q.weight", gguf.quantize(weights, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", weights[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    before, after = gguf.GGUFReader(packed), gguf.GGUFReader(unpacked(packed, dtype))
    assert after.fields["llama.block_count"].contents() == 3
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, list(old.shape)) == (new.name, list(new.shape))
        np.testing.assert_allclose(
            gguf.dequantize(new.data, new.tensor_type),
            gguf.dequantize(old.data, old.tensor_type),
            rtol=tolerance,
        )
    assert after.tensors[0].tensor_type == getattr(gguf.GGMLQuantizationType, {
        "float32": "F32", "bfloat16": "BF16"}[dtype])  # fmt: skip
    assert after.tensors[1].tensor_type == gguf.GGMLQuantizationType.F32
