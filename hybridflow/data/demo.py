"""A task that a tiny model learns in minutes on one core: two-digit additions, and the model that learns them.

Where it stands: before a run; everything it writes is read back like a user's own model and data. ``python -m
hybridflow.data.demo --out DIR`` writes ``DIR/model`` (a Qwen3 folder with random weights and a byte tokenizer),
``DIR/train.jsonl``, ``DIR/heldout.jsonl`` and ``DIR/pairs.jsonl``. Invariant: the same seed writes the same weights and
the same rows, and no addition that is held out stands in another file.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|begin|>")
"""Ids 256 to 261, behind the 256 bytes."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose first 256 ids are the bytes of the text in UTF-8, followed by :data:`SPECIAL_TOKENS`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_letters())}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>", "<|begin|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself if printable, else one above U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]


def write_model(folder: str | Path, seed: int = 0, hidden: int = 128, layers: int = 2) -> None:
    """Write a Qwen3 folder (config, safetensors, tokenizer) with random weights; about 0.46 M parameters by default.

    Args:
        folder: where to write it.
        seed: of the weights.
        hidden: hidden size; the heads stay 4 (2 for keys and values) of ``hidden / 4``.
        layers: number of layers.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer()
    ids = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.02,
        eos_token_id=ids["<|end|>"],
        pad_token_id=ids["<|pad|>"],
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
        # transformers leaves this row at zero, where RMSNorm's gradient is 1 / sqrt(eps): one sampled pad token would
        # then drown every other gradient.
        with torch.no_grad():
            model.model.embed_tokens.weight[config.pad_token_id].normal_(std=config.initializer_range)
    model.generation_config.eos_token_id = ids["<|end|>"]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def additions(seed: int = 0, held_out_share: float = 0.1) -> tuple[list[dict], list[dict]]:
    """All 8100 sums of two two-digit numbers as rows with ``messages`` and ``ground_truth``, in two parts.

    The parts are a seeded random split: a rule on the operands (a hash, a modulus) would hold out whole families of
    sums, and accuracy on them would measure something else.

    Returns:
        The training rows and the held-out rows.
    """
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(f"additions/{seed}").shuffle(pairs)
    rows = [
        {"messages": [{"role": "user", "content": f"{a}+{b}="}], "ground_truth": str(a + b), "data_source": "additions"}
        for a, b in pairs
    ]
    num_held_out = round(held_out_share * len(rows))
    return rows[num_held_out:], rows[:num_held_out]


def with_wrong_answers(rows: list[dict], seed: int = 0) -> list[dict]:
    """Rows of :func:`additions` as pairs: ``chosen`` is the sum, ``rejected`` another one with one digit changed."""
    draw, pairs = random.Random(f"pairs/{seed}"), []
    for row in rows:
        right = row["ground_truth"]
        place = draw.randrange(len(right))
        digit = draw.choice([x for x in "123456789" if x != right[place]])
        wrong = right[:place] + digit + right[place + 1 :]
        pairs.append({"prompt": row["messages"], "chosen": right, "rejected": wrong, "data_source": "additions"})
    return pairs


def write_demo(out: str | Path, seed: int = 0) -> None:
    """Write ``model/``, ``train.jsonl``, ``heldout.jsonl`` and ``pairs.jsonl`` below ``out``."""
    out = Path(out)
    write_model(out / "model", seed)
    train, held_out = additions(seed)
    files = {"train.jsonl": train, "heldout.jsonl": held_out, "pairs.jsonl": with_wrong_answers(train, seed)}
    for name, rows in files.items():
        (out / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hybridflow.data.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", required=True, type=Path, help="folder for model/ and the .jsonl files")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the split (default 0)")
    given = parser.parse_args()
    write_demo(given.out, given.seed)
    print(f"Wrote {given.out}/model, train.jsonl (7290 rows), heldout.jsonl (810 rows) and pairs.jsonl (7290 pairs).")


if __name__ == "__main__":
    main()
