"""Checks of the files of a run, which may be damaged, edited or written by somebody else. All values that a
report computes with are checked when they are read: types, ranges, and that a measured row has the scores of its task.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, StringConstraints, TypeAdapter, ValidationError

from farspan.lengths import LARGEST
from farspan.schema.row import Cost, Count, Row, Share, Words

FORM = 2  # of run.json, recorded as its version: tasks by name in the settings
# instead of pydantic's own messages, which name its types or a pattern
EXPECTED = {"too_short": "at least one value", "string_pattern_mismatch": "hexadecimal digits in pairs, or base64"}

Positive = Annotated[int, Strict(), Field(ge=1, le=LARGEST)]
Lengths = Annotated[list[Count], Field(min_length=1)]
Number = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Sum = Annotated[float, Strict(), Field(ge=0, le=1.001)]  # of shares, rounded in the model's precision
Bits = Annotated[str, StringConstraints(pattern=r"\A([0-9a-f]{2})*\z")]


class Checked(BaseModel):
    """The base of all checks. No conversions: a number written as text is an error. Other fields are not checked."""

    model_config = ConfigDict(strict=True, extra="allow")


class RowReading(Checked):
    repeats: Annotated[list[Count], Field(min_length=1)]
    chunk: Positive
    cuts: list[Count]


ROW = TypeAdapter(Row)


class CurveSettings(Checked):
    protocol: str  # nested, probe or paper
    target_text: str  # S, the text that is copied
    target_hash: str | None = None  # of its tokens
    prefix_text: str | None = None  # I, of the control; None: the protocol's own
    prefix_hash: str | None = None  # of its tokens
    warmup: Count = 0  # tokens of a probe that are read before scoring
    scored: Positive = 1  # tokens of a probe that are scored
    compat: bool = False  # with the authors' token ids


class CurveScores(Checked):
    copy_share: Share | None = Field(None, alias="copy")  # accuracy after the same text
    control: Share | None = None  # accuracy after another text
    control_repeat: Count | None = None  # the repeat whose target the control scored
    scored: Positive | None = None  # tokens
    context: Positive | None = None  # tokens in all
    distance: Count | None = None  # tokens from a token back to its copy
    copy_nats: Number | None = None  # mean nats per token
    control_nats: Number | None = None  # mean nats per token
    copy_hits: Bits | None = None  # one bit a token, first token first, as hexadecimal
    control_hits: Bits | None = None  # the same
    target: str = ""  # hash of the scored text, which pairs rows of several runs


class PerplexitySettings(Checked):
    text: str  # the text
    targets: Literal["fixed", "last", "all"]  # the tokens scored at each length
    target_tokens: Positive | None = None  # scored at each length


class Buckets(Checked):
    ends: list[Positive]  # positions in the text, in tokens
    nats: list[Number | None]  # sum between the end before and each end
    hits: list[Count]  # tokens predicted correctly there


class PerplexityScores(Checked):
    nats: Number | None = None  # mean per token
    accuracy: Share | None = None  # share of tokens that are the likeliest
    scored: Positive | None = None  # tokens
    context: Positive | None = None  # tokens in all
    hits: Bits | None = None  # one bit a token, first token first, as hexadecimal
    buckets: Buckets | None = None  # by position in the text, of targets=all
    target: str = ""  # hash of the scored tokens


class LongPPLSettings(PerplexitySettings):
    short: Positive  # tokens before each block
    block: Positive  # targets
    alpha: Cost  # nats that a key token gains, at least
    beta: Cost  # nats that it takes with the long context, at most
    keys: str  # own, or the model whose key tokens are used


class LongPPLScores(Checked):
    nats: Number | None = None  # mean per key token
    nats_all: Number | None = None  # mean per token
    nats_short: Number | None = None  # mean per token with the short context
    keys: Count | None = None  # key tokens
    share: Share | None = None  # of the tokens that are key tokens
    scored: Positive | None = None  # tokens
    key_bits: Bits | None = None  # one bit a token, 1 for key tokens, as hexadecimal
    target: str = ""  # hash of the scored tokens


class MentionsSettings(Checked):
    text: str  # the text
    distance: Positive  # tokens from the nearest earlier mention, at least
    target_tokens: Positive  # at the end of each length, in which later mentions are scored


class MentionsScores(Checked):
    gain: Number | None = None  # nats that the earlier mentions save, mean per mention
    nats: Number | None = None  # mean per mention
    control: Number | None = None  # the same where other words replace the earlier mentions
    mentions: Positive | None = None  # their number
    distance: Number | None = None  # tokens from the nearest earlier mention, mean
    words: list[str] = []  # the mentions
    gains: list[Number] = []  # one for each mention


class AttentionSettings(Checked):
    text: str  # the text
    bin: Positive  # tokens of distance
    sinks: Count  # first tokens of a text that `rest` leaves out


class Spread(Checked):
    distance: list[list[list[Sum]]]  # by layer, head and power of two: share of the nearest keys
    bins: list[list[list[Sum]]]  # by layer, head and bin: share of the keys at that distance
    rank: list[list[list[Sum]]]  # by layer, head and power of two: share of the heaviest keys
    pareto: list[list[Sum]]  # by layer and head: share of the heaviest quarter of the keys


class AttentionScores(Checked):
    layers: list[Count] | None = None  # measured, from 0
    visible: list[Positive] | None = None  # by layer: keys that the query may see
    ends: list[Positive] | None = None  # the powers of two
    sinks: list[list[Sum]] | None = None  # by layer and head: share of the first tokens
    all: Spread | None = None  # shares of all keys
    rest: Spread | None = None  # shares without the first tokens
    # mean weights by query and key, as base64
    map: Annotated[str, StringConstraints(pattern=r"\A[A-Za-z0-9+/]*={0,2}\z")] | None = None


class CostScores(Checked):
    prefill_seconds: Cost | None = None  # to read the context
    prefill_rate: Cost | None = None  # tokens read per second
    decode_rate: Cost | None = None  # tokens generated per second
    weight_bytes: Cost | None = None  # of the model
    context_bytes: Cost | None = None  # held for the context
    activation_bytes: Cost | None = None  # at the peak, beside what is held


class OtherScores(Checked):
    """Scores of the tasks whose answers are right or wrong, and of those that score text after passages."""

    right: Share | None = None  # share of right answers
    control: Share | None = None  # share of right answers without the context
    recall: Share | None = None  # of the task `own`
    pairs: Share | None = None  # of the task `own`
    cloze: Share | None = None  # of the task `own`
    accuracy: Share | None = None  # share of tokens that are the likeliest
    exact: Share | None = None  # share of questions with all answers right
    token_hits: Share | None = None  # share of the answers' tokens that are the likeliest
    others: Count | None = None  # number of other needles' answers in the output
    exact_match: Share | None = None  # share of answers that equal a reference
    nats: Number | Words | list[Number | None] | None = None  # a list: one for each option


# by task: its settings, its scores, and the scores that every row of status "ok" has
Kind = tuple[type[Checked], type[Checked], tuple[str, ...]]
KINDS: dict[str, Kind] = {
    "curve": (CurveSettings, CurveScores, ("copy", "control", "control_repeat", "scored", "context")),
    "perplexity": (PerplexitySettings, PerplexityScores, ("nats", "accuracy", "scored")),
    "longppl": (LongPPLSettings, LongPPLScores, ("nats", "keys", "share", "scored", "key_bits")),
    "mentions": (MentionsSettings, MentionsScores, ("gain", "nats", "control", "mentions")),
    "attention": (AttentionSettings, AttentionScores, ("layers", "visible", "ends", "sinks", "all", "rest")),
    "cost": (Checked, CostScores, ()),
}
OTHER: Kind = (Checked, OtherScores, ())  # tasks whose reports read single scores, and name a missing one


class Identity(Checked):
    """A model in run.json."""

    name: str  # as it was given
    trained_length: Positive | None = None  # tokens
    config: Words = {}  # fields that change scores; empty in older runs
    texts: list[str] = []  # hashes of the texts read
    # by hash of the text
    characters_per_token: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)] | None] = {}
    contents: dict[str, str] = {}  # by name of a text: a hash of its documents, without a tokenizer
    tasks: dict[str, Words] = {}  # settings of each, for this model
    versions: dict[str, Count] = {}  # of each task, by its name in rows
    # by task, where they follow from the models: its lengths, and those for which texts are sampled
    lengths: dict[str, Lengths] = {}
    sampled: dict[str, Lengths] = {}


class Session(Checked):
    command: list[str] = []  # the command line
    models: list[str] = []  # that it began
    devices: dict[str, str | None] = {}  # of each; older sessions have none
    methods: list[str] | None = None  # that it named; None: an older farspan wrote it
    # its number, from 1, and the number of shards
    shard: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None = None


class Header(Checked):
    """run.json"""

    version: Positive = 1  # of the form of this file; 1 is not recorded
    settings: Words  # of the run: tasks, methods, lengths, seed
    models: dict[str, Identity]  # by name
    sessions: list[Session]  # one for each time that the command was started
    # for each change of lengths or repeats, by file: the rows that it had; in older runs of the last change only
    rows_before: list[dict[str, Count]] | dict[str, Count] = []


class Score(Checked):
    score: str
    name: str
    higher_is_better: bool | None
    exp: bool
    graded: bool = False


class MeasuredTask(Checked):
    task: str
    unit: str
    quality: Score
    version: Count | None = None
    details: list[str] = []
    same_at_depths: bool | None = None


class HeaderSettings(Checked):
    """The settings in run.json: `farspan.report.header` describes them."""

    tasks: dict[str, MeasuredTask]
    methods: list[str] = []


class ExampleLine(Checked):
    """A line of examples.jsonl; see `farspan.report.example`."""

    model: str  # its name in the run
    what: str  # the task with its settings
    length: Count  # in the task's unit
    repeat: Count  # from 0
    # kind and tokens of each; a part is a list in JSON
    parts: list[Annotated[tuple[Literal["separator", "read", "asked"], list[str]], Field(strict=False)]]
    scored: Positive  # tokens of the last part
    task: str  # of its rows
    settings: Words  # of its rows
    example: str | None = None  # its hash in its rows; an older farspan did not record it


class IndexAbout(Checked):
    """index.json"""

    kind: Literal["bm25", "dense", "faiss"]
    documents: Count
    text_hash: str
    cut: Words
    encoder: str | None


def check_row(values: Any, known: dict[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Check a row and return its fields.

    Args:
        known: settings that were checked before, by task and text; rows with the same settings share one dictionary.

    Raises:
        ValueError: a field has a wrong value; names both.
    """
    check(ROW, values)
    kind, scores_kind, needed = KINDS.get(values["task"], OTHER)
    place = f"{values['task']} {values['settings']}"
    if place not in known:
        check(kind, values["settings"], "settings")
        known[place] = values["settings"]
    scores = values.get("scores", {})
    check(scores_kind, scores, "scores")
    if values.get("reading"):
        check(RowReading, values["reading"], "reading")
    if values.get("status", "ok") == "ok":
        if lacking := [name for name in needed if scores.get(name) is None]:
            raise ValueError(f"scores: {lacking[0]} is missing from a row of status ok")
        if values["task"] in REFINED:
            REFINED[values["task"]](values["length"], values["settings"], scores)
    return {**values, "settings": known[place]}


def check_example(values: Any) -> dict[str, Any]:
    """Check a readable example and return it.

    Raises:
        ValueError: a field has a wrong value; names both.
    """
    check(ExampleLine, values)
    kind, tokens = values["parts"][-1] if values["parts"] else ("", [])
    if kind != "asked" or values["scored"] > len(tokens):
        raise ValueError(f"scored: got {values['scored']:,}, expected at most the tokens of a last part of kind asked")
    return dict(values)


def check_header(header: Any) -> None:
    """Raise ValueError, with field and value, unless this is the content of a run.json."""
    check(Header, header)
    if isinstance(header["settings"].get("tasks"), dict):
        check(HeaderSettings, header["settings"], "settings")


def check_index(about: Any) -> None:
    """Raise ValueError, with field and value, unless this is the content of an index.json."""
    check(IndexAbout, about)
    if about["kind"] != "bm25" and about["encoder"] is None:
        raise ValueError("encoder: got None, expected the name of an encoder")


def check(kind: type[BaseModel] | TypeAdapter[Any], values: Any, name: str = "") -> None:
    """Raise ValueError with the first field that is wrong, its value, and the expected values."""
    try:
        kind.validate_python(values) if isinstance(kind, TypeAdapter) else kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in ([name] if name else []) + list(first["loc"]))
        where = f"{field}: " if field else ""
        if first["type"] == "missing":
            raise ValueError(f"{where}is missing") from error
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            raise ValueError(f"{where}is not a field that farspan writes") from error
        expected = EXPECTED.get(first["type"], first["msg"].removeprefix("Input should be ").removeprefix("a valid "))
        raise ValueError(f"{where}got {shortened(first['input'])}, expected {expected}") from error


def shortened(value: Any) -> str:
    """Return the value as Python writes it, at most 60 characters; a description for an integer of too many digits."""
    try:
        text = repr(value)
    except ValueError:  # more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refined_curve(length: int, settings: Mapping[str, Any], scores: Mapping[str, Any]) -> None:
    if length < 1:
        raise ValueError(f"length: got {length}, expected 1 or more tokens of a curve")
    if settings["protocol"] == "probe" and not {"warmup", "scored"} <= settings.keys():
        raise ValueError("settings: warmup or scored is missing from a row of protocol probe")
    for name in ("copy_hits", "control_hits"):
        _enough_bits(scores, name)


def _refined_perplexity(length: int, settings: Mapping[str, Any], scores: Mapping[str, Any]) -> None:
    if settings["targets"] != "all" and settings.get("target_tokens") is None:
        raise ValueError("settings: target_tokens is missing")
    _enough_bits(scores, "hits")
    if buckets := scores.get("buckets"):
        ends = buckets["ends"]
        if len({len(part) for part in (ends, buckets["nats"], buckets["hits"])}) > 1 or ends != sorted(set(ends)):
            raise ValueError(f"scores.buckets: got ends {shortened(ends)}, expected ascending ones, a number for each")


def _refined_attention(length: int, settings: Mapping[str, Any], scores: Mapping[str, Any]) -> None:
    layers, powers = len(scores["layers"]), len(scores["ends"])
    heads = len(scores["sinks"][0]) if scores["sinks"] else 0
    for of in ("all", "rest"):
        shapes = {"distance": powers, "rank": powers, "bins": len(range(settings["bin"], length, settings["bin"])) + 1}
        for name, count in shapes.items():
            part = scores[of][name]
            if len(part) != layers or any(len(one) != heads or any(len(row) != count for row in one) for one in part):
                raise ValueError(f"scores.{of}.{name}: expected numbers for {layers} layers × {heads} heads × {count}")
    single = {"sinks": scores["sinks"]} | {f"{of}.pareto": scores[of]["pareto"] for of in ("all", "rest")}
    for name, part in single.items():
        if len(part) != layers or any(len(one) != heads for one in part):
            raise ValueError(f"scores.{name}: expected numbers for {layers} layers × {heads} heads")
    if (given := len(scores["visible"])) != layers:
        raise ValueError(f"scores.visible: got {given} numbers, expected one for each of {layers} layers")
    if picture := scores.get("map"):
        size = len(picture) // 4 * 3 - picture.count("=")
        side = (math.isqrt(2 * size + 1) - 1) // 2  # size = 4 · side · (side + 1) / 2
        if len(picture) % 4 or size != 2 * side * (side + 1):
            raise ValueError(f"scores.map: got {size} bytes, expected those of a triangle of float32")


def _enough_bits(scores: Mapping[str, Any], name: str) -> None:
    bits = scores.get(name)
    if bits is not None and 4 * len(bits) < scores["scored"]:
        raise ValueError(
            f"scores.{name}: got {4 * len(bits)} bits, expected one for each of {scores['scored']:,} tokens"
        )


REFINED: dict[str, Callable[[int, Mapping[str, Any], Mapping[str, Any]], None]] = {
    "curve": _refined_curve,
    "perplexity": _refined_perplexity,
    "longppl": lambda length, settings, scores: _enough_bits(scores, "key_bits"),
    "attention": _refined_attention,
}
