"""Cuts a GGUF model to its first layers: a cheap draft model with the same tokenizer.

python -m bench.truncate OUT.gguf [--model smollm2-135m-instruct] [--layers 24]
"""

import argparse
import sys
from pathlib import Path

import gguf

from outrider.serving.model_source import DEFAULT_MODEL, resolve_model

# Written by GGUFWriter itself.
_OWN_FIELDS = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture"}


def truncate(source: Path, output: Path, num_layers: int) -> None:
    """Copies metadata and tensors as they are, but for the layers from `num_layers` on."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    block_count = f"{architecture}.block_count"
    num_blocks = reader.fields[block_count].contents()
    if not 0 < num_layers <= num_blocks:
        raise SystemExit(f"--layers is {num_layers}, must be between 1 and {num_blocks}")
    writer = gguf.GGUFWriter(output, architecture)
    for field in reader.fields.values():
        if field.name in _OWN_FIELDS:
            continue
        value = num_layers if field.name == block_count else field.contents()
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, sub_type=element)
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if parts[0] == "blk" and int(parts[1]) >= num_layers:
            continue
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
