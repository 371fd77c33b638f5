"""Every format gives the rows a user wrote, and every broken row is refused where it stands."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.config import DataConfig
from hybridflow.data.sources import load_rows, stream_seed
from hybridflow.errors import DataError

USER = {"role": "user", "content": "2+3="}
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be brief."}, USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "5"},
    "extra_info": {"split": "train", "index": 0},
}


def read(source: object, **settings: object) -> list:
    return load_rows(str(source), DataConfig(train=str(source), **settings), seed=0)


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refusal(source: object, **settings: object) -> str:
    with pytest.raises(DataError) as caught:
        read(source, **settings)
    return str(caught.value)


def test_verl_rows_are_read_as_they_are(tmp_path: Path):
    (row,) = read(write_lines(tmp_path / "a.jsonl", VERL_ROW))
    assert row.messages == VERL_ROW["prompt"]
    assert (row.ground_truth, row.data_source, row.answer) == ("5", "openai/gsm8k", None)
    assert row.extra_info == {"ability": "math", "split": "train", "index": 0}


def test_a_parquet_file_gives_the_rows_of_the_jsonl_file(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL_ROW, VERL_ROW]), tmp_path / "a.parquet")
    from_lines = read(write_lines(tmp_path / "a.jsonl", VERL_ROW, VERL_ROW))
    from_parquet = read(tmp_path / "a.parquet")
    for left, right in zip(from_lines, from_parquet, strict=True):
        assert replace(left, where="") == replace(right, where="")
    assert from_parquet[1].where.endswith("a.parquet, row 2")


def test_simple_rows_name_their_columns(tmp_path: Path):
    path = tmp_path / "sums.json"
    path.write_text(json.dumps([{"question": "2+3=", "answer": 5, "level": 1}]))
    (row,) = read(path, prompt_key="question", answer_key="answer")
    assert row.messages == [USER]
    assert (row.ground_truth, row.data_source, row.extra_info) == (5, "sums", {"level": 1})


def test_a_final_assistant_message_is_the_answer_and_not_part_of_the_prompt(tmp_path: Path):
    (row,) = read(write_lines(tmp_path / "a.jsonl", {"messages": [USER, {"role": "assistant", "content": "5"}]}))
    assert row.messages == [USER]
    assert (row.answer, row.ground_truth) == ("5", "5")


def test_a_reward_may_need_no_ground_truth(tmp_path: Path):
    (row,) = read(write_lines(tmp_path / "a.jsonl", {"prompt": "Tell a joke."}), answer_key="")
    assert row.ground_truth is None


def test_folders_saved_by_datasets_are_read_and_splits_are_named(tmp_path: Path):
    import datasets

    part = datasets.Dataset.from_list([{"prompt": [USER], "ground_truth": "5"}])
    part.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "two"))
    assert read(tmp_path / "one")[0].messages == [USER]
    assert read(tmp_path / "two" / "train")[0].ground_truth == "5"
    assert "splits test, train: name one, such as" in refusal(tmp_path / "two")


def test_a_folder_of_files_is_one_data_set_unless_it_mixes_splits(tmp_path: Path):
    row = {"prompt": "2+3=", "ground_truth": "5"}
    write_lines(tmp_path / "train-0.jsonl", row)
    write_lines(tmp_path / "train-1.jsonl", row, row)
    assert len(read(tmp_path)) == 3
    write_lines(tmp_path / "test-0.jsonl", row)
    assert "test, train" in refusal(tmp_path)
    assert len(read(f"{tmp_path}/train-*")) == 3
    assert "data: no file matches" in refusal(f"{tmp_path}/dev-*")


def test_a_row_without_a_prompt_is_refused_with_its_line_and_the_setting(tmp_path: Path):
    path = write_lines(
        tmp_path / "a.jsonl", {"prompt": "1+1=", "ground_truth": "2"}, {"promt": "x", "ground_truth": "2"}
    )
    message = refusal(path)
    assert "a.jsonl, line 2" in message and "Did you mean 'promt'?" in message and "data.prompt_key" in message


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": "1+1="}, "no ground truth"),
        ({"prompt": "  ", "ground_truth": "2"}, "the prompt is empty"),
        ({"prompt": [], "ground_truth": "2"}, "a text or a list of messages"),
        ({"prompt": [{"role": "user"}], "ground_truth": "2"}, "message 1 needs texts 'role' and 'content'"),
        ({"prompt": [{"role": "assistant", "content": "2"}]}, "only an answer and no prompt"),
        (
            {"messages": [USER, {"role": "assistant", "content": "5", "tool_calls": [{"id": "a"}], "name": "x"}]},
            "column 'messages': message 2 has 'name', which would not reach the model: a message is a 'role' and a "
            "'content'. Write what the model has to see into 'content', or remove 'name', 'tool_calls'.",
        ),
        ({"prompt": "1+1=", "ground_truth": "2", "extra_info": 3}, "extra_info is int"),
        ({"prompt": "1+1=", "ground_truth": [1, math.nan]}, "the ground truth [1, nan] holds NaN or infinity"),
        ({"prompt": None, "ground_truth": "2"}, "the row has no value in column 'prompt' (data.prompt_key) and no "),
        ({"prompt": "1+1=", "ground_truth": None}, "the row has no value in column 'ground_truth' (data.answer_key)"),
        ({"prompt": "1+\ud83d=", "ground_truth": "2"}, r"message 1 has '\ud83d' at character 3: one half of a pair"),
        ({"prompt": [{**USER, "role": "user\ud800"}], "ground_truth": "2"}, r"message 1 has '\ud800' at character 5"),
        ({"prompt": "1+1=", "ground_truth": ["\ud800"]}, r"the ground truth ['\ud800'] holds one half of a pair (surr"),
        (["1+1=", "2"], "not list"),
    ],
)
def test_a_row_that_breaks_the_format_is_refused_with_its_line(tmp_path: Path, row: object, wanted: str):
    message = refusal(write_lines(tmp_path / "a.jsonl", row))
    assert wanted in message and "a.jsonl, line 1" in message


def test_fields_that_a_message_lacks_may_be_null(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    rows = [
        {"messages": [USER, {"role": "assistant", "content": "5"}]},
        {"messages": [{**USER, "tool_calls": [], "name": None}, {"role": "assistant", "content": "5"}]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "a.parquet")["messages"][0][0].as_py().keys() > USER.keys()
    assert [row.messages for row in read(tmp_path / "a.parquet")] == [[USER], [USER]]


def test_a_ground_truth_of_bytes_is_refused_because_no_answer_equals_it(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1="], "ground_truth": [b"2"]}), tmp_path / "a.parquet")
    assert "a.parquet, row 1: the ground truth b'2' holds bytes, which equal no text." in refusal(
        tmp_path / "a.parquet"
    )


def test_a_source_that_cannot_be_read_is_refused(tmp_path: Path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.csv").write_text("prompt,answer\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "ground_truth": 1}\n{oops\n')
    (tmp_path / "bad.json").write_text('{"prompt": "a"}')
    (tmp_path / "nothing").mkdir()
    assert "holds no rows" in refusal(tmp_path / "empty.jsonl")
    assert "unknown extension '.csv'" in refusal(tmp_path / "a.csv")
    assert "bad.jsonl, line 2: not JSON" in refusal(tmp_path / "bad.jsonl")
    assert "a .json file is a list of rows" in refusal(tmp_path / "bad.json")
    assert "holds no .jsonl" in refusal(tmp_path / "nothing")
    (tmp_path / "folder-1.jsonl").mkdir()
    assert "folder-1.jsonl: cannot be read (Is a directory)" in refusal(f"{tmp_path}/folder-*")
    (tmp_path / "long.jsonl").write_text(f'{{"prompt": "a", "ground_truth": {"1" * 5000}}}\n')
    assert "long.jsonl, line 1: not JSON (Exceeds the limit (4300 digits)" in refusal(tmp_path / "long.jsonl")
    (tmp_path / "long.json").write_text(f'[{{"prompt": "a", "ground_truth": {"1" * 5000}}}]')
    assert "long.json: not JSON (Exceeds the limit (4300 digits)" in refusal(tmp_path / "long.json")
    assert "Did you mean 'empty.jsonl'?" in refusal(tmp_path / "emty.jsonl")


def test_files_of_windows_programs_are_read(tmp_path: Path):
    row = b'{"prompt": "1+1=", "ground_truth": "2"}'
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + row + b"\r\n\r\n" + row + b"\r\n")
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf[" + row + b"]")
    assert [r.ground_truth for r in read(tmp_path / "a.jsonl")] == ["2", "2"]
    assert [r.ground_truth for r in read(tmp_path / "a.json")] == ["2"]


def test_a_prompt_column_of_the_users_choice_is_not_replaced_by_messages(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", {"messages": [USER], "ground_truth": "2"})
    assert read(path)[0].messages == [USER]
    assert "has no column 'question' (data.prompt_key)." in refusal(path, prompt_key="question")


def test_damaged_files_and_folders_are_named(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    whole = tmp_path / "whole.parquet"
    rows = [{"prompt": f"{i}+1=", "ground_truth": str(i + 1)} for i in range(2000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), whole)
    content = bytearray(whole.read_bytes())
    content[100:4000] = bytes(3900)
    (tmp_path / "holed.parquet").write_bytes(content)
    (tmp_path / "text.parquet").write_text("no Parquet")
    for name in ("holed", "text"):
        assert f"{name}.parquet: not readable as Parquet after row 0 (" in refusal(tmp_path / f"{name}.parquet")
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert "saved holds no split." in refusal(saved)
    (saved / "train").mkdir()
    (saved / "train" / "state.json").write_text("{")
    assert "saved/train: datasets cannot read it (" in refusal(saved)


def test_procedural_tasks_keep_what_their_scorer_needs():
    rows = read("reasoning_gym:gcd,leg_counting", options={"size": 3, "gcd": {"max_value": 20}})
    assert [row.data_source for row in rows] == ["reasoning_gym:gcd"] * 3 + ["reasoning_gym:leg_counting"] * 3
    assert rows[0].extra_info["task"] == "gcd" and rows[0].extra_info["options"] == {"max_value": 20}
    assert rows[0].messages[0]["content"] == rows[0].extra_info["item"]["question"]
    assert rows[0].ground_truth == rows[0].extra_info["item"]["answer"]


def test_procedural_tasks_repeat_with_the_seed_and_do_not_overlap_with_the_next():
    def questions(seed: int) -> set[str]:
        config = DataConfig(train="", options={"size": 20, "min_digits": 4, "min_terms": 4})
        return {row.messages[0]["content"] for row in load_rows("reasoning_gym:chain_sum", config, seed)}

    assert questions(0) == questions(0)
    assert not questions(0) & questions(1)
    assert len({stream_seed("chain_sum", seed) for seed in range(100)}) == 100


def test_an_unknown_task_or_setting_names_the_nearest_one():
    assert "Did you mean 'chain_sum'?" in refusal("reasoning_gym:chainsum")
    assert "Did you mean 'max_value'?" in refusal("reasoning_gym:gcd", options={"max_valu": 3})
    assert "reasoning_gym:gcd refuses" in refusal("reasoning_gym:gcd", options={"min_numbers": 0})
    assert "names no task" in refusal("reasoning_gym:")


def test_bytes_that_are_not_utf8_and_endless_nesting_are_named_with_their_line(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "1+1=", "ground_truth": "2"}\n\xff\xfe\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not UTF-8"):
        read(path)
    path.write_text('{"prompt": "1+1=", "ground_truth": "2"}\n' + "[" * 100_000)
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not JSON"):
        read(path)
