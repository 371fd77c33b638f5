"""What is wrong with a model folder is said before anything is started."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.config import ModelConfig, RoleConfig, RolloutConfig, RunConfig
from hybridflow.data.demo import write_model
from hybridflow.errors import ModelError
from hybridflow.models.folder import check_model

PAIR = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def check(folder: Path, *stop_token_ids: int) -> None:
    model, rollout = ModelConfig(path=str(folder)), RolloutConfig(stop_token_ids=list(stop_token_ids))
    check_model(RunConfig(name="x", model=model, rollout=rollout, roles={"rollout": RoleConfig(pool="train")}))


def set_in(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def split(folder: Path) -> None:
    """Two files and an index, as large models have them."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    of = {name: PAIR[i % 2] for i, name in enumerate(sorted(weights))}
    for file in PAIR:
        save_file({name: weights[name] for name in weights if of[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))


def lose_a_file(folder: Path) -> None:
    split(folder)
    (folder / PAIR[1]).unlink()


def lose_the_index(folder: Path) -> None:
    split(folder)
    (folder / "model.safetensors.index.json").unlink()


def quantise(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor.to(torch.int8) for name, tensor in weights.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"model\.safetensors: cannot be read"),
        (lose_a_file, rf"{PAIR[1]}: cannot be read"),
        (lose_the_index, r"neither model\.safetensors nor model\.safetensors\.index\.json is there"),
        (quantise, r"is stored as I8; readable are"),
        (lambda folder: set_in(folder / "config.json", intermediate_size=400), r"has shape .*, config\.json says"),
        (
            lambda folder: set_in(folder / "config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3),
            r"there is no tensor model\.layers\.2\.",
        ),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "holds no tokenizer that transformers can read"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "has no chat template"),
        (  # transformers gives a new id to a token that the tokenizer lacks
            lambda folder: set_in(folder / "tokenizer_config.json", eos_token="<|nope|>"),
            r"has ids up to 262, the model's vocab_size is 262",
        ),
        (
            lambda folder: set_in(folder / "generation_config.json", eos_token_id=9999),
            r"the ids that end an answer are \[9999\], and the tokenizer has ids below 262.*add 260 \(the tokenizer's "
            r"eos_token '<\|end\|>'\) to rollout\.stop_token_ids",
        ),
        (
            lambda folder: [set_in(folder / f"{c}config.json", eos_token_id=None) for c in ("", "generation_")],
            "no id ends an answer: every answer would go on to rollout.max_tokens",
        ),
        (
            lambda folder: set_in(folder / "generation_config.json", eos_token_id="x"),
            "eos_token_id='x' has to be an id or ids",
        ),
    ],
)
def test_a_folder_whose_files_do_not_belong_together_is_refused(
    model: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(model)
    with pytest.raises(ModelError, match=message):
        check(model)


def test_a_whole_folder_passes_in_one_file_and_in_two(model: Path) -> None:
    check(model)
    split(model)
    check(model)


def test_answers_may_end_at_a_stop_id_of_the_settings_alone(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("config.json", "generation_config.json"):
        set_in(model / name, eos_token_id=None)
    check(model, 260)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check(model, 10)
    assert "Generation does not stop at 260 (the tokenizer's eos_token '<|end|>')" in caplog.text
