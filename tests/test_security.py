"""What comes from a stranger, folders, models and names, runs no command and no code."""

import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from farspan import cepe, record
from farspan.lm import load
from farspan.loading import load_config, load_tokenizer
from farspan.measuring.loader import Load
from farspan.record import provenance

from cepe_models import tiny_encoder
from tiny import configure, tiny_model

pytestmark = pytest.mark.usefixtures("hub_offline")


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that does not exist while no command of the current folder's .git/config has run."""
    trap, proof, folder = tmp_path / "trap.sh", tmp_path / "ran", tmp_path / "unpacked"
    trap.write_text(f"#!/bin/sh\ntouch {proof}\ncat\n")
    trap.chmod(trap.stat().st_mode | stat.S_IXUSR)
    folder.mkdir()
    clean = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "PATH": os.environ["PATH"]}

    def git(*arguments: str) -> None:
        name = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *name, *arguments], cwd=folder, check=True, capture_output=True, env=clean)

    git("init")
    (folder / "text.txt").write_text("a text\n")
    git("add", ".")
    git("commit", "-m", "text")
    (folder / ".gitattributes").write_text("*.txt filter=trap diff=trap\n")
    settings = ("core.fsmonitor", "filter.trap.clean", "filter.trap.smudge", "diff.trap.textconv", "core.sshCommand")
    for setting in (*settings, "core.pager", "core.hooksPath", "alias.describe", "core.editor"):
        git("config", setting, f"!{trap}" if setting.startswith("alias") else str(trap))
    (folder / "text.txt").write_text("a text that was changed\n")  # so that the filter has to run to compare it
    os.utime(folder / "text.txt", (1, 1))
    monkeypatch.chdir(folder)
    return proof


def test_no_command_of_a_folders_git_config_runs(ran: Path) -> None:
    with record.Run.open("run", {"task": "curve"}) as run:
        session = run.header["sessions"][0]
    assert not ran.exists()
    assert len(session["source"]) == 16
    subprocess.run(["git", "describe", "--always", "--dirty"], check=True, capture_output=True)
    assert ran.exists(), "the folder of this test is no trap"


@pytest.mark.parametrize("packed", [False, True], ids=["loose", "packed"])
def test_the_recorded_commit_is_that_of_the_checkout(tmp_path: Path, packed: bool) -> None:
    def git(*arguments: str, where: Path = tmp_path) -> str:
        name = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *name, *arguments], cwd=where, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    checkout, other, package = tmp_path / "checkout", tmp_path / "other", tmp_path / "checkout" / "src" / "farspan"
    package.mkdir(parents=True)
    assert provenance.commit_of(package) is None
    git("init", where=checkout)
    assert provenance.commit_of(package) is None  # a branch without a commit
    git("commit", "--allow-empty", "-m", "one", where=checkout)
    git("worktree", "add", str(other), where=checkout)
    git("commit", "--allow-empty", "-m", "two", where=other)
    if packed:
        git("pack-refs", "--all", where=checkout)
    (other / "src" / "farspan").mkdir(parents=True)
    for folder in (checkout, other):
        assert provenance.commit_of(folder / "src" / "farspan") == git("rev-parse", "HEAD", where=folder)
    git("checkout", "--detach", where=other)
    assert provenance.commit_of(other / "src" / "farspan") == git("rev-parse", "HEAD", where=other)
    assert provenance.commit_of(tmp_path / "site-packages" / "farspan") is None


def test_the_recorded_hash_of_the_source_tells_changes_apart(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    before = provenance.source_hash(tmp_path)
    (tmp_path / "a.py").write_text("two")
    assert provenance.source_hash(tmp_path) != before


# weights and code of models


def sharded(folder: Path, shard: str) -> None:
    """Moves the weights of a folder into `shard`, which an index of safetensors names."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    target = folder / shard
    save_file(weights, target, {"format": "pt"}) if target.suffix == ".safetensors" else torch.save(weights, target)
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("shard", ["model-1.bin", "../outside.bin", "../outside.safetensors", "OUTSIDE/model.pt"])
def test_an_index_that_names_other_files_than_its_safetensors_is_refused(folder: Path, shard: str) -> None:
    sharded(folder, shard.replace("OUTSIDE", str(folder.parent)))
    with pytest.raises(ValueError, match=r"index\.json names the weights .*expected \.safetensors files of the same"):
        load(folder, device="cpu")


def test_an_index_of_safetensors_is_read_also_through_links(folder: Path) -> None:
    sharded(folder, "model-1.safetensors")
    blob = (folder / "model-1.safetensors").rename(folder.parent / "blob")
    (folder / "model-1.safetensors").symlink_to(blob)
    assert load(folder, device="cpu").identity["parameters"]


@pytest.mark.parametrize("named", ["adapter_model.bin", "../x.safetensors", 5])
def test_weights_that_a_config_names_are_safetensors_of_its_folder(folder: Path, named: object) -> None:
    configure(folder, transformers_weights=named)
    with pytest.raises(ValueError, match=r"config.json names the weights .*expected a \.safetensors file of the same"):
        load(folder, device="cpu")


def test_pickled_weights_of_an_adapter_are_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "x"}')
    torch.save({}, folder / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"its adapter are pickled .*--allow-pickle"):
        load(folder, device="cpu")


@pytest.mark.parametrize("of", ["base", "encoder"])
def test_cepe_reads_no_pickled_weights_of_base_and_encoder(folder: Path, tmp_path: Path, of: str) -> None:
    tiny_encoder().save_pretrained(tmp_path / "encoder")
    at = folder if of == "base" else tmp_path / "encoder"
    torch.save(load_file(at / "model.safetensors"), at / "pytorch_model.bin")
    (at / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no safetensors weights; .*--allow-pickle"):
        cepe.from_base(folder, tmp_path / "encoder")
    assert cepe.from_base(folder, tmp_path / "encoder", allow_pickle=True)


@pytest.fixture
def evil(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose config, model and tokenizer are Python code of its own; nothing may run it, or ask."""
    proof = tmp_path / "proof"
    code = f"open({str(proof)!r}, 'w').close()\n"
    (folder / "evil.py").write_text(code)
    configure(folder, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}, "tokenizer_class": "T"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    yield folder
    assert not proof.exists()


def test_code_of_a_model_is_refused_without_a_question(evil: Path) -> None:
    with pytest.raises(ValueError, match=r"Python code of its own, .*--trust-remote-code"):
        load(evil)
    with pytest.raises(ValueError, match="Python code of its own"):
        Load().trained(str(evil))
    with pytest.raises(ValueError, match=r"Python code of its own, .*--trust-remote-code"):
        cepe.from_base(evil, tiny_encoder())
    with pytest.raises(ValueError, match=r"Python code of its own, .*--trust-remote-code"):
        cepe.from_base(tiny_model(), evil)


@pytest.mark.parametrize("load_part", [load_tokenizer, load_config])
def test_code_of_a_tokenizer_or_encoder_is_refused_without_a_question(
    evil: Path, load_part: Callable[..., object]
) -> None:
    with pytest.raises(ValueError, match="Python code of its own, which is not run here: choose one without"):
        load_part(evil)


def test_code_of_a_kernel_that_a_config_names_is_refused(folder: Path) -> None:
    configure(folder, attn_implementation="stranger/kernel")
    with pytest.raises(ValueError, match=r"attn_implementation = 'stranger/kernel', whose code .*--trust-remote-code"):
        load(folder)
