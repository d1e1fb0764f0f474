"""The description of a decoder that the engine builds, whatever file it came from."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outrider.engine.errors import ConfigError
from outrider.engine.rope import RopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder with rotary positions, grouped-query attention and a gated SiLU MLP."""

    family: str  # llama | mistral | qwen2 | qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # of the q, k and v projections
    attention_output_bias: bool
    qk_norm: bool  # RMS norm of each query and key head before the rotation
    eos_token_ids: tuple[int, ...]

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor that the model needs, in the order of its layers.

        Names are those of Hugging Face checkpoints. A tied head has no entry.
        """
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size)
        }
        for index in range(self.num_layers):
            prefix = f"model.layers.{index}."
            for name, shape in self._layer_shapes().items():
                shapes[prefix + name] = shape
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return MappingProxyType(shapes)

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden_size,),
            "self_attn.q_proj.weight": (self.query_size, self.hidden_size),
            "self_attn.k_proj.weight": (self.kv_size, self.hidden_size),
            "self_attn.v_proj.weight": (self.kv_size, self.hidden_size),
            "self_attn.o_proj.weight": (self.hidden_size, self.query_size),
            "post_attention_layernorm.weight": (self.hidden_size,),
            "mlp.gate_proj.weight": (self.intermediate_size, self.hidden_size),
            "mlp.up_proj.weight": (self.intermediate_size, self.hidden_size),
            "mlp.down_proj.weight": (self.hidden_size, self.intermediate_size),
        }
        if self.attention_bias:
            shapes["self_attn.q_proj.bias"] = (self.query_size,)
            shapes["self_attn.k_proj.bias"] = (self.kv_size,)
            shapes["self_attn.v_proj.bias"] = (self.kv_size,)
        if self.attention_output_bias:
            shapes["self_attn.o_proj.bias"] = (self.hidden_size,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = (self.head_dim,)
            shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes


def usual_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs an EAGLE-3 head reads where nothing else is said: a low, a middle
    and a high one. They coincide or do not exist in models of fewer than 7 layers.
    """
    return 2, num_layers // 2, num_layers - 3


def check_model_config(config: ModelConfig) -> ModelConfig:
    """Return the config; raise ConfigError, with value and bound, for an impossible one."""
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"{name} is {value}: must be at least 1")
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"num_heads is {config.num_heads}: must be a multiple of "
            f"num_kv_heads, which is {config.num_kv_heads}"
        )
    if config.head_dim % 2:
        raise ConfigError(f"head_dim is {config.head_dim}: must be even for rotary positions")
    for token_id in config.eos_token_ids:
        if not 0 <= token_id < config.vocab_size:
            raise ConfigError(
                f"end-of-sequence token {token_id} is outside the vocabulary of {config.vocab_size}"
            )
    return config
