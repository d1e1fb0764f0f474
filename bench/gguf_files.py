"""Writes a GGUF file that is another one with some changes."""

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf

# Written by GGUFWriter itself.
_OWN_FIELDS = {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture"}

Stored = tuple[object, gguf.GGMLQuantizationType]  # a tensor's array and how it is to be read


def architecture_of(reader: gguf.GGUFReader) -> str:
    """The model's kind, with which its own fields' names begin."""
    name: str = reader.fields["general.architecture"].contents()
    return name


def write_changed(
    reader: gguf.GGUFReader,
    output: Path,
    *,
    fields: Mapping[str, object],
    tensor: Callable[[gguf.ReaderTensor], Stored | None],
) -> None:
    """Copies metadata, but for the values in `fields`, and of every tensor what `tensor` makes of
    it; None leaves it out. The file is there once it is whole.
    """
    partial = output.with_name(f"{output.name}.partial")
    writer = gguf.GGUFWriter(partial, architecture_of(reader))
    for field in reader.fields.values():
        if field.name in _OWN_FIELDS:
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = fields.get(field.name, field.contents())
        writer.add_key_value(field.name, value, kind, sub_type=element)
    for stored in reader.tensors:
        changed = tensor(stored)
        if changed is not None:
            data, raw_dtype = changed
            writer.add_tensor(stored.name, data, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(output)
