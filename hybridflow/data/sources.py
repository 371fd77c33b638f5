"""Where prompts come from: files, ``datasets`` folders and procedural tasks, all read into the same rows.

Where it stands: before the tokenizer; :mod:`hybridflow.data.prompts` turns rows into batches. Invariant: a row is
either read whole or refused with its file and line; no row is skipped or repaired in silence.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.config import DataConfig
from hybridflow.errors import DataError, nearest

REASONING_GYM = "reasoning_gym:"
EXTENSIONS = (".jsonl", ".json", ".parquet")
MESSAGE_KEYS = ("role", "content")
SPLITS = ("train", "test", "validation", "valid", "dev", "eval", "heldout")


@dataclass(frozen=True)
class Row:
    """One prompt with what is known about it.

    Attributes:
        messages: the conversation up to the answer, as ``{"role": ..., "content": ...}``.
        ground_truth: what the reward compares with; None where there is none.
        data_source: name of the data set, for functions that score several.
        extra_info: everything else the row holds.
        answer: the final assistant message, where the row has one.
        where: file and line, for errors.
    """

    messages: list[dict[str, str]]
    ground_truth: Any = None
    data_source: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)
    answer: str | None = None
    where: str = ""


def load_rows(source: str, config: DataConfig, seed: int) -> list[Row]:
    """Read every row of a source.

    Args:
        source: ``data.train`` or ``data.evaluate``: a file, a pattern with ``*``, a folder, or
            ``reasoning_gym:<task>[,<task>]``.
        config: names of the columns, options of procedural tasks.
        seed: of procedural tasks; give training and evaluation different ones.

    Raises:
        DataError: for a source that cannot be read or is empty, and for the first row that breaks the format.
    """
    if source.startswith(REASONING_GYM):
        rows = list(procedural_rows(source.removeprefix(REASONING_GYM), config.options, seed))
    else:
        rows = [row_from(record, where, config) for record, where in read_records(source)]
    if not rows:
        raise DataError(
            f"{source} holds no rows. Give data.train (or data.evaluate) a source with at least one prompt."
        )
    return rows


def read_records(source: str) -> Iterator[tuple[Any, str]]:
    """Yield each record of a file, pattern or folder with the place it stands at (``train.jsonl, line 7``)."""
    path = Path(source)
    if "*" in source:
        files = sorted(Path(found) for found in glob.glob(source))
        if not files:
            raise DataError(f"data: no file matches {source}.")
        for file in files:
            yield from _file_records(file)
    elif path.is_dir():
        yield from _folder_records(path)
    elif path.is_file():
        yield from _file_records(path)
    else:
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise DataError(
            f"data: {source} does not exist.{nearest(path.name, beside)} A source is a file ({', '.join(EXTENSIONS)}), "
            f"a pattern with *, a datasets folder, or {REASONING_GYM}<task>."
        )


def _file_records(path: Path) -> Iterator[tuple[Any, str]]:
    readers = {".jsonl": _json_lines, ".json": _json_array, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DataError(
            f"{path}: unknown extension {path.suffix!r}; known are {', '.join(EXTENSIONS)}. "
            "Convert the file, or give the folder that a datasets.Dataset was saved to."
        )
    try:
        yield from readers[path.suffix](path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). Give a file that this user may read.") from None


def _utf8(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8-sig")  # Windows programs begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}). Convert the file first.") from None


def _json_lines(path: Path) -> Iterator[tuple[Any, str]]:
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            where = f"{path}, line {number}"
            line = _utf8(raw, where)
            if not line.strip():
                continue
            try:
                yield json.loads(line), where
            except (ValueError, RecursionError) as error:  # a ValueError too is a number of thousands of digits
                reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
                raise DataError(f"{where}: not JSON ({reason}). A .jsonl file holds one JSON object a line.") from None


def _json_array(path: Path) -> Iterator[tuple[Any, str]]:
    try:
        records = json.loads(_utf8(path.read_bytes(), str(path)))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}). Rename it to .jsonl if it holds one object a line.") from None
    if not isinstance(records, list):
        raise DataError(f"{path}: holds a JSON {type(records).__name__}; a .json file is a list of rows.")
    for number, record in enumerate(records, 1):
        yield record, f"{path}, row {number}"


def _parquet_rows(path: Path) -> Iterator[tuple[Any, str]]:
    import pyarrow.parquet

    number = 0
    try:
        for part in pyarrow.parquet.ParquetFile(path).iter_batches():
            for record in part.to_pylist():
                number += 1
                yield record, f"{path}, row {number}"
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not readable as Parquet after row {number} ({error}). Write the file again."
        ) from None


def _folder_records(folder: Path) -> Iterator[tuple[Any, str]]:
    if (folder / "dataset_dict.json").is_file():
        splits = [path.parent.name for path in sorted(folder.glob("*/state.json"))]
        if len(splits) != 1:
            held = (
                f"the splits {', '.join(splits)}: name one, such as {folder / splits[-1]}." if splits else "no split."
            )
            raise DataError(f"{folder} holds {held}")
        yield from _folder_records(folder / splits[0])
    elif (folder / "state.json").is_file():
        import datasets

        try:
            rows = datasets.load_from_disk(str(folder))
        except Exception as error:  # whatever a damaged file makes it raise
            raise DataError(
                f"{folder}: datasets cannot read it ({type(error).__name__}: {error}). Save it again."
            ) from None
        for number, record in enumerate(rows, 1):
            yield record, f"{folder}, row {number}"
    else:
        files = sorted(p for p in folder.iterdir() if p.suffix in EXTENSIONS)
        if not files:
            raise DataError(f"data: {folder} holds no {', '.join(EXTENSIONS)} file and was not saved by datasets.")
        splits = sorted({s for s in SPLITS for f in files if f.stem == s or f.stem.startswith((f"{s}-", f"{s}_"))})
        if len(splits) > 1:
            raise DataError(
                f"{folder} holds files of {', '.join(splits)}: name one split, as in {folder}/{splits[-1]}*"
            )
        for file in files:
            yield from _file_records(file)


def row_from(record: Any, where: str, config: DataConfig) -> Row:
    """Check one record and bring it into the common form.

    verl's format is read as it is: ``prompt`` (list of messages), ``reward_model.ground_truth``, ``data_source``,
    ``extra_info``. Simple records have a text or messages in ``data.prompt_key`` (or in ``messages``) and the ground
    truth in ``data.answer_key``. A final assistant message is the row's ``answer`` and, where there is no column for
    it, its ground truth. Other columns go to ``extra_info``.

    Raises:
        DataError: naming the place, the missing or wrong column, and the setting to change.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: a row is an object with columns, not {type(record).__name__}.")
    chosen = record.get(config.prompt_key) is not None or config.prompt_key != DataConfig.prompt_key
    prompt_key = config.prompt_key if chosen else "messages"
    if record.get(prompt_key) is None:
        also = "" if chosen else " and no 'messages'"
        raise DataError(
            f"{where}: no prompt: the row has no {_column(record, config.prompt_key)} (data.prompt_key){also}."
            f"{_other(config.prompt_key, record)} Set data.prompt_key to the column with the prompt, or mend the row."
        )
    messages = messages_of(record[prompt_key], f"{where}, column {prompt_key!r}")
    answer = messages.pop()["content"] if messages[-1]["role"] == "assistant" else None
    if not messages:
        raise DataError(f"{where}, column {prompt_key!r}: only an answer and no prompt before it.")
    extra = record.get("extra_info")
    if extra is not None and not isinstance(extra, Mapping):
        raise DataError(f"{where}: extra_info is {type(extra).__name__}; it has to be an object.")
    taken = {prompt_key, config.answer_key, "reward_model", "data_source", "extra_info"}
    ground_truth = _ground_truth(record, where, config.answer_key, answer)
    try:
        json.dumps(ground_truth, allow_nan=False, ensure_ascii=False, default=_text_of).encode()
    except ValueError as error:
        raise DataError(
            f"{where}: the ground truth {ground_truth!r:.80} holds {_wrong(error)}. Mend the row."
        ) from None
    return Row(
        messages=messages,
        ground_truth=ground_truth,
        data_source=str(record.get("data_source") or Path(where.rsplit(",", 1)[0]).stem),
        extra_info={**{k: v for k, v in record.items() if k not in taken}, **(extra or {})},
        answer=answer,
        where=where,
    )


def _text_of(value: Any) -> str:
    """What a ground truth that JSON does not know, such as a date, is compared as."""
    if isinstance(value, bytes):
        raise ValueError("bytes, which equal no text")
    return str(value)


def _wrong(error: ValueError) -> str:
    if isinstance(error, UnicodeError):
        return "one half of a pair (surrogate), which is no text"
    return "NaN or infinity" if "JSON" in str(error) else str(error)


def _column(record: Mapping[str, Any], key: str) -> str:
    return f"value in column {key!r}" if key in record else f"column {key!r}"


def _other(key: str, record: Mapping[str, Any]) -> str:
    """What else the row has, where it has no such column."""
    return "" if key in record else nearest(key, record)


def messages_of(prompt: Any, where: str) -> list[dict[str, str]]:
    """A conversation, or a text as one; raises DataError that names ``where`` for what does not reach a model whole."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: the prompt is empty.")
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: a prompt is a text or a list of messages, not {prompt!r:.80}.")
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(f"{where}: message {number} needs texts 'role' and 'content', but is {message!r:.120}.")
        # Formats with one set of fields for all messages (parquet) fill those that a message lacks with nulls.
        more = sorted(key for key, value in message.items() if key not in MESSAGE_KEYS and value not in (None, "", []))
        if more:
            raise DataError(
                f"{where}: message {number} has {more[0]!r}, which would not reach the model: a message is a 'role' "
                f"and a 'content'. Write what the model has to see into 'content', or remove "
                f"{', '.join(map(repr, more))}."
            )
        for text in (message["role"], message["content"]):
            half = re.search("[\ud800-\udfff]", text)
            if half:
                raise DataError(
                    f"{where}: message {number} has {half[0]!r} at character {half.start() + 1}: one half of a pair "
                    "(surrogate), which is no text. Mend or remove it."
                )
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _ground_truth(record: Mapping[str, Any], where: str, key: str, answer: str | None) -> Any:
    """The ground truth: the column, else verl's, else the row's own final answer; None where ``key`` is empty."""
    if not key:
        return None
    if record.get(key) is not None:
        return record[key]
    reward_model = record.get("reward_model")
    if isinstance(reward_model, Mapping) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    if answer is None:
        raise DataError(
            f"{where}: no ground truth: the row has no {_column(record, key)} (data.answer_key), no "
            f"reward_model.ground_truth and no final assistant message.{_other(key, record)} Set data.answer_key, or "
            "data.answer_key='' if the reward needs none."
        )
    return answer


def procedural_rows(tasks: str, options: Mapping[str, Any], seed: int) -> Iterator[Row]:
    """Rows of reasoning-gym tasks, in the order of the tasks.

    Args:
        tasks: names, separated by commas.
        options: settings for the tasks' generators, ``size`` (rows of each task) among them. A key that is the name of
            a task holds settings for it alone.
        seed: of the generators; each task draws from its own stream.

    Yields:
        Rows whose ``extra_info`` holds ``task``, ``options`` and ``item``: what the task's own scorer needs.
    """
    from reasoning_gym.factory import DATASETS, create_dataset

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise DataError(f"{REASONING_GYM} names no task: write {REASONING_GYM}<task>[,<task>].")
    for name in names:
        if name not in DATASETS:
            raise DataError(f"{REASONING_GYM}{name}: no such task.{nearest(name, DATASETS)}")
    for name in names:
        given = {k: v for k, v in options.items() if k not in DATASETS}
        given.update(options.get(name) or {})
        _check_options(name, given, DATASETS[name][1].__dataclass_fields__)
        try:
            items: Iterable[dict] = create_dataset(name, **{**given, "seed": stream_seed(name, seed)})
        except (AssertionError, ValueError, TypeError) as error:
            raise DataError(f"{REASONING_GYM}{name} refuses data.options={dict(given)}: {error}") from error
        settings = {k: v for k, v in given.items() if k not in ("size", "seed")}
        for number, item in enumerate(items, 1):
            yield Row(
                messages=[{"role": "user", "content": item["question"]}],
                ground_truth=item["answer"],
                data_source=f"{REASONING_GYM}{name}",
                extra_info={"task": name, "options": settings, "item": item},
                where=f"{REASONING_GYM}{name}, item {number}",
            )


def _check_options(task: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in given:
        if key not in known:
            raise DataError(f"data.options.{key} is no setting of {REASONING_GYM}{task}.{nearest(key, known)}")


def stream_seed(name: str, seed: int) -> int:
    """A seed of its own for each (name, seed).

    reasoning-gym seeds item i with seed + i, so neighbouring seeds would share almost all of their items.
    """
    return int.from_bytes(hashlib.sha256(f"{name}/{seed}".encode()).digest()[:4], "big") // 2
