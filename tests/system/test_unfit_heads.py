"""Heads that do not fit their target: refused by name before anything is served, or, where they
only draft nonsense, told of in the link's status.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.cluster import Cluster, running_cluster
from outrider.serving.head_source import shipped_head
from outrider.serving.model_source import DEFAULT_MODEL
from target_service.acceptance_watch import NUM_WATCHED_DRAFTS

EXIT_TIMEOUT_SECONDS = 120

Settings = dict[str, object]
Tensors = dict[str, torch.Tensor]


def changed_head(directory: Path, change: Callable[[Settings, Tensors], None]) -> Path:
    """The head that ships, with something about it changed."""
    shipped = shipped_head(DEFAULT_MODEL)
    assert shipped is not None
    settings = json.loads((shipped / "config.json").read_text())
    # It says for which model it was trained; here it is what does not fit that counts.
    settings.pop("outrider_target", None)
    tensors = load_file(shipped / "model.safetensors")
    change(settings, tensors)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(settings))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()},
              directory / "model.safetensors")  # fmt: skip
    return directory


def of_one_layer(settings: Settings, tensors: Tensors) -> None:
    """Reads the embedding alone, which is all that a target of one layer has."""
    settings["eagle_aux_hidden_state_layer_ids"] = [0]
    tensors["fc.weight"] = tensors["fc.weight"][:, :576]


def another_vocabulary(settings: Settings, tensors: Tensors) -> None:
    of_one_layer(settings, tensors)
    settings["vocab_size"] = 32000
    tensors["t2d"] = tensors["t2d"][:32000]


def narrow_projection(settings: Settings, tensors: Tensors) -> None:
    of_one_layer(settings, tensors)
    tensors["fc.weight"] = tensors["fc.weight"][:, :288]


def projection_without_numbers(settings: Settings, tensors: Tensors) -> None:
    of_one_layer(settings, tensors)
    tensors["fc.weight"] = torch.full_like(tensors["fc.weight"], float("nan"))


def layers_that_are_not_there(settings: Settings, tensors: Tensors) -> None:
    """Those of the default model, which the cut target has not."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (narrow_projection, ("draft", "fc.weight")),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (another_vocabulary, ("draft", "vocab_size", "32000")),
                (projection_without_numbers, ("draft", "fc.weight")),
                (layers_that_are_not_there, ("draft", "layer")),
            )
        ),
    ],
)
def test_a_head_that_does_not_fit_ends_the_start_by_name(
    tiny_model: Path,
    tmp_path: Path,
    change: Callable[[Settings, Tensors], None],
    words: tuple[str, ...],
) -> None:
    head = changed_head(tmp_path / "head", change)
    cluster = Cluster(
        ["--model", str(tiny_model), "--draft", "eagle3", "--draft-model", str(head)],
        {"OUTRIDER_FEATURE_LAYERS": "0"},
    )
    code = cluster.process.wait(EXIT_TIMEOUT_SECONDS)
    cluster.stop()
    assert code not in (0, None)
    assert not any(line.startswith("ready") for line in cluster.output)
    for word in words:
        assert word in cluster.errors[-1]


@pytest.mark.full
def test_a_head_that_drafts_nonsense_is_told_of_and_changes_no_token(
    tiny_model: Path, tmp_path: Path
) -> None:
    def nonsense(settings: Settings, tensors: Tensors) -> None:
        of_one_layer(settings, tensors)
        for name in ("lm_head.weight", "fc.weight"):
            tensors[name] = tensors[name].roll(1, 0)

    head = changed_head(tmp_path / "head", nonsense)
    with running_cluster(
        "--model", str(tiny_model), "--draft", "eagle3", "--draft-model", str(head),
        "--speculation", "fixed",
        OUTRIDER_FEATURE_LAYERS="0", OUTRIDER_CANARY_ACCEPTANCE="warn",
    ) as cluster:  # fmt: skip
        request = {"prompt": "a", "max_tokens": 400, "temperature": 0.8, "ignore_eos": True}
        plain = cluster.complete(**request, seed=0, speculation={"draft_length": 0})
        alert, seed = "", 0
        while not alert and cluster.metrics()["outrider_drafts_total"] < 4 * NUM_WATCHED_DRAFTS:
            answer = cluster.complete(**request, seed=seed)
            if seed == 0:
                assert answer["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
            seed += 1
            (link,) = cluster.get("/status").json()["details"]["target"]["links"]
            alert = link["alert"]
        assert "drafts had their first token accepted" in alert
        assert "head" in alert or "draft-model" in alert
