"""The model that all servers compute, in the formats that each reads.

Outrider and llama.cpp read the GGUF file itself. transformers reads a Hugging Face checkpoint with
the very weights of that file, and llama.cpp, so that it can be compared at equal precision too, a
GGUF file in which they are unpacked.
"""

import shutil
from pathlib import Path

import gguf
import torch

from bench.gguf_files import Stored, write_changed
from bench.peers.install import FOLDER
from bench.truncate import truncate
from bench.widen import Widener, write_model, write_tokenizer

UNPACKED = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
}


def hugging_face_checkpoint(model: Path) -> Path:
    """A directory with the weights of a GGUF file in float32, made once."""
    folder = FOLDER / f"{model.stem}-hf"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        # Widened once: every weight is its own and only replica.
        write_model(model, partial, Widener(1, device="cpu", dtype=torch.float32, seed=0))
        write_tokenizer(model, partial)
        partial.rename(folder)
    return folder


def shortened(model: Path, num_layers: int) -> Path:
    """A GGUF file of the first layers, made once: a drafter, where no other is at hand."""
    path = FOLDER / f"{model.stem}-{num_layers}-layers.gguf"
    if not path.exists():
        truncate(model, path, num_layers)
    return path


def unpacked(model: Path, dtype: str) -> Path:
    """A GGUF file with the weights of another in a dtype, norms in float32, made once."""
    path = FOLDER / f"{model.stem}-{dtype}.gguf"
    if path.exists():
        return path

    def weights(tensor: gguf.ReaderTensor) -> Stored:
        kind = UNPACKED[dtype] if len(tensor.shape) > 1 else gguf.GGMLQuantizationType.F32
        return gguf.quantize(gguf.dequantize(tensor.data, tensor.tensor_type), kind), kind

    # What the file says of its own kind is for people; engines read each tensor's.
    write_changed(gguf.GGUFReader(model), path, fields={}, tensor=weights)
    return path
