"""Tasks and methods as text: what is written is parsed to the same settings."""

from dataclasses import MISSING, fields
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from farspan.methods import METHODS, method
from farspan.tasks import TASKS, task
from farspan.tasks.curve import Curve
from farspan.tasks.perplexity import Perplexity

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

WORDS = ["text", "a b", "ü/x.txt", "auto", "none"]
CHOICES = {  # values of settings that take one of a few words
    "set": ["sst5", "copy", "qasper"], "type": ["yarn", "ntk", "linear"], "targets": ["fixed", "last", "all"],
    "protocol": ["nested", "probe", "paper", "auto"], "kind": ["multikey", "multivalue", "tracking"],
    "ask": ["generated", "forced", "likelihood"], "keys": ["words", "numbers", "own"], "values": ["words", "numbers"],
    "tests": ["pairs", "all"], "questions": ["paraphrased", "same"], "weights": ["retriever", "uniform"],
    "passages": ["random"], "truncate": ["end", "middle"], "view": ["answers"], "pool": ["max", "mean"],
    "size": ["short"], "difficulty": ["hard"], "scoring": ["calibrated", "raw"],
}  # fmt: skip
NUMBERS = ["0", "1", "2", "7", "64", "3000", "12345678901234567890"]
FLOATS = [*NUMBERS, "0.5", "0.25", "1e-7", "2.5e20", "1e16", "inf", "nan", "-0"]


def values_of(name: str, hint: Any) -> Any:
    """Values of a setting as text, most of which its type accepts."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    kind = kinds[0]
    if get_origin(hint) is tuple or get_origin(kind) is tuple:
        item = get_args(hint if get_origin(hint) is tuple else kind)[0]
        return st.lists(values_of(name, item), min_size=1, max_size=3).map("+".join)
    if kind is bool:
        return st.sampled_from(["true", "false"])
    if kind is str:
        return st.sampled_from(CHOICES.get(name, WORDS))
    return st.sampled_from([*(NUMBERS if kind is int else FLOATS), "auto"])


def spelled(name: str, kind: type) -> Any:
    """A task or method with some settings as text; those without a default always."""
    hints, known = get_type_hints(kind), fields(kind)  # type: ignore[arg-type]
    needed = {field.name: values_of(field.name, hints[field.name]) for field in known if field.default is MISSING}
    others = {field.name: values_of(field.name, hints[field.name]) for field in known if field.name not in needed}
    few = st.lists(st.sampled_from(sorted(others)), max_size=2, unique=True) if others else st.just([])

    def text(settings: dict[str, str]) -> str:
        listed = ",".join(f"{key}={value}" for key, value in settings.items())
        return f"{name}:{listed}" if listed else name

    given = few.flatmap(lambda keys: st.fixed_dictionaries(needed | {key: others[key] for key in keys}))
    return given.map(text)


@pytest.mark.parametrize("name", [*TASKS, *METHODS])
def test_what_is_parsed_is_written_so_that_it_is_parsed_to_the_same(name: str) -> None:
    kinds, parse = ({**TASKS}, task) if name in TASKS else ({**METHODS}, method)
    accepted = set()

    def comes_back(text: str) -> None:
        try:
            one: Any = parse(text)
        except ValueError:
            return
        if one == Perplexity("all", None, getattr(one, "buckets", None)):
            return  # measures the same as with the default target_tokens; recorded runs have the names of both
        accepted.add(text)
        assert parse(str(one)) == one

    checked = hypothesis.given(spelled(name, kinds[name]))(comes_back)
    hypothesis.settings(max_examples=100, deadline=None, derandomize=True, database=None)(checked)()
    assert len(accepted) >= (5 if fields(kinds[name]) else 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (Perplexity(), "perplexity:targets=fixed,target_tokens=256"),
        (Perplexity(target_tokens=None), "perplexity:targets=fixed,target_tokens=auto"),
        (Curve(), "curve:protocol=nested"),
        (Curve(protocol=None), "curve:protocol=auto"),
        (Curve("probe", 16, 32), "curve:protocol=probe,warmup=16,scored=32"),
    ],
)
def test_a_task_has_one_name(one: Any, text: str) -> None:
    assert str(one) == text
    assert task(text) == one
