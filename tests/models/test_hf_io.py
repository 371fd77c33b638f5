"""Reading and writing Hugging Face folders: bit for bit, by slices, and what happens when something is wrong."""

import json
import os
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridflow.errors import CheckpointError, ModelError
from hybridflow.models import hf_io
from hybridflow.models.hf_io import export_folder, load_parameters
from hybridflow.models.spec import ModelSpec
from hybridflow.models.tables import hf_table, megatron_table, padded_vocab_size, vllm_table
from hybridflow.resharding.boxes import num_elements
from hybridflow.resharding.layout import ParallelLayout
from tests.models.oracle import megatron_shard, vllm_shard
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen3_moe"]


def checkpoint_of(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def empty(table, dtype=torch.float32):
    """Parameters full of NaN, so that an element nobody writes shows."""
    return {name: torch.full(boxes.shape, torch.nan, dtype=dtype) for name, boxes in table.items()}


def ranks(spec, tp=1, pp=1):
    layout = ParallelLayout(tp=tp, pp=pp)
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        yield at, megatron_table(spec, layout, at, padded_vocab_size(spec, tp))


def loaded(folder, dtype=torch.float32, tp=1, pp=1):
    """(table, parameters) of every rank."""
    parts = []
    for _, table in ranks(ModelSpec.from_folder(folder), tp, pp):
        parameters = empty(table, dtype)
        load_parameters(folder, table, parameters)
        parts.append((table, parameters))
    return parts


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name in expected:
        assert found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]), name


def shard_on_disk(folder, max_shard_size="20KB"):
    """Rewrite a folder as an index of several files, by transformers."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, dtype="auto").save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("model-*.safetensors"))) >= 2


@pytest.fixture
def folder(tmp_path):
    save_tiny_model(tmp_path / "source", "qwen3")
    return tmp_path / "source"


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "index"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_loaded_is_what_transformers_saved(tmp_path, architecture, dtype, tied, sharded):
    save_tiny_model(tmp_path, architecture, dtype=dtype, tie_word_embeddings=tied)
    if sharded:
        shard_on_disk(tmp_path)
    spec, hf = ModelSpec.from_folder(tmp_path), checkpoint_of(tmp_path)
    for tp, pp in ((1, 1), (2, 2)):
        for at, table in ranks(spec, tp, pp):
            parameters = empty(table, getattr(torch, dtype))
            load_parameters(tmp_path, table, parameters)
            assert_same(parameters, megatron_shard(hf, spec, tp, pp, at.tp, at.pp))
    table = vllm_table(spec, 4, 3)  # two kv heads on four ranks
    parameters = empty(table, getattr(torch, dtype))
    load_parameters(tmp_path, table, parameters)
    assert_same(parameters, vllm_shard(hf, spec, 4, 3))


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_export_undoes_load_bit_for_bit(tmp_path, architecture, tied, dtype, tp, pp):
    source = tmp_path / "source"
    save_tiny_model(source, architecture, dtype=dtype, tie_word_embeddings=tied)
    parts = loaded(source, getattr(torch, dtype), tp, pp)
    out = export_folder(tmp_path / "out", ModelSpec.from_folder(source), source, iter(parts))
    assert out == tmp_path / "out"
    assert_same(checkpoint_of(out), checkpoint_of(source))
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_transformers_computes_the_same_from_an_exported_folder(tmp_path, folder, max_shard_bytes):
    from transformers import AutoModelForCausalLM

    out = export_folder(
        tmp_path / "out", ModelSpec.from_folder(folder), folder, loaded(folder), max_shard_bytes=max_shard_bytes
    )
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) > 2) == (max_shard_bytes == 20_000)
    assert all(file.stat().st_size < max_shard_bytes + 8_000 for file in files)
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(f, dtype="auto")(ids).logits for f in (folder, out)]
    assert torch.equal(*logits)


def test_an_exported_index_lists_every_tensor_and_the_total(tmp_path, folder):
    spec = ModelSpec.from_folder(folder)
    out = export_folder(tmp_path / "out", spec, folder, loaded(folder), max_shard_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == list(hf_table(spec))
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in checkpoint_of(folder).values())
    assert set(index["weight_map"].values()) == {file.name for file in out.glob("*.safetensors")}
    assert_same(
        {name: load_file(out / file)[name] for name, file in index["weight_map"].items()}, checkpoint_of(folder)
    )


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_dtype_can_be_chosen_and_config_says_so(tmp_path, folder, key):
    config = json.loads((folder / "config.json").read_text())
    config[key] = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_folder(folder)
    out = export_folder(tmp_path / "out", spec, folder, loaded(folder), dtype=torch.bfloat16)
    assert_same(checkpoint_of(out), {name: tensor.bfloat16() for name, tensor in checkpoint_of(folder).items()})
    assert json.loads((out / "config.json").read_text()) == {**config, key: "bfloat16"}
    # The parameters' own dtype where none is chosen.
    out = export_folder(tmp_path / "own", spec, folder, loaded(folder, torch.bfloat16))
    assert {tensor.dtype for tensor in checkpoint_of(out).values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())[key] == "bfloat16"


def test_loading_casts_to_the_parameters_dtype(folder):
    hf = {name: tensor.bfloat16() for name, tensor in checkpoint_of(folder).items()}
    ((_, parameters),) = loaded(folder, torch.bfloat16)
    assert_same(parameters, megatron_shard(hf, ModelSpec.from_folder(folder), 1, 1, 0, 0))


def test_tokenizer_and_generation_config_travel_and_old_weights_do_not(tmp_path, folder):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "LICENSE"):
        (folder / name).write_text(name)
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.json", "old.safetensors"):
        (folder / name).write_text("stale")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text("another")
    spec, parts = ModelSpec.from_folder(folder), loaded(folder)
    out = export_folder(tmp_path / "out", spec, folder, parts)
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        "LICENSE",
        "additional_chat_templates/tools.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (out / "generation_config.json").read_text() == (folder / "generation_config.json").read_text()
    out = export_folder(tmp_path / "with_other", spec, folder, parts, tokenizer_folder=tmp_path / "other")
    assert sorted(os.listdir(out)) == [
        "LICENSE",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (out / "tokenizer.json").read_text() == "another"


def test_exported_files_have_the_modes_of_ordinary_files(tmp_path, folder):
    (tmp_path / "ordinary").write_text("")
    out = export_folder(tmp_path / "out", ModelSpec.from_folder(folder), folder, loaded(folder))
    wanted = stat.S_IMODE((tmp_path / "ordinary").stat().st_mode)
    assert {stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()} == {wanted}


def test_a_rank_asks_for_no_more_than_its_slices(folder, monkeypatch):
    read = []
    original = hf_io.Checkpoint.read
    monkeypatch.setattr(hf_io.Checkpoint, "read", lambda self, box: read.append(original(self, box)) or read[-1])
    for _, table in ranks(ModelSpec.from_folder(folder), tp=2, pp=2):
        read.clear()
        load_parameters(folder, table, empty(table))
        covered = sum(num_elements(box.source) for parameter in table.values() for box in parameter.boxes)
        assert sum(tensor.numel() for tensor in read) == covered


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


NORM = "model.layers.1.self_attn.q_norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), rf"there is no tensor {NORM}.* Did you mean 'model.layers.0.self_attn.q_norm.weight'"),
        (lambda t: t.update({NORM: torch.ones(9)}), rf"{NORM} has shape \[9\], config.json says \[8\]"),
        (lambda t: t.update({NORM: torch.ones(8, dtype=torch.int8)}), rf"{NORM} is stored as I8"),
        (lambda t: t.pop("lm_head.weight"), r"there is no tensor lm_head\.weight"),
    ],
)
def test_a_checkpoint_that_is_not_what_its_config_says_is_refused_by_name(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(ModelError, match=f"{folder}: {message}"):
        loaded(folder)


def test_a_tensor_the_model_does_not_use_does_no_harm(folder):
    rewrite(folder, lambda tensors: tensors.update({"model.rotary_emb.inv_freq": torch.ones(4)}))
    loaded(folder)


def test_parameters_that_differ_from_the_table_are_refused_by_name(folder):
    ((table, parameters),) = loaded(folder)
    name = "decoder.final_layernorm.weight"
    less = {n: p for n, p in parameters.items() if n != name}
    with pytest.raises(ModelError, match=f"{name}: stands in the table, but the model lacks it"):
        load_parameters(folder, table, less)
    with pytest.raises(ModelError, match=r"extra\.bias: the model has it, but the table does not"):
        load_parameters(folder, table, {**parameters, "extra.bias": torch.ones(2)})
    with pytest.raises(ModelError, match=rf"{name}: the model's parameter is \[31\], its table says \[32\]"):
        load_parameters(folder, table, {**parameters, name: torch.ones(31)})


def test_weights_that_cannot_be_read_are_named(folder):
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelError, match=f"{path}: cannot be read: .*"):
        loaded(folder)
    path.unlink()
    with pytest.raises(ModelError, match=f"{folder}: neither model.safetensors nor model.safetensors.index.json"):
        loaded(folder)


def test_a_missing_or_malformed_part_of_an_index_is_named(folder):
    shard_on_disk(folder)
    missing = sorted(folder.glob("model-*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(ModelError, match=f"{missing}: cannot be read"):
        loaded(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match=r"index\.json: holds a list, not a JSON object"):
        loaded(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json: has no weight_map"):
        loaded(folder)


def test_export_refuses_ranks_that_do_not_hold_the_whole_model(tmp_path, folder):
    spec = ModelSpec.from_folder(folder)
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight\[32:61, 0:32\]: no rank at hand holds it"):
        export_folder(tmp_path / "out", spec, folder, loaded(folder, tp=2)[:1])
    with pytest.raises(ModelError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight\[0:32, 0:32\]: no rank at hand"):
        export_folder(tmp_path / "out", spec, folder, loaded(folder, pp=2)[:1])
    assert os.listdir(tmp_path) == ["source"]


def export_on_rank(rank, folder, out):
    """What each of two tensor-parallel ranks is told: all well, the folder exists, a rank lacks a parameter, ..."""
    import torch.distributed as dist

    def export(part, name, **settings):
        try:
            export_folder(f"{out}/{name}", spec, folder, [part], group=dist.group.WORLD, **settings)
        except (CheckpointError, ModelError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    spec = ModelSpec.from_folder(folder)
    table, parameters = loaded(folder, tp=2)[rank]
    missing = {name: p for name, p in parameters.items() if rank == 0 or "final" not in name}
    half = (table, {name: p.bfloat16() for name, p in parameters.items()})
    return [
        export((table, parameters), "out", max_shard_bytes=20_000),
        export((table, parameters), "out"),
        export((table, missing), "missing"),
        export(half, "cast", dtype=torch.float32),
        export(half if rank else ({}, {}), "incomplete"),
    ]


@pytest.mark.distributed
def test_ranks_of_a_group_write_one_folder_together(tmp_path, folder):
    for whole, again, missing, cast, incomplete in run_ranks(export_on_rank, 2, str(folder), str(tmp_path)):
        assert (whole, cast) == ("", "")
        assert again.startswith(f"CheckpointError: {tmp_path}/out: exists already")
        assert missing.startswith(
            "ModelError: decoder.final_layernorm.weight: stands in the table, but the model lacks"
        )
        assert incomplete.startswith("ModelError: model.embed_tokens.weight[0:32, 0:32]: no rank at hand holds it")
    source = checkpoint_of(folder)
    assert_same(checkpoint_of(tmp_path / "out"), source)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert_same(checkpoint_of(tmp_path / "cast"), {name: t.bfloat16().float() for name, t in source.items()})
    assert sorted(os.listdir(tmp_path)) == ["cast", "out", "source"]


def test_export_does_not_touch_a_folder_that_has_content(tmp_path, folder):
    spec, parts = ModelSpec.from_folder(folder), loaded(folder)
    out = tmp_path / "out"
    out.mkdir()
    export_folder(out, spec, folder, parts)  # empty: fine
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(CheckpointError, match=f"{out}: exists already"):
        export_folder(out, spec, folder, parts)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["out", "source"]


def test_a_path_that_cannot_be_written_is_named_with_the_reason(tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file/out: cannot be written: .*Not a directory"):
        export_folder(tmp_path / "file" / "out", ModelSpec.from_folder(folder), folder, loaded(folder))


def test_a_full_disk_is_named_and_leaves_nothing_behind(tmp_path, folder):
    """A limit on file size stands for a full disk: both make write() fail in the middle of a file."""
    import resource
    import signal

    spec, parts = ModelSpec.from_folder(folder), loaded(folder)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
        with pytest.raises(CheckpointError, match=f"{tmp_path}/out: cannot be written: .*File too large"):
            export_folder(tmp_path / "out", spec, folder, parts)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == ["source"]
    export_folder(tmp_path / "out", spec, folder, parts)
    assert_same(checkpoint_of(tmp_path / "out"), checkpoint_of(folder))
