"""JSON inside of a text that a client sends."""

import json

from outrider.serving.errors import InvalidArgument


def json_value(field: str, text: str) -> object:
    """What the text says. Raises InvalidArgument naming the field."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field, text, f"JSON: {error}") from error
