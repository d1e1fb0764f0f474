"""The projection that a draft service sends: equal to plain torch, or refused by name."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save

from outrider.engine.errors import CheckpointError
from outrider.engine.feature_projection import (
    METADATA,
    FeatureProjection,
    load_projection,
    serialise_projection,
)
from tests.processor import NEEDS_BFLOAT16

HIDDEN = 64
LAYERS = (1, 3, 4)
WIDTH = 24
EPS = 1e-5
DESCRIPTION = {"layer_ids": list(LAYERS), "row_dtype": "float16", "rms_norm_eps": EPS}


def tensors_of(*names: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    shapes = {
        "fc.weight": (WIDTH, 3 * HIDDEN),
        "fc.bias": (WIDTH,),
        "input_norm.weight": (3 * HIDDEN,),
        **{f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)},
    }
    return {name: 0.1 * torch.randn(shapes[name]) for name in ("fc.weight", *names)}


PART_NORMS = tuple(f"fc_norm.{index}.weight" for index in range(3))


def load(
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype = torch.float32,
    row_dtype: torch.dtype = torch.float16,
) -> FeatureProjection:
    data = serialise_projection(tensors, layer_ids=LAYERS, row_dtype=row_dtype, rms_norm_eps=EPS)
    return load_projection(data, hidden_size=HIDDEN, dtype=dtype)


@pytest.mark.parametrize("row_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "names", [(), ("fc.bias",), ("fc.bias", "input_norm.weight"), PART_NORMS], ids=str
)
def test_rows_are_those_of_plain_torch(names: tuple[str, ...], row_dtype: torch.dtype) -> None:
    tensors = tensors_of(*names)
    captured = torch.randn(16, 3 * HIDDEN)
    normed = captured
    if "input_norm.weight" in names:
        normed = F.rms_norm(captured, (3 * HIDDEN,), tensors["input_norm.weight"], EPS)
    if PART_NORMS[0] in names:
        normed = torch.cat(
            [
                F.rms_norm(part, (HIDDEN,), tensors[name], EPS)
                for name, part in zip(PART_NORMS, captured.chunk(3, dim=1), strict=True)
            ],
            dim=1,
        )
    wanted = normed @ tensors["fc.weight"].T + tensors.get("fc.bias", torch.zeros(WIDTH))
    projection = load(tensors, row_dtype=row_dtype)
    found = projection.project(captured)
    assert (projection.layer_ids, projection.width, found.dtype) == (LAYERS, WIDTH, row_dtype)
    assert found.shape == (16, WIDTH)
    tolerance = 2e-3 if row_dtype == torch.float16 else 1.6e-2
    torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NEEDS_BFLOAT16)]
)
def test_numbers_beyond_float16_become_its_largest_and_keep_their_sign(dtype: torch.dtype) -> None:
    weight = torch.full((WIDTH, 3 * HIDDEN), 1e4)
    weight[1] = -1e4
    found = load({"fc.weight": weight}, dtype).project(torch.ones(8, 3 * HIDDEN, dtype=dtype))
    assert found[0, :2].tolist() == [65504.0, -65504.0]


def test_equal_projections_are_equal_bytes_and_others_have_another_hash() -> None:
    tensors = tensors_of("fc.bias", "input_norm.weight")
    assert load(tensors).sha256 == load(dict(reversed(tensors.items()))).sha256
    other = {**tensors, "fc.bias": tensors["fc.bias"] + 1}
    assert load(other).sha256 != load(tensors).sha256


def with_value(name: str, value: float) -> dict[str, torch.Tensor]:
    tensors = tensors_of(*("fc.bias", "input_norm.weight"))
    tensors[name][..., 0] = value
    return tensors


BAD_TENSORS = {
    "no weight": ({"fc.bias": torch.ones(WIDTH)}, "fc.weight is missing"),
    "one dimension": ({"fc.weight": torch.ones(3 * HIDDEN)}, "fc.weight has shape"),
    "columns": ({"fc.weight": torch.ones(WIDTH, 2 * HIDDEN)}, r"fc.weight has shape \[24, 128\]"),
    "no rows": ({"fc.weight": torch.ones(0, 3 * HIDDEN)}, "fc.weight has shape"),
    "bias": ({**tensors_of(), "fc.bias": torch.ones(WIDTH + 1)}, r"fc.bias has shape \[25\]"),
    "norm": ({**tensors_of(), "input_norm.weight": torch.ones(5)}, "input_norm.weight has shape"),
    "two of three norms": (tensors_of(*PART_NORMS[:2]), "fc_norm.2.weight is missing beside"),
    "both norms": (tensors_of("input_norm.weight", *PART_NORMS), "unexpected beside input_norm"),
    "unknown": ({**tensors_of(), "lm_head.weight": torch.ones(2)}, "lm_head.weight is not part"),
    "fourth norm": ({**tensors_of(), "fc_norm.3.weight": torch.ones(HIDDEN)}, "not part"),
    "nan": (with_value("fc.weight", float("nan")), "fc.weight has values that are not finite"),
    "inf": (with_value("fc.bias", float("inf")), "fc.bias has values that are not finite"),
    "zero": ({"fc.weight": torch.zeros(WIDTH, 3 * HIDDEN)}, "fc.weight is all zero"),
    "integers": (
        {"fc.weight": torch.ones(WIDTH, 3 * HIDDEN, dtype=torch.int32)},
        "fc.weight is stored as I32",
    ),
}


@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_a_tensor_that_does_not_fit_is_refused_by_name(kind: str) -> None:
    tensors, words = BAD_TENSORS[kind]
    with pytest.raises(CheckpointError, match=words):
        load(tensors)


BAD_DESCRIPTIONS = {
    "none": (None, "metadata feature_projection is missing"),
    "not JSON": ("{", "metadata is not JSON"),
    "endless": ("[" * 100_000, "metadata is not JSON"),
    "a list": ("[]", "metadata is not an object"),
    "no layers": ({**DESCRIPTION, "layer_ids": []}, "layer_ids is"),
    "descending": ({**DESCRIPTION, "layer_ids": [4, 3, 1]}, "layer_ids is"),
    "twice": ({**DESCRIPTION, "layer_ids": [1, 1, 3]}, "layer_ids is"),
    "booleans": ({**DESCRIPTION, "layer_ids": [False, True, 2]}, "layer_ids is"),
    "row dtype": ({**DESCRIPTION, "row_dtype": "float32"}, "row_dtype is 'float32'"),
    "eps": ({**DESCRIPTION, "rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    "no eps": ({"layer_ids": [1, 3, 4], "row_dtype": "float16"}, "rms_norm_eps is None"),
}


@pytest.mark.parametrize("kind", BAD_DESCRIPTIONS)
def test_a_description_that_does_not_fit_is_refused_by_name(kind: str) -> None:
    description, words = BAD_DESCRIPTIONS[kind]
    text = description if isinstance(description, str) else json.dumps(description)
    data = save(tensors_of(), metadata=None if description is None else {METADATA: text})
    with pytest.raises(CheckpointError, match=words):
        load_projection(data, hidden_size=HIDDEN, dtype=torch.float32)


@pytest.mark.parametrize("data", [b"", b"12345678", b"\xff" * 64, b"\x02" + bytes(7) + b"{}x"])
def test_bytes_in_another_format_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="feature projection"):
        load_projection(data, hidden_size=HIDDEN, dtype=torch.float32)
