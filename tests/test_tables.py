"""Tables of named columns: every kind of file, folders as the hub lays them out, and the hub, from its cache."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_servers import closed_hub
from test_cli import farspan, last_line, refused

from farspan.lm import LM
from farspan.text import hub as hub_module
from farspan.text.documents import read_texts
from farspan.text.formats import FORMATS
from farspan.text.hub import CONVERTED
from farspan.text.tables import Table, find_table, hub_table, read_table

ROWS = [{"text": "größer", "label": "1"}, {"text": "two, or\nthree", "label": "0"}]


def parquet(path: Path, rows: list[dict[str, Any]], names: dict[str, list[str]] | None = None) -> Path:
    """A parquet file, whose numbers have names as the hub writes them."""
    arrow, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist(rows)
    if names:
        kinds = {key: {"names": values, "_type": "ClassLabel"} for key, values in names.items()}
        others = {key: {"dtype": "string", "_type": "Value"} for key in rows[0] if key not in names}
        about = {"info": {"features": {key: kinds.get(key) or others[key] for key in rows[0]}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A cache of the hub's files as huggingface_hub writes it: `put(id, files, branch)`."""
    datasets, constants = pytest.importorskip("datasets"), pytest.importorskip("huggingface_hub").constants
    root = tmp_path / "hub"
    root.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    datasets.disable_progress_bars()

    def put(id: str, files: dict[str, Any], branch: str = "main") -> None:
        place = root / f"datasets--{id.replace('/', '--')}"
        commit = f"{len(list(place.glob('snapshots/*'))) + 1:040x}"
        (place / "refs" / branch).parent.mkdir(parents=True, exist_ok=True)
        (place / "refs" / branch).write_text(commit)
        (place / "blobs").mkdir(exist_ok=True)
        for name, content in files.items():
            link = place / "snapshots" / commit / name
            blob = place / "blobs" / f"{commit}{name.replace('/', '-')}"
            link.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                blob.write_text(content)
            else:
                parquet(blob, content, {"label": ["neg", "pos"]} if "label" in content[0] else None)
            link.symlink_to(os.path.relpath(blob, link.parent))

    return SimpleNamespace(put=put, root=root)


# files


def test_every_kind_of_file_holds_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in ROWS))
    (tmp_path / "a.ndjson").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "a.json").write_text(json.dumps(ROWS, ensure_ascii=False))
    for suffix, between in (("csv", ","), ("tsv", "\t")):
        lines = [between.join(f'"{word}"' for word in words) for words in (ROWS[0], *(row.values() for row in ROWS))]
        (tmp_path / f"a.{suffix}").write_text("\n".join(lines) + "\n")
    parquet(tmp_path / "a.parquet", ROWS)
    for suffix in FORMATS:
        assert read_table(tmp_path / f"a{suffix}").rows == ROWS, suffix


def test_columns_without_a_name_may_be_several(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,,\na,,\n")
    assert read_table(tmp_path / "a.csv").rows == [{"text": "a", "": ""}]


def test_a_cell_may_hold_a_whole_book(tmp_path: Path) -> None:
    book = "a long story. " * 20_000
    (tmp_path / "a.csv").write_text(f"text\n{book}\n")
    assert read_table(tmp_path / "a.csv").rows == [{"text": book}]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b'{"a": 1}\n{', r"a\.jsonl, line 2 is damaged: expected JSON"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl, line 1 has no named columns: got list \[1\], expected an object"),
        ("a.json", b"{", r"a\.json is damaged: expected JSON"),
        ("a.csv", b"\xff\xfe", r"a\.csv is not UTF-8"),
        ("a.csv", b"text,label\n", r"a\.csv holds no rows"),
        ("a.csv", b"text,label,text\na,b,c\n", r"a\.csv has two columns 'text'"),
        ("a.jsonl", b"\n", r"a\.jsonl holds no rows"),
        ("a.parquet", b"PAR1", r"a\.parquet is not a parquet file, or is damaged"),
        ("a.parquet", b"", r"a\.parquet is not a parquet file, or is damaged"),
        ("a.jsonl", b'{"a": 1}\n' + b"[" * 100_000, r"a\.jsonl, line 2 is damaged: got values nested"),
        ("a.json", b"[" * 100_000, r"a\.json is damaged: got values nested"),
        ("a.jsonl", b'{"a": ["\\ud800"]}', r"a\.jsonl, line 1 holds '.ud...' at character .*half of a surrogate pair"),
        (
            "a.json",
            b'[{"a": 1}, {"\\ud800": 1}]',
            r"a\.json, row 2 holds '.ud...' at character .*half of a surrogate pair",
        ),
        (
            "a.csv",
            b"text,label\na,b\na\n",
            r"a\.csv, line 3 has other columns than the header: got 1 cells, expected 2",
        ),
        ("a.csv", b"text,label\na,b,c\n", r"a\.csv, line 2 has other columns.*: got 3 cells, expected 2\. Put cells"),
        ("a.csv", b"text,label\n" + b"9" * 9 + b",\xff", r"a\.csv is not UTF-8 text: got the byte 0xff at place 21"),
        ("a.json", b'[{"a": ' + b"9" * 5000 + b"}]", r"a\.json is damaged: got an integer of more than 4,300 digits"),
        ("a.txt", b"x", r"a\.txt has an unknown suffix: expected one of \.jsonl"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        read_table(tmp_path / name)


def test_a_column_is_the_first_of_those_wanted_and_no_row_lacks_it() -> None:
    assert Table("x", [{"a": 1, "b": 2}]).column("c", "b", "a") == "b"
    with pytest.raises(ValueError, match=r"x has no column 'c' or 'd'; it has \['a', 'b'\]"):
        Table("x", [{"a": 1, "b": 2}]).column("c", "d")
    with pytest.raises(ValueError, match=r"x, row 2 has no 'b'; it has \['a'\]"):
        Table("x", [{"b": 1}, {"a": 1}]).column("b")


def test_a_byte_order_mark_is_no_part_of_a_column(tmp_path: Path) -> None:
    contents = {
        "csv": "text,label\na,b\n",
        "json": '[{"text": "a", "label": "b"}]',
        "jsonl": '{"text": "a", "label": "b"}',
    }
    for suffix, content in contents.items():
        (tmp_path / f"a.{suffix}").write_bytes(content.encode("utf-8-sig"))
        assert read_table(tmp_path / f"a.{suffix}").rows == [{"text": "a", "label": "b"}]


@pytest.mark.parametrize(
    "metadata",
    [
        "[]",
        "3",
        '{"info": 1}',
        '{"info": {"features": []}}',
        '{"info": {"features": {"a": {"names": "x"}}}}',
        "{",
        "\xff",
    ],
)
def test_metadata_of_parquet_that_is_damaged_is_named(tmp_path: Path, metadata: str) -> None:
    arrow, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"a": [0, 1]}).replace_schema_metadata({"huggingface": metadata.encode("latin-1")})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"the metadata 'huggingface' of .*a\.parquet is damaged: [^\n]*$"):
        read_table(tmp_path / "a.parquet")


def test_the_case_of_an_ending_and_the_home_of_nobody(tmp_path: Path) -> None:
    (tmp_path / "A.JSONL").write_text('{"text": "a"}')
    assert read_table(tmp_path / "A.JSONL").rows == [{"text": "a"}]
    with pytest.raises(ValueError, match="'~no-such-user/a\\.csv' is not a path"):
        read_table("~no-such-user/a.csv")
    with pytest.raises(ValueError, match="a name is empty"):
        read_table("")


# folders


def test_a_folder_has_its_splits_as_files_of_any_kind(tmp_path: Path) -> None:
    for shard in (1, 0):
        parquet(tmp_path / "data" / f"train-0000{shard}-of-00002.parquet", [{"text": f"part {shard}"}])
    assert [row["text"] for row in find_table(tmp_path / "data", ["train"]).rows] == ["part 0", "part 1"]
    parquet(tmp_path / "converted" / "validation" / "0000.parquet", [{"text": "a"}])
    assert find_table(tmp_path / "converted", ["test", "validation"]).rows == [{"text": "a"}]
    assert read_table(tmp_path / "converted").rows == [{"text": "a"}]
    (tmp_path / "converted" / "test.jsonl").write_text('{"text": "b"}\n')
    assert read_table(tmp_path / "converted", ("test", "validation")).rows == [{"text": "b"}]
    with pytest.raises(ValueError, match=r"has no file dev that ends in .*; it holds \['test.jsonl', 'validation'\]"):
        read_table(tmp_path / "converted", ("dev",))


def test_a_split_of_which_files_are_missing_is_refused(tmp_path: Path) -> None:
    for number in (0, 2):
        (tmp_path / f"test-{number:05}-of-00003.parquet").touch()
    with pytest.raises(ValueError, match="is one of 3 files, of which 2 are there"):
        read_table(tmp_path)


def test_what_is_nowhere_is_named_with_what_is_possible() -> None:
    for name in ("none.jsonl", "folder/none.JSONL"):
        with pytest.raises(ValueError, match=f"{name!r} is neither a file .* nor a folder nor a hub data set"):
            read_table(name)
    with pytest.raises(ValueError, match="as files it is google-research-datasets/nq_open:validation on the hub"):
        read_table("nq_open")


# the hub, from its cache


def test_a_data_set_of_the_hub_is_read_from_its_cache(hub: Any) -> None:
    files = {f"data/{name}-00000-of-00001.parquet": [{"text": name, "label": 1}] for name in ("train", "test")}
    hub.put("org/set", files)
    table = hub_table("org/set", None, "test")
    assert (table.rows, table.names) == ([{"text": "test", "label": 1}], {"label": ["neg", "pos"]})
    assert read_table("org/set:train").rows == [{"text": "train", "label": 1}]
    assert read_table("org/set", ("test",)).rows == table.rows
    assert read_table("org/set").rows == table.rows, "it has no validation"
    with pytest.raises(ValueError, match=r'org/set@default:dev cannot be read: Unknown split "dev"'):
        read_table("org/set:dev")


def test_a_configuration_is_the_one_that_was_named(hub: Any) -> None:
    card = "---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train-*\n"
        for name in ("big", "plus")
    )
    files = {f"{name}/train-00000-of-00001.parquet": [{"text": name}] for name in ("big", "plus")}
    hub.put("org/several", {"README.md": f"{card}---\n"} | files)
    assert read_table("org/several@plus:train").rows == [{"text": "plus"}]
    with pytest.raises(ValueError, match=r"org/several@small:train cannot be read: .*'small' not found"):
        read_table("org/several@small:train")


def test_the_parquet_that_the_hub_makes_of_a_script_is_read_from_its_branch(hub: Any) -> None:
    hub.put("org/old", {"old.py": "raise RuntimeError\n"})
    hub.put("org/old", {"plain/validation/0000.parquet": [{"text": "a", "label": 0}]}, CONVERTED)
    table = hub_table("org/old", "plain", "validation", converted=True)
    assert (table.rows, table.names["label"]) == ([{"text": "a", "label": 0}], ["neg", "pos"])


def test_a_data_set_that_is_only_a_script_names_its_parquet(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    files = (
        rf"only as a script.*hf://datasets/org/old@{CONVERTED}/default/test/\*\.parquet: download that and give the fol"
    )
    hub.put("org/old", {"old.py": "raise RuntimeError\n"})
    with pytest.raises(ValueError, match=files):
        read_table("org/old", ("test",))

    def script(*given: Any, **named: Any) -> Any:  # what `datasets` says online
        raise RuntimeError("Dataset scripts are no longer supported, but found trivia_qa.py")

    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", script)
    with pytest.raises(ValueError, match=r"script.*as files it is mandarjoshi/trivia_qa@rc\.nocontext:validation"):
        read_table("someone/trivia_qa:test")


def test_what_the_cache_does_not_hold_is_not_found_offline(hub: Any) -> None:
    said = r"dataset org/none@default:test is not cached, and HF_HUB_OFFLINE is set: unset it to download; or give a"
    with pytest.raises(ValueError, match=said):
        read_table("org/none:test")
    with pytest.raises(ValueError, match=said):
        hub_table("org/none", None, "test", converted=True)


@pytest.mark.parametrize("converted", [False, True])
def test_what_is_not_cached_is_refused_at_once_without_a_network(
    converted: bool, hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = closed_hub(monkeypatch)
    said = f"dataset org/none@default:test is not cached, and {closed} cannot be reached: .* file or folder$"
    with pytest.raises(ValueError, match=said):
        hub_table("org/none", None, "test", converted=converted)
    hub.put("org/set", {"test.jsonl": '{"text": "a"}\n'})
    assert hub_table("org/set", None, "test").rows == [{"text": "a"}]
    said = f"Unknown split .* the rest of it is not cached, and {closed} cannot be reached"
    with pytest.raises(ValueError, match=said):
        hub_table("org/set", None, "train")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({}, "JSON parse error: Invalid value"),
        ({"test.jsonl": '{"text": "a", "x": 1}\n'}, "Couldn't cast text: string x: "),
    ],
)
def test_damaged_files_of_the_hub_are_refused_in_one_line(hub: Any, more: dict[str, str], problem: str) -> None:
    hub.put("org/set", {"train.jsonl": '{"text": "a"}\n' + ("" if more else '{"text":\n')} | more)
    with pytest.raises(
        ValueError, match=f"^hub dataset org/set@default:train cannot be read: {problem}.*Correct its files$"
    ):
        read_table("org/set:train")


def test_online_the_hub_is_asked_for_the_name_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*given: Any, **named: Any) -> Any:
        asked.append((given, named))
        return SimpleNamespace(features={}, to_list=lambda: [{"text": "a"}])

    monkeypatch.setattr(hub_module, "cached_only", lambda: nullcontext(False))
    monkeypatch.setattr(hub_module, "optional_import", lambda module, extra: SimpleNamespace(load_dataset=load_dataset))
    hub_table("a/b", "c", "d")
    hub_table("a/b", None, "d", converted=True)
    path = f"hf://datasets/a/b@{CONVERTED}/default/d/*.parquet"
    assert asked == [(("a/b", "c"), {"split": "d"}), (("parquet",), {"data_files": {"d": path}, "split": "d"})]


def test_tasks_take_their_data_from_the_hub(hub: Any, lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for saved in (lm.model, lm.tokenizer):
        saved.save_pretrained("tiny")
    review = [{"text": f"quick fox {i}", "label": i % 2} for i in range(6)]
    hub.put("cornell-movie-review-data/rotten_tomatoes", {f"{split}.parquet": review for split in ("train", "test")})
    meeting = [{"id": str(i), "input": f"Who?\n\nfox {i}", "output": "dog"} for i in range(3)]
    hub.put("tau/scrolls", {"qmsum/validation/0000.parquet": meeting}, CONVERTED)
    people = [{"question": f"who is {i}", "answer": [str(i)]} for i in range(4)]
    hub.put("google-research-datasets/nq_open", {"validation-00000-of-00001.parquet": people})
    for name, lengths in (
        ("icl:set=mr", "2"),
        ("zeroscrolls:set=qmsum,new_tokens=2", "300"),
        ("qa:data=google-research-datasets/nq_open:validation,new_tokens=2", "0"),
    ):
        common = ("task", name, "tiny", "--lengths", lengths, "--repeats", 2, "--device", "cpu", "--json")
        [found] = last_line(farspan(*common))["results"]
        assert found["num_examples"] == 2, name
    assert "CogComp/trec@default:train is not cached" in refused(farspan("task", "icl:set=trec_fine", "tiny"))


def test_documents_too_come_from_the_hubs_cache(hub: Any) -> None:
    hub.put("org/books", {"train-00000-of-00001.parquet": [{"text": "one"}, {"text": "two"}]})
    assert list(read_texts("org/books")) == ["one", "two"]
