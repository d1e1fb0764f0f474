"""Chat templates that show functions, in the known ways, for the default model's tokens."""

_MESSAGES = """
{%- for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
OPEN{"name": "{{ call.function.name }}", "KEY": {{ call.function.arguments | tojson }}}CLOSE
{%- endfor %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
_TOOLS = """
{%- if tools %}<|im_start|>system
HOW
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{%- endif %}"""


def _template(how: str, opening: str, closing: str, key: str) -> str:
    messages = _MESSAGES.replace("OPEN", opening).replace("CLOSE", closing).replace("KEY", key)
    return _TOOLS.replace("HOW", how) + messages


HERMES = _template(
    "Call a function inside <tool_call></tool_call>:", "<tool_call>\n", "\n</tool_call>",
    "arguments",
)  # fmt: skip
MISTRAL = _template("[AVAILABLE_TOOLS]", "[TOOL_CALLS][", "]", "arguments")
LLAMA = _template(
    'Respond in the format {"name": function name, "parameters": dictionary}.', "", "", "parameters"
)
UNKNOWN = _template("Call a function with <|call|>.", "<|call|>", "", "args")
