"""Cuts a GGUF model to its first layers: a cheap draft model with the same tokenizer.

python -m bench.truncate OUT.gguf [--model smollm2-135m-instruct] [--layers 24]
"""

import argparse
import sys
from pathlib import Path

import gguf

from bench.gguf_files import Stored, architecture_of, write_changed
from outrider.serving.model_source import DEFAULT_MODEL, resolve_model


def truncate(source: Path, output: Path, num_layers: int) -> None:
    """Copies metadata and tensors as they are, but for the layers from `num_layers` on."""
    reader = gguf.GGUFReader(source)
    block_count = f"{architecture_of(reader)}.block_count"
    num_blocks = reader.fields[block_count].contents()
    if not 0 < num_layers <= num_blocks:
        raise SystemExit(f"--layers is {num_layers}, must be between 1 and {num_blocks}")

    def kept(tensor: gguf.ReaderTensor) -> Stored | None:
        parts = tensor.name.split(".")
        if parts[0] == "blk" and int(parts[1]) >= num_layers:
            return None
        return tensor.data, tensor.tensor_type

    write_changed(reader, output, fields={block_count: num_layers}, tensor=kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--layers", type=int, default=24)
    arguments = parser.parse_args()
    truncate(resolve_model(arguments.model).path, arguments.output, arguments.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
