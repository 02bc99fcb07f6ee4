"""The package: what it needs, what it says where an extra is missing, and that it works without the repository."""

import ast
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

import farspan
from farspan.cli import app
from farspan.train.config import shipped_configs

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
NEVER_IN_ALL = {"all", "deepspeed", "dev", "docs"}  # deepspeed needs a compiler, and docs is for the repository
MOST_CORE = 20  # packages, beyond those of torch and transformers
MOST_OF_IMPORT = 1.5  # times the CPU of importing torch and transformers, which is most of a plan; 1.2 measured
MOST_PLAN = 20  # seconds of CPU, three times the aim: it doubles where other programs share cores and caches


def required(requirements: list[str], extras: frozenset[str] = frozenset()) -> Iterator[Requirement]:
    """Yield the requirements that hold here."""
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": one}) for one in {"", *extras}):
            yield requirement


def pulled(requirements: list[str]) -> set[str]:
    """The names of all packages that pip installs for some requirements in this environment."""
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(required(requirements))
    while waiting:
        one = waiting.pop()
        key = canonicalize_name(one.name), frozenset(one.extras)
        found.add(key[0])
        if key not in seen:
            seen.add(key)
            waiting += required(distribution(one.name).requires or [], key[1])
    return found


def names(extra: str) -> set[str]:
    """The packages that an extra names, also by way of other extras."""
    found = set()
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.name == "farspan":
            found |= set().union(*map(names, requirement.extras))
        else:
            found.add(canonicalize_name(requirement.name))
    return found


def test_the_core_is_lean() -> None:
    core = pulled(PROJECT["dependencies"])
    heavy = pulled([one for one in PROJECT["dependencies"] if one.startswith(("torch ", "transformers "))])
    assert {"torch", "transformers", "sympy", "huggingface-hub"} <= heavy
    assert {"matplotlib", "pillow", "scipy", "jaxtyping"} <= core - heavy
    assert len(core - heavy) <= MOST_CORE, sorted(core - heavy)


def test_all_is_every_extra_but_the_one_that_is_compiled() -> None:
    (whole,) = map(Requirement, EXTRAS["all"])
    assert whole.extras == set(EXTRAS) - NEVER_IN_ALL


def test_every_missing_package_is_looked_for_in_the_extra_that_has_it() -> None:
    calls = [
        [ast.literal_eval(one) if isinstance(one, ast.Constant) else None for one in node.args]
        for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "packaging").glob("*.py")]
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "optional_import"
    ]
    assert len(calls) > 20
    distributions = packages_distributions()
    for module, extra in calls:
        assert extra in EXTRAS
        if module in (None, "deepspeed"):
            continue
        top = module.partition(".")[0]
        provided = {canonicalize_name(name) for name in distributions[top]}
        assert provided & pulled([f"{name}" for name in names(extra)]), (module, extra)


# commands whose extra is missing


def hide(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {package, *(name for name in sys.modules if name.startswith(f"{package}."))}:
        monkeypatch.setitem(sys.modules, name, None)


def command(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.usefixtures("hub_offline")
@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        ("curve MODEL --text table.parquet", "pyarrow", "data"),
        ("curve MODEL --text org/name", "datasets", "data"),
        ("perplexity MODEL --text table.parquet", "pyarrow", "data"),
        ("recall MODEL --text table.parquet", "pyarrow", "data"),
        ("attention MODEL --text table.parquet", "pyarrow", "data"),
        ("compare MODEL --text table.parquet", "pyarrow", "data"),
        ("train lm demo --set data.text=table.parquet --set data.held_out=text.txt", "pyarrow", "data"),
        ("report run", "plotly", "report"),
        ("report run", "jinja2", "report"),
        ("index --text text.txt --out index", "bm25s", "retrieval"),
        ("index --text text.txt --out index --kind dense", "sentence_transformers", "retrieval"),
        ("index --text text.txt --out index --kind faiss", "faiss", "faiss"),
        ("curve --base-url http://127.0.0.1:9", "requests", "served"),
        ("doctor http://127.0.0.1:9", "requests", "served"),
        ("curve model.gguf", "gguf", "gguf"),
        ("curve MODEL --ray local", "ray", "cluster"),
        ("train lm demo --set data.text=text.txt --set data.held_out=text.txt", "accelerate", "train"),
        ("train smt smt-demo --set model.name=MODEL --set trained.what=lora --set data.short=use", "peft", "lora"),
        ("task longbench:set=gov_report,view=answers,data=. MODEL --lengths 64 --repeats 1", "rouge", "tasks"),
    ],
)
def test_a_command_that_lacks_an_extra_names_it(
    arguments: str, package: str, extra: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog " * 200)
    Path("table.parquet").touch()
    Path("model.gguf").write_bytes(b"GGUF" + bytes(20))
    Path("gov_report.jsonl").write_text(
        json.dumps({"input": "", "context": "a quick fox " * 400, "answers": ["a"]}) + "\n"
    )
    if arguments.startswith("report"):
        lm = farspan.load(folder)
        farspan.curve(lm, text=["the quick brown fox " * 50], lengths=(4,), repeats=2, out="run")
    for recipe in ("lm", "smt"):  # transformers looks for accelerate and peft once, when its Trainer is imported
        import_module(f"farspan.train.{recipe}")
    hide(package, monkeypatch)
    if "smt" in arguments:
        arguments += " --set data.text=text.txt"
    result = command(*arguments.replace("MODEL", str(folder)).split())
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2, result.output
    assert re.search(rf"error: .*this needs the package {package}.*: pip install 'farspan\[{extra}\]'", said), said
    assert len(said) < 1000


# configs


def test_a_config_is_a_file_or_the_name_of_one_that_comes_with_farspan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(shipped_configs()) == {file.stem for file in (ROOT / "configs").glob("*.toml")}
    refused = command("train", "lm", "demo", "--set", "trainer.steps=-1").stderr
    assert "trainer.steps" in refused
    Path("demo").write_text("out = [")
    assert "config demo is not TOML" in command("train", "lm", "demo").stderr
    unknown = " ".join(command("train", "lm", "configs/lama-83m.toml").stderr.split())
    assert "does not exist (did you mean 'llama-83m'?): give a TOML file, or the name of a config" in unknown
    assert "smt-demo" in unknown


def test_the_shell_completes_commands(tmp_path: Path) -> None:
    code = "import sys; sys.argv[0] = 'farspan'; from farspan.cli import main; main()"
    asked = {"_FARSPAN_COMPLETE": "complete_bash", "COMP_WORDS": "farspan comp", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | asked)
    assert done.stdout.split() == ["compare"]
    assert "--install-completion" in command("--help").stdout


# the built package, in an environment of its own


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it."""
    pytest.importorskip("build")
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def environment(place: Path, packages: set[str]) -> dict[str, str]:
    """Make a virtual environment in which some packages of this one count as installed, and pip reaches no index;
    return its variables."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    (place / "others").mkdir()
    here = Path(sysconfig.get_path("purelib"))
    for name in {file.parts[0] for package in {*packages, "pip"} for file in distribution(package).files or ()} - {
        "..",
        "/",
    }:
        if (here / name).exists():
            (place / "others" / name).symlink_to(here / name)
    (site / "others.pth").write_text(f"{place / 'others'}\n")
    pip = place / "bin" / "pip"
    pip.write_text(f"#!{place / 'bin' / 'python'}\nfrom pip._internal.cli.main import main\nraise SystemExit(main())\n")
    pip.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "FARSPAN"))}
    return kept | {
        "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads the value of a negative option as that of the positive one
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def run(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(1200)
def test_the_wheel_works_in_an_empty_folder_on_its_core_alone(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("farspan-*.whl")
    (sdist,) = built.glob("farspan-*.tar.gz")
    assert wheel.stat().st_size < 12 * 2**20
    assert sdist.stat().st_size < 12 * 2**20
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in inside if name.endswith("dist-info/METADATA"))
    assert {f"farspan/configs/{name}.toml" for name in shipped_configs()} <= set(inside)
    assert not re.search(r"\]\((?!https?:)", metadata)  # a package index has none of the README's neighbours
    alone = environment(tmp_path / "venv", pulled(PROJECT["dependencies"]))
    run(["pip", "install", "-q", str(wheel)], tmp_path, alone)
    tmp_path = tmp_path / "empty"
    tmp_path.mkdir()
    (tmp_path / "text.txt").write_text(" ".join(f"word{i * i % 97}" for i in range(2000)))
    assert run(["farspan", "--version"], tmp_path, alone) == f"farspan {farspan.__version__}\n"
    code = "import farspan, farspan.train.config as c; print(farspan.__file__, *c.shipped_configs())"
    place, *configs = run(["python", "-c", code], tmp_path, alone).split()
    assert place.startswith(str(tmp_path.parent / "venv"))
    assert configs == list(shipped_configs())
    small = "curve demo --text text.txt --lengths 16,64 --repeats 2 --out run"
    assert "half-life" in run(["farspan", *small.split()], tmp_path, alone)
    assert (tmp_path / "run" / "curve.png").stat().st_size > 10_000
    training = ["farspan", "train", "lm", "demo", "--set", "data.text=text.txt", "--set", "data.held_out=text.txt"]
    refused = subprocess.run(training, capture_output=True, text=True, cwd=tmp_path, env=alone)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "error: this needs the package accelerate: pip install 'farspan[train]'\n"


@pytest.mark.timeout(1200)
def test_the_steps_of_the_dockerfile_install_farspan(tmp_path: Path) -> None:
    packages = pulled([*PROJECT["dependencies"], *names("all"), "hatchling", "hatch-fancy-pypi-readme"])
    alone = environment(tmp_path / "venv", packages)
    steps = [line.split(maxsplit=1) for line in (ROOT / "Dockerfile").read_text().splitlines() if line[:1].isupper()]
    assert [word for word, _ in steps] == ["FROM", "COPY", "RUN", "RUN", "WORKDIR", "ENTRYPOINT", "CMD"]
    ignored = (ROOT / ".dockerignore").read_text().split()
    place = str(tmp_path / "src")
    for word, rest in steps:
        if word == "COPY":
            assert rest == ". /src"
            shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(*(one.removeprefix("**/") for one in ignored)))
        if word == "RUN":
            run(["sh", "-euc", rest.replace("/src", place)], tmp_path, alone)
    entry, default = (json.loads(rest) for word, rest in steps if word in ("ENTRYPOINT", "CMD"))
    assert "Usage: farspan" in run([*entry, *default], tmp_path, alone)
    assert not (tmp_path / "src").exists()


def test_a_plan_draws_nothing_and_takes_seconds(tmp_path: Path) -> None:
    code = (
        "import sys, time\nimport farspan.lm\nimported = time.process_time()\nfrom farspan.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "print('\\n', time.process_time() / imported)\n"
        "print('drawn:', 'matplotlib' in sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-c", code, "curve", "demo", "--text", "random", "--plan"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.endswith("drawn: False\n")
    assert float(done.stdout.splitlines()[-2]) < MOST_OF_IMPORT
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_PLAN
