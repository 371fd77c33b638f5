"""Rules about what lies on disk: the model and what it can hold, data, the reward's file, the run's folder."""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hybridflow.checkpoint import RESUME_MODES, CheckpointStore, resume_from
from hybridflow.checks.base import CRITICS, SCORERS, Facts, Problem, rule
from hybridflow.checks.cluster import machine, starts_ray_here
from hybridflow.checks.values import DTYPE_BYTES, IMPORTABLE, present
from hybridflow.config import DistillConfig, PairsConfig, RewardModelConfig
from hybridflow.data.sources import EXTENSIONS, REASONING_GYM
from hybridflow.errors import CheckpointError, ConfigError, ModelError, nearest
from hybridflow.models.spec import ModelSpec, read_json
from hybridflow.models.tables import check_megatron, check_vllm, padded_vocab_size
from hybridflow.resharding.layout import GenerationLayout
from hybridflow.rewards.components import REWARD_METRICS, components_of

KV_BLOCK_TOKENS = 32
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@rule()
def model_folder_is_complete(facts: Facts) -> Iterator[Problem]:
    model = facts.config.model
    if not model.path:
        yield Problem("model.path", "model.path='': give a local Hugging Face folder: model=local model.path=FOLDER.")
        return
    if not Path(model.path).is_dir():
        hint = _how_to_make(model.path)
        yield Problem("model.path", f"model.path={model.path!r}: no such folder.{hint}")
        return
    tokenizer = Path(model.tokenizer_path or model.path)
    if not any((tokenizer / name).is_file() for name in TOKENIZER_FILES):
        name = "model.tokenizer_path" if model.tokenizer_path else "model.path"
        yield Problem(
            "model.tokenizer_path",
            f"{name}={str(tokenizer)!r} holds no tokenizer (none of {', '.join(TOKENIZER_FILES)}). "
            "Set model.tokenizer_path to a folder that has one.",
        )
    yield from _weights_problems("model.path", model.path)


@rule()
def other_models_are_complete(facts: Facts) -> Iterator[Problem]:
    for role in facts.model_roles():
        setting, path = facts.path(role)
        if setting == "model.path":
            continue
        if not Path(path).is_dir():
            yield Problem(setting, f"{setting}={path!r}: no such folder.{_how_to_make(path)}")
            continue
        problems = list(_weights_problems(setting, path))
        yield from problems
        if role not in SCORERS or problems:
            continue
        spec, judges = ModelSpec.from_folder(path), facts.judge(role) is not None
        if not spec.scores and not judges:
            yield Problem(
                setting,
                f"{setting}={path!r} is a language model: its scores would mean nothing. Give a classifier with one "
                f"label, such as examples/reward_model.py trains, or set it as {role}.judge.path.",
            )
        elif spec.scores and judges:
            yield Problem(
                setting,
                f"{setting}={path!r} is a {spec.raw['architectures'][0]}, which says nothing. Give a language model, "
                f"or set it as {role}.path.",
            )


@rule()
def a_model_or_functions_score(facts: Facts) -> Iterator[Problem]:
    for role in SCORERS:
        for _, config in present(facts.config, role):
            if config.path and config.components:
                yield Problem(
                    f"{role}.components",
                    f"{role}.components are functions, and {role}.path={config.path!r} is a model that scores in their "
                    f"place. Set one of them to nothing.",
                )
            if config.path and config.judge.path:
                yield Problem(
                    f"{role}.judge.path",
                    f"{role}.judge.path={config.judge.path!r} and {role}.path={config.path!r} are two models for one "
                    "role. Set one of them to ''.",
                )
            if config.judge.path and "{response}" not in config.judge.question:
                yield Problem(
                    f"{role}.judge.question",
                    f"{role}.judge.question has no {{response}}, so every answer would be judged alike. Put it where "
                    "the answer belongs.",
                )


@rule("model")
def the_policy_is_a_language_model(facts: Facts) -> Iterator[Problem]:
    if facts.spec.scores and not isinstance(facts.config, RewardModelConfig):
        path, name = facts.config.model.path, facts.spec.raw["architectures"][0]
        yield Problem("model.path", f"model.path={path!r} is a {name}, which scores texts. Give a language model.")


@rule("model", "teacher")
def a_teacher_speaks_the_same_tokens(facts: Facts) -> Iterator[Problem]:
    if not isinstance(facts.config, DistillConfig):
        return
    path = facts.config.teacher.path
    if not path or not Path(path).is_dir():
        yield Problem("teacher.path", f"teacher.path={path!r}: no such folder.{_how_to_make(path)}")
        return
    try:
        own, wanted = _vocabulary(path), _vocabulary(facts.config.model.tokenizer_path or facts.config.model.path)
    except ModelError as error:
        yield Problem("teacher.path", str(error))
        return
    if own != wanted:
        differ = sorted(token for token in own.keys() | wanted.keys() if own.get(token) != wanted.get(token))
        yield Problem(
            "teacher.path",
            f"teacher.path={path!r}: its tokenizer is not the one of model.path ({len(own)} tokens and {len(wanted)}; "
            f"{len(differ)} differ, such as {differ[0]!r}): a teacher scores the student's token ids. Choose a teacher "
            "of the same family.",
        )


@rule("model", "rollout", *SCORERS)
def sequences_fit_the_model(facts: Facts) -> Iterator[Problem]:
    limited = {"rollout": ("rollout", facts.config.rollout), **facts.generating()}
    for role, (where, limits) in limited.items():
        spec, longest = facts.spec_of(role), limits.max_prompt_tokens + limits.max_tokens
        if longest > spec.max_positions:
            yield Problem(
                f"{where}.max_tokens",
                f"{where}.max_prompt_tokens + {where}.max_tokens = {limits.max_prompt_tokens} + {limits.max_tokens} = "
                f"{longest} is more than the model's {spec.max_positions} positions. Lower one of them by "
                f"{longest - spec.max_positions}.",
            )
        unknown = [i for i in limits.stop_token_ids if i >= spec.vocab_size]
        if unknown:
            yield Problem(
                f"{where}.stop_token_ids",
                f"{where}.stop_token_ids={limits.stop_token_ids}: {unknown} are not below the model's vocabulary of "
                f"{spec.vocab_size} ids.",
            )


@rule("model", "rollout", "roles", *SCORERS)
def a_sequence_fits_the_kv_cache(facts: Facts) -> Iterator[Problem]:
    for role, (where, limits) in facts.generating().items():
        spec, layout = facts.spec_of(role), facts.placed[role].layout
        size, longest = DTYPE_BYTES[facts.config.model.dtype], limits.max_prompt_tokens + limits.max_tokens
        layers, heads = math.ceil(spec.num_layers / layout.pp), math.ceil(spec.num_kv_heads / layout.tp)
        a_token = 2 * layers * heads * spec.head_dim * size
        blocks = math.ceil(longest / KV_BLOCK_TOKENS) + 1  # vLLM keeps one block for itself
        need = blocks * KV_BLOCK_TOKENS * a_token
        have = limits.kv_cache_gb * 2**30
        if need > have:
            yield Problem(
                f"{where}.kv_cache_gb",
                f"{where}.kv_cache_gb={limits.kv_cache_gb} ({int(have)} bytes) does not hold one sequence of "
                f"{longest} tokens: 2 * {layers} layers * {heads} kv heads * {spec.head_dim} * {size} bytes = "
                f"{a_token} bytes a token, * {blocks * KV_BLOCK_TOKENS} tokens in whole blocks = {need} bytes. Set it "
                f"to at least {math.ceil(need / 2**30 * 1000) / 1000:g}.",
            )


@rule("model", "roles", "ray.address", *SCORERS)
def attention_heads_have_a_kernel(facts: Facts) -> Iterator[Problem]:
    _, gpus = machine()
    if gpus or not starts_ray_here(facts.config.ray.address):
        return
    for role in facts.generating():
        setting, path = facts.path(role)
        head_dim = facts.spec_of(role).head_dim
        if head_dim not in CPU_HEAD_DIMS:
            yield Problem(
                setting,
                f"{setting}={path!r}: head_dim={head_dim}: on a CPU vLLM's attention knows "
                f"{', '.join(map(str, CPU_HEAD_DIMS))} only. Take another model, or a machine with a GPU.",
            )


@rule("model", "teacher", "roles", "pools", *CRITICS, *SCORERS)
def model_splits_over_the_layout(facts: Facts) -> Iterator[Problem]:
    for role in facts.model_roles():
        spec = facts.spec_of(role)
        layout, where = facts.layout(role), f"roles.{role}.layout"
        try:
            if isinstance(layout, GenerationLayout):
                check_vllm(spec, layout.tp, layout.ep, where)
            else:
                check_megatron(spec, layout, padded_vocab_size(spec, layout.tp), where)
        except (ConfigError, ModelError) as error:
            yield Problem(where, str(error))


@rule("model", "teacher", "roles", "actor.sequence_parallel", *CRITICS, *SCORERS)
def experts_share_tokens(facts: Facts) -> Iterator[Problem]:
    for role in facts.model_roles():
        if role in facts.generating():
            continue
        tp, experts = facts.placed[role].layout.tp, facts.spec_of(role).num_experts
        if experts and tp > 1 and not facts.config.actor.sequence_parallel:
            yield Problem(
                "actor.sequence_parallel",
                f"actor.sequence_parallel=false with roles.{role}.layout.tp={tp}: a model with experts needs it, "
                "because every rank routes tokens of its own. Set it to true, or tp to 1.",
            )


@rule()
def data_exists(facts: Facts) -> Iterator[Problem]:
    data = facts.config.data
    for path, source in {"data.train": data.train, "data.evaluate": data.evaluate}.items():
        text = _source_problem(source) if source or path == "data.train" else ""
        if text:
            yield Problem(path, f"{path}={source!r}: {text}")
    if data.options and not any(s.startswith(REASONING_GYM) for s in (data.train, data.evaluate)):
        text = (
            f"data.options={data.options} is ignored: it is for {REASONING_GYM}<task>. Empty it with data.options={{}}."
        )
        yield Problem("data.options", text, warning=True)


@rule("data", "roles")
def what_waits_for_evaluations_gets_them(facts: Facts) -> Iterator[Problem]:
    config, data = facts.config, facts.config.data
    evaluate, keep_best = config.evaluate, config.checkpoint.keep_best
    waiting = {"evaluate.stop_at": evaluate.stop_at, "evaluate.patience": evaluate.patience}
    waiting = {path: value for path, value in {**waiting, "checkpoint.keep_best": keep_best}.items() if value}
    pairs = isinstance(config, PairsConfig)  # scored by the model in training, without an answer
    absent = [role for role in ("rollout", "reward") if role not in facts.placed and not pairs]
    for path, value in waiting.items():
        text = f"{path}={str(value).lower()}"
        if not data.evaluate and data.evaluate_share == 0:
            needs = "held-out prompts. Set data.evaluate, or data.evaluate_share above 0."
            yield Problem(path, f"{text} needs {needs}")
        elif absent:
            yield Problem(path, f"{text} is ignored: without roles.{absent[0]} nothing is evaluated.", warning=True)
    n = evaluate.n
    several = [*(f"pass@{k}" for k in range(2, n + 1)), f"majority@{n}"] if n > 1 else []
    kinds = ["accuracy", "score_gap"] if pairs else ["accuracy", "reward", "length", *several]
    prefix, _, rest = evaluate.metric.partition("/")
    if (evaluate.patience or keep_best) and (prefix != "evaluate" or rest.split("/")[0] not in kinds):
        path, known = "evaluate.metric", [f"evaluate/{kind}" for kind in kinds]
        text = f"{path}={evaluate.metric!r} is nothing that is evaluated."
        yield Problem(path, text + nearest(evaluate.metric, known))
    if not waiting and not data.evaluate and data.evaluate_share == 0:
        yield Problem("data.evaluate", "nothing is held out, so the run is not evaluated.", warning=True)


@rule()
def functions_are_named(facts: Facts) -> Iterator[Problem]:
    rewards = [
        (f"{c.setting}.function", c.function)
        for role in SCORERS
        for _, config in present(facts.config, role)
        for c in components_of(config, role)
    ]
    imported = [item for path in IMPORTABLE for item in present(facts.config, path) if ":" in item[1]]
    for path, name in [*rewards, *imported]:
        where, colon, function = name.rpartition(":")
        if not (colon and where and function.isidentifier()):
            yield Problem(path, f"{path}={name!r}: write package.module:name or path/file.py:name.")
        elif where.endswith(".py") and not Path(where).is_file():
            yield Problem(path, f"{path}={name!r}: there is no file {where}.")


@rule()
def reward_components_have_names_of_their_own(facts: Facts) -> Iterator[Problem]:
    for here, components in [pair for role in SCORERS for pair in present(facts.config, f"{role}.components")]:
        for name in components:
            if name in REWARD_METRICS or "/" in name or not name.strip():
                role = here.split(".")[0]
                yield Problem(
                    f"{here}.{name}",
                    f"{here}: {name!r} cannot be the name of a component: it is logged as {role}/<name>, where "
                    f"{', '.join(REWARD_METRICS)} mean something else, and '/' separates. Choose another name.",
                )


@rule("name")
def run_folder_can_be_written(facts: Facts) -> Iterator[Problem]:
    wanted = facts.run_dir
    at = next(p for p in (wanted, *wanted.absolute().parents) if p.exists())
    if not at.is_dir():
        yield Problem(
            "runs_dir", f"runs_dir/name={str(wanted)!r}: {at} is a file, not a folder. Choose another runs_dir."
        )
    elif not _can_be_written(at):
        yield Problem("runs_dir", f"runs_dir/name={str(wanted)!r}: {at} cannot be written to. Choose another runs_dir.")


@rule()
def offloaded_memory_has_a_folder(facts: Facts) -> Iterator[Problem]:
    folder = facts.config.memory.folder
    if folder and starts_ray_here(facts.config.ray.address) and not _can_be_written(Path(folder)):
        yield Problem(
            "memory.folder",
            f"memory.folder={folder!r}: no folder that can be written to. Make it, or leave it empty for the system's.",
        )


@rule("name", "runs_dir")
def checkpoint_to_resume_exists(facts: Facts) -> Iterator[Problem]:
    store = CheckpointStore(facts.run_dir / "checkpoints", facts.config.checkpoint.keep)
    resume = facts.config.checkpoint.resume
    try:
        resume_from(resume, store, contents=False)
    except CheckpointError as error:
        hint = "" if Path(resume).exists() or resume in RESUME_MODES else nearest(resume, RESUME_MODES)
        yield Problem("checkpoint.resume", f"{error}{hint}")


def _can_be_written(folder: Path) -> bool:
    """Tried: permissions say nothing of a read-only or special file system, nor to root."""
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return True
    except OSError:
        return False


def _weights_problems(setting: str, path: str) -> Iterator[Problem]:
    """What is wrong with a model's folder that is there."""
    if not any(Path(path).glob("*.safetensors")):
        yield Problem(setting, f"{setting}={path!r} holds no *.safetensors. Convert the weights to safetensors.")
    try:
        ModelSpec.from_folder(path)
    except ModelError as error:
        yield Problem(setting, f"{setting}={path!r}: {error}")


def _source_problem(source: str) -> str:
    """What is wrong with a data source, as far as names show; ``""`` where it exists."""
    if source.startswith(REASONING_GYM):
        if importlib.util.find_spec("reasoning_gym") is None:
            return "needs the package reasoning-gym: pip install reasoning-gym."
        return "" if source.removeprefix(REASONING_GYM).strip(" ,") else f"names no task: write {REASONING_GYM}<task>."
    path = Path(source)
    if not source:
        return "give a file, a folder or a task."
    if "*" in source or path.is_dir():
        return ""
    if not path.is_file():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        return f"no such file or folder.{nearest(path.name, beside) if beside else ''}{_how_to_make(source)}"
    if path.suffix not in EXTENSIONS:
        return f"unknown extension {path.suffix!r}. Known: {', '.join(EXTENSIONS)}."
    return ""


def _vocabulary(folder: str) -> dict[str, int]:
    """Token to id, by the folder's tokenizer.json; empty where it has none."""
    path = Path(folder) / "tokenizer.json"
    model = read_json(path).get("model") if path.is_file() else None
    vocabulary = model.get("vocab", {}) if isinstance(model, dict) else {}
    return vocabulary if isinstance(vocabulary, dict) else {token: i for i, (token, *_) in enumerate(vocabulary)}


def _how_to_make(path: str) -> str:
    """The command that makes an asset which the shipped configs name."""
    if path.startswith(("runs/demo/grpo-tiny/", "runs/demo/sft-tiny/")):
        return " Make it with: make quickstart"
    if path.startswith("runs/demo/assets/"):
        return " Make it with: python -m hybridflow.data.demo --out runs/demo/assets"
    return " Make it with: make model-smollm2" if path.startswith("models/smollm2") else ""
