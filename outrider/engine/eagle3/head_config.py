"""The description of an EAGLE-3 head (arXiv 2503.01840) as it is published.

Two layouts: the flat config.json of SafeAILab and SpecForge, and that of the speculators library,
which wraps the layer's own settings. A setting that would change the result and is not implemented
is refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from outrider.engine.errors import ConfigError
from outrider.engine.hf_config import Settings, integer, model_config_of, read_json
from outrider.engine.model_config import ModelConfig, usual_feature_layers

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "EAGLE3LlamaForCausalLM")

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
NESTED_LAYER_IDS = f"eagle_config.{LAYER_IDS}"

# Everything that is read or refused below, or in the reader of the layer's own settings.
KNOWN = frozenset(
    {
        "attention_bias",
        "bias",
        "draft_vocab_size",
        "fc_norm",
        "max_position_embeddings",
        "mlp_bias",
        "norm_before_fc",
        "norm_before_residual",
        "norm_output",
        "partial_rotary_factor",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "use_aux_norm",
        LAYER_IDS,
        # Only with use_sliding_window, which is refused.
        "max_window_layers",
        "layer_types",
        "sliding_window",
    }
)
# A setting of which nothing is known but its name, and that may change the arithmetic.
SUSPICIOUS = re.compile(
    r"norm|bias|scal|multiplier|capping|softcap|residual|window|sliding|rotary|rope|alibi|expert"
    r"|parallel_draft|interleave"
)
KNOWN_NESTED = frozenset({LAYER_IDS, "norm_before_fc", "use_aux_hidden_state"})


# What this project's training says of the target, for people and for the draft service's start.
TARGET_RECORD = "outrider_target"


class LayerIdSource(StrEnum):
    """Where a head says which hidden states it reads, and so what its numbers mean."""

    DEFAULT = "default"
    # Read by vLLM and the speculators library: the residual stream entering layer id.
    INPUTS = LAYER_IDS
    # Read by SGLang: the residual stream leaving layer id, so entering layer id + 1.
    OUTPUTS = NESTED_LAYER_IDS


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureLayers:
    """The hidden states of the target that make a feature, ascending."""

    source: LayerIdSource
    inputs: tuple[int, ...]  # decoder layers that they enter
    stated: tuple[int, ...]  # the numbers as the head's configuration has them

    def words(self) -> str:
        """One line, with both meanings where they differ."""
        inputs = f"input of layers {_listed(self.inputs)}"
        if self.source is LayerIdSource.OUTPUTS:
            return f"{inputs} (output of layers {_listed(self.stated)} by {self.source})"
        return f"{inputs} ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """One decoder layer that reads a token's embedding beside a feature of the target."""

    # The layer's own sizes. Its q, k and v projections read 2 * hidden_size numbers.
    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: FeatureLayers
    norm_before_residual: bool  # the residual stream begins with the normalised feature
    norm_output: bool  # the next draft position reads the output behind the final norm
    norm_before_fc: bool  # a norm over all captured states together
    norm_parts_before_fc: bool  # a norm over each layer's captured states
    fc_bias: bool

    @property
    def hidden_size(self) -> int:
        """Width of the head and of a projected feature."""
        return self.layer.hidden_size

    @property
    def has_whole_vocabulary(self) -> bool:
        """Draft ids are the target's ids."""
        return self.draft_vocab_size == self.layer.vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTarget:
    """The target whose text a head was trained on."""

    name: str
    tokenizer_sha256: str


def read_recorded_target(directory: Path) -> RecordedTarget | None:
    """What a head says of its target; None where it says nothing. Raises ConfigError."""
    record = _object(read_json(directory / "config.json"), TARGET_RECORD)
    if not record:
        return None
    values = []
    for name in ("name", "tokenizer_sha256"):
        value = record.get(name)
        if not isinstance(value, str):
            raise ConfigError(f"config.json: {TARGET_RECORD}.{name} is {value!r}: must be a text")
        values.append(value)
    return RecordedTarget(name=values[0], tokenizer_sha256=values[1])


def read_head_config(directory: Path, target: ModelConfig) -> Eagle3Config:
    """The head of a directory, for a target; raises ConfigError naming the setting."""
    settings = read_json(directory / "config.json")
    is_of_speculators = settings.get("speculators_model_type") is not None
    layer_settings = _speculators_layer(settings) if is_of_speculators else _flat_layer(settings)
    _refuse_unknown(settings)
    _refuse_unknown(layer_settings)
    nested = _object(settings, "eagle_config")
    _refuse_unknown_nested(nested)
    if nested.get("use_aux_hidden_state") is False:
        raise ConfigError(
            "config.json: eagle_config.use_aux_hidden_state is false: features of the last layer "
            "alone are not supported"
        )
    layer = model_config_of(layer_settings, eos_token_ids=())
    if layer.num_layers != 1:
        raise ConfigError(f"config.json: num_hidden_layers is {layer.num_layers}: must be 1")
    target_hidden_size = _size(settings, "target_hidden_size", layer.hidden_size)
    draft_vocab_size = _size(settings, "draft_vocab_size", layer.vocab_size)
    if draft_vocab_size > layer.vocab_size:
        raise ConfigError(
            f"config.json: draft_vocab_size is {draft_vocab_size}: must be at most vocab_size, "
            f"which is {layer.vocab_size}"
        )
    for name, value, bound in (
        ("vocab_size", layer.vocab_size, target.vocab_size),
        ("target_hidden_size", target_hidden_size, target.hidden_size),
    ):
        if value != bound:
            raise ConfigError(f"config.json: {name} is {value}: must be the target's, {bound}")
    norm_before_fc = _flag(settings, "norm_before_fc")
    nested_norm = nested.get("norm_before_fc")
    if nested_norm is not None:
        if settings.get("norm_before_fc") not in (None, nested_norm):
            raise ConfigError(
                f"config.json: norm_before_fc is {norm_before_fc}, and "
                f"eagle_config.norm_before_fc is {nested_norm!r}: must agree"
            )
        norm_before_fc = _flag(nested, "norm_before_fc")
    norm_parts = _flag(settings, "fc_norm") or _flag(settings, "use_aux_norm")
    if norm_before_fc and norm_parts:
        raise ConfigError("config.json: norm_before_fc and fc_norm are both true: must be one")
    return Eagle3Config(
        layer=layer,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target_hidden_size,
        feature_layers=_feature_layers(settings, nested, target.num_layers),
        norm_before_residual=_flag(settings, "norm_before_residual", is_of_speculators),
        norm_output=_flag(settings, "norm_output"),
        norm_before_fc=norm_before_fc,
        norm_parts_before_fc=norm_parts,
        fc_bias=_flag(settings, "bias"),
    )


def _flat_layer(settings: Settings) -> Settings:
    architectures = settings.get("architectures")
    if not isinstance(architectures, list) or not set(architectures) & set(ARCHITECTURES):
        raise ConfigError(
            f"config.json: architectures is {architectures!r}: must name one of "
            f"{', '.join(ARCHITECTURES)}, or speculators_model_type be 'eagle3'"
        )
    return {name: value for name, value in settings.items() if name != "architectures"}


def _speculators_layer(settings: Settings) -> Settings:
    kind = settings["speculators_model_type"]
    if kind != "eagle3":
        raise ConfigError(f"config.json: speculators_model_type is {kind!r}: must be 'eagle3'")
    layer = _object(settings, "transformer_layer_config")
    if not layer:
        raise ConfigError("config.json: transformer_layer_config is missing")
    return {name: value for name, value in layer.items() if name != "architectures"}


def _refuse_unknown(settings: Settings) -> None:
    if settings.get("model_type") not in ("llama", "speculators", "speculator_model", None):
        raise ConfigError(
            f"config.json: model_type is {settings['model_type']!r}: the head's layer must be "
            "'llama'"
        )
    if settings.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window is true: a window is not supported")
    kinds = settings.get("layer_types") or []
    if any(kind != "full_attention" for kind in kinds):
        raise ConfigError(f"config.json: layer_types is {kinds!r}: only 'full_attention'")
    for name, value in settings.items():
        is_off = value is None or value is False or value == [] or value == {}
        if name not in KNOWN and not is_off and SUSPICIOUS.search(name):
            raise ConfigError(
                f"config.json: {name} is {value!r}: it may change the result and is not known"
            )


def _refuse_unknown_nested(nested: Settings) -> None:
    for name, value in nested.items():
        if name not in KNOWN_NESTED and value is not None and value is not False:
            raise ConfigError(
                f"config.json: eagle_config.{name} is {value!r}: it may change the result and is "
                "not known"
            )


def _feature_layers(settings: Settings, nested: Settings, num_layers: int) -> FeatureLayers:
    inputs = _layer_ids(settings, LAYER_IDS, LAYER_IDS)
    outputs = _layer_ids(nested, LAYER_IDS, NESTED_LAYER_IDS)
    if inputs is not None and outputs is not None:
        if inputs != tuple(layer_id + 1 for layer_id in outputs):
            raise ConfigError(
                f"config.json: {LAYER_IDS} (inputs) is {list(inputs)} and {NESTED_LAYER_IDS} "
                f"(outputs) is {list(outputs)}: must name the same hidden states"
            )
    if inputs is not None:
        layers = FeatureLayers(source=LayerIdSource.INPUTS, inputs=inputs, stated=inputs)
    elif outputs is not None:
        layers = FeatureLayers(
            source=LayerIdSource.OUTPUTS,
            inputs=tuple(layer_id + 1 for layer_id in outputs),
            stated=outputs,
        )
    else:
        usual = usual_feature_layers(num_layers)
        layers = FeatureLayers(source=LayerIdSource.DEFAULT, inputs=usual, stated=usual)
    ids = layers.inputs
    if list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= num_layers:
        raise ConfigError(
            f"config.json: feature layers are the {layers.words()}: must be ascending, without "
            f"duplicates and inputs of layers 0 to {num_layers - 1} of the target"
        )
    count = settings.get("num_aux_hidden_states")
    if count is not None and count != len(ids):
        raise ConfigError(
            f"config.json: num_aux_hidden_states is {count!r}: must be {len(ids)}, the number of "
            "feature layers"
        )
    return layers


def _layer_ids(settings: Settings, name: str, words: str) -> tuple[int, ...] | None:
    value = settings.get(name)
    if value is None:
        return None
    # bool is a kind of int.
    if not isinstance(value, list) or not value or any(type(item) is not int for item in value):
        raise ConfigError(f"config.json: {words} is {value!r}: must be a list of layers")
    return tuple(value)


def _object(settings: Settings, name: str) -> Settings:
    value = settings.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json: {name} is {value!r}: must be an object")
    return value


def _flag(settings: Settings, name: str, default: bool = False) -> bool:
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {name} is {value!r}: must be true or false")
    return value


def _size(settings: Settings, name: str, default: int) -> int:
    if settings.get(name) is None:
        return default
    value = integer(settings, name)
    if value < 1:
        raise ConfigError(f"config.json: {name} is {value}: must be at least 1")
    return value


def _listed(ids: tuple[int, ...]) -> str:
    return ", ".join(str(layer_id) for layer_id in ids)
