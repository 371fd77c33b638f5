"""Tiny random Qwen3 folders, and engines that are built once for all tests (importing vLLM takes seconds)."""

import functools

import pytest
import torch

from hybridflow.config import RolloutConfig
from hybridflow.models.spec import ModelSpec

EOS = 5


def write_model(folder, *, seed: int, tied: bool, head_dim: int = 32, num_kv_heads: int = 2, kind="qwen3", **changes):
    """Write a random model whose logits are peaked enough for greedy decoding to be unambiguous."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind,
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=None,
        **changes,
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return str(folder)


@functools.cache
def load_reference(folder: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, str]:
    """``tied`` and ``other`` (tied), ``untied``: random models of one shape, 200 ids; ``experts``: mixtures of them."""
    root = tmp_path_factory.mktemp("models")
    experts = {"kind": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    return {
        "tied": write_model(root / "tied", seed=1, tied=True),
        "other": write_model(root / "other", seed=2, tied=True),
        "untied": write_model(root / "untied", seed=3, tied=False),
        "other_untied": write_model(root / "other_untied", seed=4, tied=False),
        "experts": write_model(root / "experts", seed=5, tied=False, norm_topk_prob=True, **experts),
        "other_experts": write_model(root / "other_experts", seed=6, tied=False, norm_topk_prob=True, **experts),
    }


@pytest.fixture(scope="session")
def settings() -> RolloutConfig:
    return RolloutConfig(max_prompt_tokens=96, max_tokens=64, kv_cache_gb=0.05, max_sequences=64)


@pytest.fixture(scope="session")
def make_model():
    """``make_model(folder, seed=, tied=, head_dim=32, num_kv_heads=2)``: write another random model."""
    return write_model


@pytest.fixture(scope="session")
def build_for_session(settings):
    """``f(folder, ...)``: an engine with its weights loaded."""
    from hybridflow.engines.vllm.engine import RolloutEngine

    def make(folder, dtype=torch.float32, config=settings, valid_vocab=200, max_model_len=160, load_weights=True):
        spec = ModelSpec.from_folder(folder)
        return RolloutEngine(folder, spec, dtype, config, valid_vocab, max_model_len, load_weights=load_weights)

    return make


@pytest.fixture
def build(build_for_session):
    """``build(folder, ...)``: the same, and its memory is given back after the test."""
    built = []

    def make(*args, **kwargs):
        built.append(build_for_session(*args, **kwargs))
        return built[-1]

    yield make
    for engine in built:
        engine.close()


@pytest.fixture(scope="session")
def engine(build_for_session, folders):
    """fp32 engine on the folder ``tied``; tests leave its weights alone."""
    return build_for_session(folders["tied"])


@pytest.fixture(scope="session")
def reference_log_probs():
    """``f(folder, prompt, response, temperature=1, valid_vocab=200)``: transformers' log_softmax at the response."""

    @torch.no_grad()
    def compute(folder, prompt, response, temperature=1.0, valid_vocab=200):
        logits = load_reference(folder)(torch.tensor([[*prompt, *response]])).logits[0].float() / temperature
        logits[:, valid_vocab:] = float("-inf")
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        return rows.gather(1, torch.tensor(response)[:, None])[:, 0]

    return compute


@pytest.fixture(scope="session")
def reference_greedy():
    """``f(folder, prompt, count, valid_vocab=200)``: transformers' most likely tokens, up to and with EOS."""

    @torch.no_grad()
    def generate(folder, prompt, count, valid_vocab=200):
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(load_reference(folder)(torch.tensor([ids])).logits[0, -1, :valid_vocab].argmax()))
            if ids[-1] == EOS:
                break
        return ids[len(prompt) :]

    return generate


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Eight prompts of 3 to 80 tokens: some share a prefix longer than a KV block."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(6, 200, (n,), generator=generator).tolist() for n in (3, 7, 20, 33, 40)]
    long = torch.randint(6, 200, (80,), generator=generator).tolist()
    return [*rows, long, [*long[:70], 9, 8, 7], long[:66]]
