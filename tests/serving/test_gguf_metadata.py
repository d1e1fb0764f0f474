import struct

import gguf
import pytest

from outrider.serving.gguf_metadata import CorruptGGUF, read_gguf_metadata
from outrider.serving.model_source import DEFAULT_MODEL, resolve_model


def written(path, fill):
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_every_key_of_the_default_model_equals_the_gguf_packages_reading():
    path = resolve_model(DEFAULT_MODEL).path
    theirs = {
        key: field.contents()
        for key, field in gguf.GGUFReader(path).fields.items()
        if not key.startswith("GGUF.")
    }
    assert read_gguf_metadata(path) == theirs


def test_every_value_type_comes_back(tmp_path):
    def fill(writer):
        writer.add_uint8("a", 255)
        writer.add_int8("b", -128)
        writer.add_uint16("c", 65535)
        writer.add_int16("d", -32768)
        writer.add_uint32("e", 2**32 - 1)
        writer.add_int32("f", -(2**31))
        writer.add_float32("g", 0.5)
        writer.add_bool("h", True)
        writer.add_string("i", "naïve 世界")
        writer.add_array("j", [1, -2, 3])
        writer.add_array("k", ["x", "", "é"])
        writer.add_uint64("l", 2**64 - 1)
        writer.add_int64("m", -(2**63))
        writer.add_float64("n", 1e300)

    values = read_gguf_metadata(written(tmp_path / "all.gguf", fill))
    assert [values[key] for key in "abcdefghijklmn"] == [
        255, -128, 65535, -32768, 2**32 - 1, -(2**31), 0.5, True, "naïve 世界", [1, -2, 3],
        ["x", "", "é"], 2**64 - 1, -(2**63), 1e300,
    ]  # fmt: skip
    assert values["h"] is True


def test_a_file_cut_anywhere_is_refused_and_never_read_past_its_end(tmp_path):
    def fill(writer):
        writer.add_array("tokens", ["one", "two"])
        writer.add_array("scores", [1.0, 2.0])
        writer.add_string("name", "x")

    whole = written(tmp_path / "whole.gguf", fill).read_bytes()
    needed = whole.rindex(b"x") + 1
    cut = tmp_path / "cut.gguf"
    for length in range(needed):
        cut.write_bytes(whole[:length])
        with pytest.raises(CorruptGGUF, match=r"cut\.gguf"):
            read_gguf_metadata(cut)
    cut.write_bytes(whole[:needed])
    assert read_gguf_metadata(cut)["name"] == "x"


def entry(value_type: int, payload: bytes, key: bytes = b"k") -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", value_type) + payload


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GGML" + struct.pack("<IQQ", 3, 0, 0), "starts with b'GGML'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not one of"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "key 0 of"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(99, b""), "unknown value type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(9, struct.pack("<IQ", 9, 1)), "type 9"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(9, struct.pack("<IQ", 8, 2**61)),
            "claims 2305843009213693952 strings",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(9, struct.pack("<IQ", 4, 2**62)),
            "the file ends at",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(8, struct.pack("<Q", 1) + b"\xff"),
            "not valid UTF-8",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + entry(0, b"1") * 2, "'k' appears twice"),
    ],
)
def test_a_malformed_file_is_refused_by_what_is_wrong(tmp_path, content, words):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CorruptGGUF, match=words):
        read_gguf_metadata(path)
