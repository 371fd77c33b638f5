"""What the schemas say about themselves, and the documentation made from it."""

from pathlib import Path

from hybridflow.config import GRPOConfig, LayoutConfig, RunConfig, SFTConfig
from hybridflow.settings import SCHEMAS, children, expand, free_dicts, groups_of, settings_of, type_at, with_tables

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"


def test_every_setting_says_what_it_means() -> None:
    for schema in (RunConfig, *SCHEMAS.values()):
        assert [s.path for s in settings_of(schema) if not s.doc] == []


def test_the_documentation_lists_every_setting() -> None:
    text = DOCUMENT.read_text("utf-8")
    for schema in SCHEMAS.values():
        assert [s.path for s in settings_of(schema) if f"| `{s.path}` |" not in text] == []


def test_the_documentations_tables_are_up_to_date() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert text == with_tables(text), "run: python -m hybridflow.settings docs/configuration.md"


def test_paths_of_settings_groups_and_free_names() -> None:
    paths = [s.path for s in settings_of(GRPOConfig)]
    assert len(set(paths)) == len(paths)
    assert {"steps", "roles.*.layout.tp", "pools.*.devices", "algorithm.eps", "data.options"} <= set(paths)
    assert "algorithm.eps" not in {s.path for s in settings_of(SFTConfig)}
    assert free_dicts(GRPOConfig) == (
        *("pools", "roles", "data.options", "actor.loss.options", "reward.options", "reward.components"),
        "algorithm.options",
    )
    assert children(GRPOConfig, "roles.anything") == ["pool", "layout"]
    assert children(GRPOConfig, "steps") == []
    assert type_at(GRPOConfig, "roles.anything.layout") is LayoutConfig
    assert type_at(GRPOConfig, "roles.anything.nothing") is None
    assert groups_of(GRPOConfig, "LayoutConfig") == ["roles.*.layout"]


def test_one_field_documents_several_names() -> None:
    docs = {s.path: s.doc for s in settings_of(GRPOConfig)}
    assert (
        docs["actor.loss.clip_low"]
        == docs["actor.loss.clip_high"]
        == "the ratio is clipped to [1 - clip_low, 1 + clip_high]."
    )


def test_a_star_expands_to_the_names_that_are_there() -> None:
    class Group:
        x = 1

    class Config:
        groups = {"a": Group(), "b": None}

    assert expand(Config(), "groups.*.x") == [("groups.a.x", 1)]
