"""Tasks and methods as text: what is written is parsed to the same settings, what cannot be is refused."""

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
REFUSED = [  # those of needles are in test_needle
    ("icl:set=trec", "'trec' is unknown.*did you mean"),
    ("icl:set=mr,scoring=best", "scoring = 'best' is unknown"),
    ("icl:set=mr,head=-1", "icl: head: got -1, expected at least 0"),
    ("icl", "needs a set .set=banking77, one of sst2.* or a data set of your own"),
    ("icl:data=folder,text=words", "label is missing"),
    ("icl:set=mr,text=words", "set 'mr' has its own columns"),
    ("icl:data=a,text=b,label=b", "text and label are both 'b'"),
    ("icl:set=copy,data=folder", "icl set 'copy' is generated: leave out data=folder"),
    ("icl:set=mr,data=", "setting 'data' of task 'icl' is empty"),
    ("longbench:set=hotpot", "'hotpot' is unknown.*did you mean 'hotpotqa'"),
    ("longbench:set=dureader", "'dureader' is unknown.*view=text has qasper, "),
    ("longbench:set=narrativeqa", r"'narrativeqa' is unknown to view=text \(view=answers has it\)"),
    ("longbench:set=qasper,view=answers,new_tokens=0", "new_tokens: got 0, expected at least 1"),
    ("longbench:set=qasper,view=all", "view = 'all' is unknown; known are text, answers"),
    ("longbench:set=qasper,truncate=middle", "truncate and new_tokens belong to view=answers"),
    ("longbench:set=qasper,view=answers,truncate=centre", "truncate = 'centre' is unknown"),
    ("longbench2:ask=letter", "ask = 'letter' is unknown; known are likelihood, generated"),
    ("longbench2:difficulty=medium", "difficulty = 'medium' is unknown; known are easy, hard"),
    ("longbench2:size=huge", "size = 'huge' is unknown; known are short, medium, long"),
    ("longbench2:truncate=centre", "truncate = 'centre' is unknown"),
    ("longbench2:new_tokens=4", "new_tokens belongs to ask=generated"),
    ("longbench2:ask=generated,new_tokens=0", "new_tokens: got 0, expected at least 1"),
    ("mentions:distance=0", "distance: got 0, expected at least 1"),
    ("mentions:target_tokens=-3", "target_tokens: got -3"),
    ("own:tests=recal", "did you mean 'recall'"),
    ("own:pairs=0", "pairs: got 0, expected at least 1"),
    ("own:questions=other", "questions = 'other' is unknown"),
    ("own:tests=cloze,questions=paraphrased", "questions=paraphrased has no effect on tests=cloze"),
    ("own:tests=recall,pairs=7", "pairs=7 has no effect on tests=recall: use tests=pairs or all, or leave it out"),
    ("own:pairs=1,questions=paraphrased", "pairs: got 1, expected at least 2, among which"),
    ("qa", "needs data"),
    ("qa:data=x,shots=-1", "shots: got -1, expected at least 0"),
    ("qa:data=x,weights=y", "weights = 'y'"),
    ("curve:protocol=mine", "protocol = 'mine' is unknown; known are paper, nested, probe, auto$"),
    ("ralm", "needs index"),
    ("ralm:index=x,query=100,window=100", "query = 100 of a window of 100"),
    ("ralm:index=x,weights=bm25", "weights = 'bm25' is unknown; known are method, retriever"),
    ("ralm:index=x,overlap=-1", "overlap: got -1, expected at least 0"),
    ("ralm:index=x,passages=drawn", "passages = 'drawn' is unknown; known are found, random"),
    ("ralm:index=x,windows=100", "no setting 'windows' .did you mean 'window'"),
    ("zeroscrolls:set=qsum", "'qsum' is unknown.*did you mean 'qmsum'"),
    ("zeroscrolls:set=qmsum,truncate=left", "truncate = 'left' is unknown"),
    ("zeroscrolls:set=qmsum,new_tokens=0", "new_tokens: got 0, expected at least 1"),
    ("zeroscrolls", "needs set"),
]
WRITTEN = [
    "curve:protocol=probe,warmup=3,scored=5",
    "icl:set=mr",
    "icl:set=trec_fine,data=a/b,scoring=both",
    "icl:set=mr,head=0",
    "icl:data=a/b,text=words,label=kind",
    "longbench:set=lcc,view=answers,data=a/b,truncate=middle,new_tokens=8",
    "longbench2:ask=generated,data=a/b,difficulty=hard,size=long,truncate=middle,new_tokens=8",
    "longppl:targets=fixed",
    "longppl:targets=last,target_tokens=30,short=4096,block=1024,alpha=1",
    "mentions:distance=100,target_tokens=1024",
    "needle:kind=single,ask=forced",
    "needle:kind=tracking,ask=generated,depths=0+0.5,together=false,hops=2,new_tokens=30",
    "perplexity:targets=last,target_tokens=7",
    "ralm:index=/a/b",
    "ralm:index=x,window=512,query=64,weights=retriever",
    "zeroscrolls:set=qmsum,data=a/b,truncate=end,new_tokens=64",
]
DEFAULT_LENGTHS = [  # for these trained lengths
    ("curve", (128, 512), (64, 128, 192, 256, 320, 384, 448, 512)),
    ("curve:protocol=probe", (8192,), (2000, 4000, 6000, 8000, 10000, 12000, 14000, 16000)),
    ("curve:protocol=probe", (256,), (32, 64, 96, 128, 160, 192, 224, 256)),
    ("icl:set=mr", (512,), (2, 20, 40)),
    ("longbench:set=lcc,view=answers", (512, 4096), (512, 4096)),
    ("longbench:set=lcc", (4096,), (512, 1024, 2048, 4096, 8192)),
    ("longbench2", (512, 4096), (512, 4096)),
    ("longppl", (512,), (512, 1024)),
    ("longppl", (512, 2048), (512, 1024, 2048, 4096)),
    ("longppl:short=1024", (512,), (4096,)),
    ("mentions", (512,), (2048,)),
    ("mentions", (2048,), (2048, 4096)),
    ("mentions:distance=100,target_tokens=28", (128, 512), (256, 512, 1024)),
    ("needle", (8192,), (2048, 4096, 8192, 16384)),
    ("needle", (512,), (512, 1024)),
    ("needle:kind=tracking", (512,), (1024,)),
    ("zeroscrolls:set=qmsum", (2048, 512, 2048), (512, 2048)),
]
QUALITIES = [
    ("icl:set=mr", "accuracy"),
    ("longbench:set=lcc,view=answers", "edit similarity"),
    ("longbench:set=lcc", "perplexity"),
    ("zeroscrolls:set=qmsum", "ROUGE-L"),
]


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
        accepted.add(text)
        assert parse(str(one)) == one

    checked = hypothesis.given(spelled(name, kinds[name]))(comes_back)
    hypothesis.settings(max_examples=200, deadline=None, derandomize=True, database=None)(checked)()
    assert len(accepted) >= (5 if fields(kinds[name]) else 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (Perplexity(), "perplexity:targets=fixed"),
        (Perplexity(target_tokens=256), "perplexity:targets=fixed,target_tokens=256"),
        (Perplexity("all"), "perplexity:targets=all,target_tokens=256"),
        (Curve(), "curve"),
        (Curve("nested"), "curve:protocol=nested"),
        (Curve("probe", 16, 32), "curve:protocol=probe,warmup=16,scored=32"),
    ],
)
def test_a_task_has_one_name(one: Any, text: str) -> None:
    assert str(one) == text
    assert task(text) == one


@pytest.mark.parametrize("text", ["curve:protocol=auto", "curve:warmup=auto", "perplexity:target_tokens=auto"])
def test_auto_is_a_setting_that_is_left_out(text: str) -> None:
    assert task(text) == task(text.partition(":")[0])


def test_auto_is_a_choice_that_is_left_out_in_python_too() -> None:
    assert Curve("auto") == Curve()


@pytest.mark.parametrize("text", WRITTEN)
def test_a_task_is_written_as_it_is_parsed(text: str) -> None:
    assert str(task(text)) == text


@pytest.mark.parametrize(("text", "trained", "lengths"), DEFAULT_LENGTHS)
def test_default_lengths_follow_the_trained_ones(text: str, trained: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    assert task(text).lengths(trained) == lengths


@pytest.mark.parametrize(("text", "name"), QUALITIES)
def test_a_quality_has_the_name_of_its_score(text: str, name: str) -> None:
    assert task(text).quality.name == name


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_settings_that_cannot_be_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        task(text)
