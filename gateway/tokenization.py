"""POST /tokenize and /detokenize: what a prompt becomes, and what token ids spell."""

from starlette.requests import Request
from starlette.responses import Response

from gateway.completions import answered
from gateway.fields import Fields, as_integer, as_text
from gateway.generator import Generator
from gateway.http_body import BodyLimits, read_json
from gateway.message_fields import checked_messages
from gateway.openai_request import MAX_INTEGER
from gateway.rest_errors import json_response
from outrider.serving.errors import InvalidArgument


class Tokenization:
    """The two endpoints, with vLLM's names."""

    def __init__(self, generator: Generator, *, body_limits: BodyLimits) -> None:
        self._generator = generator
        self._body_limits = body_limits

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a prompt, or of a conversation as the model's template writes it: those
        that a completion would begin with.
        """

        async def respond() -> Response:
            fields = await self._fields(request)
            prompt, messages = fields.take("prompt"), fields.take("messages")
            if (prompt is None) == (messages is None):
                raise InvalidArgument("prompt", prompt, "a text, or messages instead")
            includes_texts = fields.boolean("return_token_strs")
            if messages is None:
                adds_bos = fields.take("add_special_tokens") in (None, True)
                fields.must_be_neutral("add_special_tokens", (True, False), "true or false")
                fields.refuse_unknown()
                text = as_text("prompt", prompt)
                token_ids = await self._generator.text_tokens(text, adds_bos=adds_bos)
            else:
                fields.must_be_neutral("add_generation_prompt", (True,), "true")
                # The template writes them.
                fields.must_be_neutral("add_special_tokens", (False,), "false")
                fields.refuse_unknown()
                token_ids = await self._generator.chat_tokens(checked_messages(messages))
            texts = None
            if includes_texts:
                texts = [self._generator.text_of("tokens", [token_id]) for token_id in token_ids]
            return json_response(
                {
                    "count": len(token_ids),
                    "max_model_len": self._generator.model().max_sequence_length,
                    "tokens": token_ids,
                    "token_strs": texts,
                }
            )

        return await answered(respond)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""

        async def respond() -> Response:
            fields = await self._fields(request)
            tokens = fields.take("tokens")
            fields.refuse_unknown()
            if not isinstance(tokens, list):
                raise InvalidArgument("tokens", tokens, "a list of token ids")
            token_ids = [
                as_integer(f"tokens[{index}]", token_id, at_least=0, at_most=MAX_INTEGER)
                for index, token_id in enumerate(tokens)
            ]
            return json_response({"prompt": self._generator.text_of("tokens", token_ids)})

        return await answered(respond)

    async def _fields(self, request: Request) -> Fields:
        self._generator.model()
        fields = Fields(await read_json(request, self._body_limits))
        model = fields.text("model")
        if model is not None:
            self._generator.check_model(model)
        return fields
