"""Hugging Face transformers behind as much of the OpenAI API as `outrider bench` asks for: chats
and completions, streamed, greedy, one at a time.

    PEERS_PYTHON transformers_server.py CHECKPOINT --mode plain|lookup|assisted [--port 0]

Run by path, with the environment of the peers: it imports nothing of this project. Prints
`ready http://127.0.0.1:PORT`. A request that comes while another runs waits for it.
"""

import argparse
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

MODES = ("plain", "lookup", "assisted")
UNFINISHED = "\ufffd"  # how a character looks of which bytes are missing


class Generator(Protocol):
    """What answers."""

    model: str

    def prompt_token_ids(self, body: dict[str, Any]) -> list[int]:
        """Of a chat's messages, by the model's template, or of a completion's prompt."""

    def generate(
        self, prompt: list[int], max_tokens: int, *, ignores_eos: bool, emit: Callable[[str], None]
    ) -> int:
        """Hands text to `emit` as it comes; returns the number of tokens."""


class Texts:
    """The streamer that `generate` tells of tokens: hands out text as soon as it is whole.

    A token's text may depend on the tokens before it, so pieces are decoded together with all that
    came since the last line.
    """

    def __init__(self, decode: Callable[[list[int]], str], emit: Callable[[str], None]) -> None:
        self._decode = decode
        self._emit = emit
        self._is_prompt = True
        self._line: list[int] = []
        self._sent = 0
        self.num_tokens = 0

    def put(self, value: Any) -> None:
        """Token ids as a tensor; the first time, those of the prompt."""
        if self._is_prompt:
            self._is_prompt = False
            return
        token_ids = value.reshape(-1).tolist()
        self.num_tokens += len(token_ids)
        self._line += token_ids
        text = self._decode(self._line)
        if text.endswith(UNFINISHED):
            return
        self._send(text)
        if text.endswith("\n"):
            self._line, self._sent = [], 0

    def end(self) -> None:
        """No more comes."""
        self._send(self._decode(self._line))

    def _send(self, text: str) -> None:
        if len(text) > self._sent:
            self._emit(text[self._sent :])
            self._sent = len(text)


class TransformersGenerator:
    """A checkpoint in memory."""

    def __init__(
        self, checkpoint: str, *, mode: str, assistant: str, draft_tokens: int, dtype: str
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        kind = getattr(torch, dtype)
        self.model = f"transformers-{mode}"
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=kind).eval()
        self._settings: dict[str, Any] = {}
        if mode == "lookup":
            self._settings["prompt_lookup_num_tokens"] = draft_tokens
        elif mode == "assisted":
            drafter = AutoModelForCausalLM.from_pretrained(assistant, dtype=kind).eval()
            # How many tokens it drafts, `generate` adapts from there on by itself.
            drafter.generation_config.num_assistant_tokens = draft_tokens
            self._settings["assistant_model"] = drafter

    def prompt_token_ids(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            text = self._tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, tokenize=False
            )
        else:
            text = body["prompt"]
        ids: list[int] = self._tokenizer(text, add_special_tokens="messages" not in body)[
            "input_ids"
        ]
        return ids

    def generate(
        self, prompt: list[int], max_tokens: int, *, ignores_eos: bool, emit: Callable[[str], None]
    ) -> int:
        ids = self._torch.tensor([prompt])
        texts = Texts(lambda ids: self._tokenizer.decode(ids, skip_special_tokens=True), emit)
        self._network.generate(
            input_ids=ids,
            attention_mask=self._torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens if ignores_eos else None,
            streamer=texts,
            pad_token_id=self._tokenizer.pad_token_id or self._network.config.eos_token_id,
            **self._settings,
        )
        return texts.num_tokens


def serve(generator: Generator, port: int) -> ThreadingHTTPServer:
    """A server on a loopback port, 0 for a free one, that is to be run."""
    turn = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # A piece must not wait for the one before it to be acknowledged.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._answer(200, {"object": "list", "data": [{"id": generator.model}]})
            else:
                self._answer(404, {"error": {"message": f"no {self.path} here"}})

        def do_POST(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length))
            if body.get("temperature", 0) != 0 or not body.get("stream"):
                message = "only streamed requests at temperature 0"
                self._answer(400, {"error": {"message": message}})
                return
            with turn:
                self._stream(body)

        def _stream(self, body: dict[str, Any]) -> None:
            is_chat = "messages" in body
            prompt = generator.prompt_token_ids(body)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()

            def emit(text: str) -> None:
                piece = {"delta": {"content": text}} if is_chat else {"text": text}
                self._event({"choices": [{"index": 0, **piece}]})

            count = generator.generate(
                prompt,
                int(body["max_tokens"]),
                ignores_eos=bool(body.get("ignore_eos")),
                emit=emit,
            )
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
            self._event({"choices": [], "usage": usage})
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

        def _event(self, event: dict[str, Any]) -> None:
            event |= {"model": generator.model, "created": int(time.time())}
            self._chunk(f"data: {json.dumps(event)}\n\n".encode())

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            """Says nothing: a line a request would be in what is measured."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--mode", choices=MODES, default="plain")
    parser.add_argument("--assistant", default="", help="checkpoint of mode assisted's drafter")
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    if (arguments.mode == "assisted") != bool(arguments.assistant):
        parser.error("--assistant and --mode assisted belong together")
    generator = TransformersGenerator(
        arguments.checkpoint,
        mode=arguments.mode,
        assistant=arguments.assistant,
        draft_tokens=arguments.draft_tokens,
        dtype=arguments.dtype,
    )
    server = serve(generator, arguments.port)
    print(f"ready http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
