"""What the draft service's configuration comes to, and what of it is refused."""

import json
from pathlib import Path

import pytest

from draft_service.config import DraftConfig
from outrider.serving import head_source
from outrider.serving.config import parse_config
from outrider.serving.errors import ConfigurationError
from outrider.serving.head_source import is_head


def config_of(*arguments: str) -> DraftConfig:
    return parse_config(DraftConfig, "draft", arguments, environment={})


def write_head(directory: Path) -> Path:
    directory.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLMEagle3"]}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped heads with one for the model `known`."""
    folder = tmp_path / "models"
    write_head(folder / "known-eagle3")
    monkeypatch.setattr(head_source, "SHIPPED_HEADS", folder)
    return folder


def test_a_head_that_ships_for_the_model_makes_the_default_hybrid(shipped: Path) -> None:
    config = config_of("--model", "known")
    assert (config.draft, config.draft_model) == ("hybrid", str(shipped / "known-eagle3"))
    assert config.has_head and config.computes_model


def test_the_models_name_may_be_left_out_for_the_default_model(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config_of().draft == "ngram"
    write_head(shipped / "smollm2-135m-instruct-eagle3")
    config = config_of()
    assert (config.draft, config.model) == ("hybrid", "smollm2-135m-instruct")


@pytest.mark.parametrize("model", ["other", "../models/known", "/known", "known/../known"])
def test_without_a_head_the_default_is_ngram(shipped: Path, model: str) -> None:
    config = config_of("--model", model)
    assert (config.draft, config.draft_model) == ("ngram", "")
    assert not config.has_head and not config.computes_model


def test_a_head_or_a_small_model_makes_the_default_hybrid(tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    with_head = config_of("--model", "m", "--draft-model", str(head))
    assert (with_head.draft, with_head.has_head) == ("hybrid", True)
    with_model = config_of("--model", "m", "--draft-model", "org/small")
    assert (with_model.draft, with_model.has_head) == ("hybrid", False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--draft", "none"), "no draft service is started"),
        (("--draft", "eagle3", "--model", "m"), "draft-model is '', must name an EAGLE-3 head"),
        (("--draft", "hybrid", "--model", "m"), "none ships for model 'm'"),
        (("--draft", "eagle3", "--draft-model", "."), "its config.json names none"),
        (("--draft", "standalone"), "must name a checkpoint"),
        (("--draft", "standalone", "--draft-model", "HEAD"), "draft must be eagle3 or hybrid"),
        (("--draft", "ngram", "--draft-model", "x"), "must be empty with draft ngram"),
        (("--draft", "ngram", "--draft-window", "8"), "draft-window is given"),
        (("--draft", "ngram", "--draft-min-probability", "0.1"), "draft-min-probability is given"),
        (("--draft-min-probability", "1"), "less than 1"),
        (("--device", "gpu"), "device is 'gpu'.* must be cpu, cuda or cuda:N"),
        (
            (
                "--draft",
                "eagle3",
                "--draft-model",
                "HEAD",
                "--device",
                "cuda",
                "--draft-min-probability",
                "0.2",
            ),
            "draft-min-probability is 0.2, must be 0 with device 'cuda'",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(
    shipped: Path, tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    head = write_head(tmp_path / "head")
    given = [str(head) if argument == "HEAD" else argument for argument in arguments]
    with pytest.raises(ConfigurationError, match=words):
        config_of(*given)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, True),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, True),
        ({"architectures": ["EAGLE3LlamaForCausalLM"]}, True),
        ({"speculators_model_type": "eagle3"}, True),
        ({"architectures": ["LlamaForCausalLM"]}, False),
        ({"architectures": None}, False),
        ([], False),
    ],
)
def test_a_head_is_told_by_its_config(tmp_path: Path, config: object, expected: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert is_head(tmp_path) is expected
    (tmp_path / "config.json").write_text("{")
    assert not is_head(tmp_path)
    assert not is_head(tmp_path / "nowhere")
