"""The flag that names the layers whose hidden states the target offers. Knows no torch."""

from outrider.serving.errors import ConfigurationError

FLAG = "feature-layers"


def parse_feature_layers(text: str) -> tuple[int, ...]:
    """The layers of a comma list, ascending; none for an empty one. Raises ConfigurationError."""
    if not text.strip():
        return ()
    layer_ids = []
    for part in text.split(","):
        number = part.strip()
        if not (number.isascii() and number.isdigit()) or len(number) > 6:
            raise ConfigurationError(
                f"{FLAG} is {text!r}: {number!r} is not a layer, must be numbers like 2,15,27"
            )
        layer_ids.append(int(number))
    for layer_id in layer_ids:
        if layer_ids.count(layer_id) > 1:
            raise ConfigurationError(f"{FLAG} is {text!r}: layer {layer_id} is named twice")
    return tuple(sorted(layer_ids))
