"""What lies on disk, or does not: the model and what it can hold, data, the reward's file, the run's folder."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.checkpoint import CheckpointStore
from hybridflow.checks import Plan
from tests.assets import write_model


def test_a_sequence_has_to_fit_the_models_positions(refused: Callable[..., str]) -> None:
    assert refused("rollout.max_tokens=1000") == (
        "rollout.max_prompt_tokens + rollout.max_tokens = 32 + 1000 = 1032 is more than the model's 1024 positions. "
        "Lower one of them by 8."
    )


def test_a_sequence_has_to_fit_the_kv_cache(refused: Callable[..., str], checked: Callable[..., Plan]) -> None:
    # 40 tokens take 2 blocks of 32, and one block is vLLM's own: 96 tokens of 2 * 2 * 2 * 32 * 4 bytes.
    need = 96 * 1024
    assert refused("rollout.kv_cache_gb=0.00009") == (
        f"rollout.kv_cache_gb=9e-05 ({int(9e-5 * 2**30)} bytes) does not hold one sequence of 40 tokens: 2 * 2 layers "
        f"* 2 kv heads * 32 * 4 bytes = 1024 bytes a token, * 96 tokens in whole blocks = {need} bytes. "
        "Set it to at least 0.001."
    )
    checked(f"rollout.kv_cache_gb={need / 2**30}")
    checked("rollout.kv_cache_gb=0.00009", "model.dtype=bfloat16")


def test_attention_heads_have_to_have_a_kernel(refused: Callable[..., str], tmp_path: Path) -> None:
    model = write_model(tmp_path / "narrow", head_dim=8)
    assert "head_dim=8: on a CPU vLLM's attention knows 32, 64, 80, 96," in refused(f"model.path={model}")


def test_stop_ids_have_to_be_in_the_vocabulary(refused: Callable[..., str]) -> None:
    assert "[262] are not below the model's vocabulary of 262 ids." in refused("rollout.stop_token_ids=[261,262]")


def test_a_model_folder_has_to_be_whole(refused: Callable[..., str], tmp_path: Path) -> None:
    assert refused("model.path=''").startswith("model.path='': give a local Hugging Face folder")
    assert refused("model.path=no/where") == "model.path='no/where': no such folder."
    assert "python -m hybridflow.data.demo --out runs/demo/assets" in refused("model.path=runs/demo/assets/modell")
    (tmp_path / "empty").mkdir()
    text = refused(f"model.path={tmp_path / 'empty'}")
    assert "holds no tokenizer (none of tokenizer.json, tokenizer.model, vocab.json, vocab.txt)" in text
    assert "holds no *.safetensors. Convert the weights to safetensors." in text
    assert "no config.json there" in text
    strange = write_model(tmp_path / "strange", model_type="gpt2")
    assert "model_type='gpt2' is not supported" in refused(f"model.path={strange}")


def test_the_tokenizer_may_lie_elsewhere(refused, checked, folder: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    assert "model.path=" in refused(f"model.path={model}")
    checked(f"model.path={model}", f"model.tokenizer_path={folder / 'model'}")
    assert "model.tokenizer_path='no/where' holds no tokenizer" in refused("model.tokenizer_path=no/where")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train=no/where.jsonl", "data.train='no/where.jsonl': no such file or folder."),
        ("data.train=''", "data.train='': give a file, a folder or a task."),
        ("data.train='reasoning_gym:'", "data.train='reasoning_gym:': names no task: write reasoning_gym:<task>."),
        ("data.evaluate=no/where.jsonl", "data.evaluate='no/where.jsonl': no such file or folder."),
        ("reward.function=nocolon", "reward.function='nocolon': write package.module:name or path/file.py:name."),
        ("reward.components={x: {function: nocolon}}", "reward.components.x.function='nocolon': write package.module"),
        ("reward.components={mean: {function: 'a.b:f'}}", "reward.components: 'mean' cannot be the name of a"),
        ("reward.components={a/b: {function: 'a.b:f'}}", "reward.components: 'a/b' cannot be the name"),
        ("reward.function='no/where.py:f'", "reward.function='no/where.py:f': there is no file no/where.py."),
        ("memory.folder=no/where", "memory.folder='no/where': no folder that can be written to. Make it, or leave it"),
        (
            "checkpoint.resume=atuo",
            "checkpoint.resume='atuo' is neither 'never', 'auto' nor a folder. Did you mean 'auto'?",
        ),
    ],
)
def test_what_does_not_exist_is_named(override: str, message: str, refused: Callable[..., str]) -> None:
    assert message in refused(override)


def test_a_wrong_file_name_is_told_the_nearest(refused: Callable[..., str], folder: Path) -> None:
    text = refused(f"data.train={folder}/trian.jsonl")
    assert "Did you mean 'train.jsonl'?" in text
    (folder / "rows.csv").write_text("")
    assert "unknown extension '.csv'. Known: .jsonl, .json, .parquet." in refused(f"data.train={folder}/rows.csv")


def test_stopping_by_accuracy_needs_held_out_prompts(refused: Callable[..., str]) -> None:
    text = refused("data.evaluate=''", "data.evaluate_share=0", "evaluate.stop_at=0.5")
    assert text.startswith("evaluate.stop_at=0.5 needs held-out prompts.")
    more = refused("data.evaluate=''", "data.evaluate_share=0", "evaluate.patience=2", "checkpoint.keep_best=true")
    assert "evaluate.patience=2 needs held-out prompts." in more and "checkpoint.keep_best=true needs held-out" in more


@pytest.mark.parametrize("metric", ["accuracy", "evaluate/acuracy", "evaluate/pass@4", "evaluate/majority@2"])
def test_the_metric_of_the_best_has_to_be_evaluated(refused: Callable[..., str], metric: str) -> None:
    text = refused(f"evaluate.metric='{metric}'", "evaluate.n=3", "evaluate.patience=2")
    assert text.startswith(f"evaluate.metric='{metric}' is nothing that is evaluated.") and "evaluate/pass@3" in text


@pytest.mark.parametrize("metric", [f"evaluate/{kind}" for kind in ("pass@3", "majority@3", "pass@2/low", "reward/a")])
def test_metrics_of_several_answers_and_of_data_sources_are_known(checked: Callable[..., Plan], metric: str) -> None:
    checked(f"evaluate.metric='{metric}'", "evaluate.n=3", "checkpoint.keep_best=true")


def test_pairs_are_evaluated_without_a_rollout(checked: Callable[..., Plan]) -> None:
    plan = checked("evaluate.patience=2", "evaluate.metric=evaluate/score_gap", name="reward_model")
    assert not [text for text in plan.warnings if "nothing is evaluated" in text]


def test_waiting_for_evaluations_that_nobody_makes_is_warned_of(checked: Callable[..., Plan]) -> None:
    plan = checked("roles.reward=null", "~pools.cpu", "evaluate.stop_at=0", "checkpoint.keep_best=true", name="sft")
    assert plan.warnings == ("checkpoint.keep_best=true is ignored: without roles.reward nothing is evaluated.",)


@pytest.mark.parametrize("setting", ["model.path", "data.train", "checkpoint.resume"])
def test_a_path_that_the_system_refuses_to_look_at_is_named(setting: str, refused: Callable[..., str]) -> None:
    assert "xxx: File name too long. Give another path." in refused(f"{setting}={'x' * 300}")


def test_the_run_folder_has_to_be_a_folder(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert f"{tmp_path / 'file'} is a file, not a folder. Choose another runs_dir." in refused(
        f"runs_dir={tmp_path / 'file'}"
    )


def test_a_run_that_has_a_checkpoint_is_not_started_anew(refused, checked, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "grpo-tiny" / "checkpoints")
    with store.writing(4) as unfinished:
        (unfinished / "x").write_text("x")
    here = f"runs_dir={tmp_path}"
    assert "already has a checkpoint, step_000004. Set checkpoint.resume=auto" in refused(here)
    checked(here, "checkpoint.resume=auto")
    checked(here, f"checkpoint.resume={store.folder(4)}")
    (store.folder(4) / "manifest.json").unlink()
    assert "is no whole checkpoint" in refused(here, f"checkpoint.resume={store.folder(4)}")


@pytest.mark.parametrize("setting", ["runs_dir=/proc/x", "memory.folder=/proc"])
def test_a_folder_on_a_file_system_that_takes_no_files_is_refused(setting: str, refused: Callable[..., str]) -> None:
    where, _, folder = setting.partition("=")
    text = refused(setting)
    assert text.startswith(where) and folder in text and "be written to" in text


def test_looking_whether_a_folder_can_be_written_leaves_nothing(checked: Callable[..., Plan], tmp_path: Path) -> None:
    checked(f"runs_dir={tmp_path}", f"memory.folder={tmp_path}")
    assert list(tmp_path.iterdir()) == []
