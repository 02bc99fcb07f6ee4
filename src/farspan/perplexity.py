"""Loops around `measure` for perplexity by length: several models, several methods, one run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from farspan import corpus
from farspan.curves import DEFAULT_REPEATS
from farspan.lengths import check_lengths
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM, Load
from farspan.measure import Watch, measure
from farspan.methods import method
from farspan.plan import Plan, plan
from farspan.reader import CHUNK
from farspan.record import Row, Run, latest
from farspan.tasks.perplexity import TARGET_TOKENS, Perplexity, check_target_tokens, check_targets, shortest_length

MASK = 1 << 22  # of one forward on a CPU, where attention in chunks holds a number for each token and token read
SMALLEST_CHUNK = 256  # tokens; smaller ones take longer


@dataclass(frozen=True)
class PerplexitySettings:
    """What perplexity is measured with; the same for every model and method of a run."""

    text: str = "builtin"
    lengths: tuple[int, ...] | None = None  # tokens; None: powers of two up to twice the trained length
    repeats: int = DEFAULT_REPEATS  # windows, from as many documents as possible
    seed: int = 0
    targets: str = "fixed"  # one of TARGETS
    target_tokens: int | None = None  # None: 256, or half of the smallest length where that is less
    buckets: int | None = None  # of positions, with targets `all`; None: powers of two

    def __post_init__(self) -> None:
        check_targets(self.targets)
        if self.repeats < 1:
            raise ValueError(f"repeats = {self.repeats}; at least 1 is needed")
        if self.lengths is not None:
            check_lengths(self.lengths)
        if self.target_tokens is not None:
            if self.targets == "all":
                raise ValueError("--target-tokens belongs to --targets fixed or last; all scores every token")
            if self.lengths is not None:
                check_target_tokens(self.target_tokens, self.lengths)
        if self.buckets is not None and self.targets != "all":
            raise ValueError(f"--buckets belongs to --targets all, not to {self.targets}")

    def resolved(self, trained: Sequence[int | None]) -> "PerplexitySettings":
        """With one number of target tokens for the run, chosen for models trained on these lengths."""
        if self.target_tokens is not None or self.targets == "all":
            return self
        shortest = (
            self.lengths[0]
            if self.lengths
            else min(shortest_length(length or DEFAULT_TRAINED_LENGTH) for length in trained)
        )
        return replace(self, target_tokens=max(1, min(TARGET_TOKENS, shortest // 2)))

    def task(self, lm: LM) -> Perplexity:
        """The task for one model, its text tokenised.

        Raises:
            ValueError: a text that cannot be read.
        """
        text = corpus.load(self.text, lm.tokenizer)
        return Perplexity(text, self.targets, self.target_tokens or TARGET_TOKENS, self.buckets)


def measure_perplexity(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: PerplexitySettings,
    out: str | Path,
    *,
    loader: Load | None = None,
    batch: int | None = None,
    chunk: int | None = None,
    watch: Watch | None = None,
) -> list[Row]:
    """Measures every model under every method into the run folder `out`, and returns all its rows; of a
    measurement that was repeated, the last.

    Models are loaded one after another. Repeating the call continues where it stopped.

    Raises:
        ValueError: settings, texts or models that cannot be; a folder with another run.
        OSError: the disk is full.
    """
    watch, loader = watch or Watch(), loader or Load()
    chosen = [method(text) for text in methods]
    settings = _resolved(settings, models, loader)
    with Run.open(out, {"task": Perplexity.name, "methods": [str(m) for m in chosen], **asdict(settings)}) as run:
        for model in models:
            lm = loader(model)
            task = settings.task(lm)
            per_token = {task.text.hash: task.text.characters_per_token}
            run.add_model(lm.identity | {"texts": sorted(per_token), "characters_per_token": per_token})
            lengths = settings.lengths or default_lengths(lm, task, settings.repeats, watch)
            for how in chosen:
                watch.notice(f"targets {task.targets}, separator: {lm.separator.kind} {list(lm.separator.ids)}")
                watch.start(f"{lm.name} {how}", len(lengths) * settings.repeats)
                measure(
                    task,
                    how,
                    lm,
                    run,
                    lengths=lengths,
                    repeats=settings.repeats,
                    seed=settings.seed,
                    batch=batch,
                    chunk=chunk or default_chunk(lm, lengths[-1]),
                    watch=watch,
                )
            del lm  # gone before the next one is loaded
        return latest(run.rows)


def plan_perplexity(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: PerplexitySettings,
    *,
    loader: Load | None = None,
    batch: int | None = None,
    chunk: int | None = None,
) -> Iterator[tuple[str, str, dict[str, Any], Plan]]:
    """What `measure_perplexity` would cost, by model, method and settings of the task."""
    loader = loader or Load()
    settings = _resolved(settings, models, loader)
    for model in models:
        lm = loader(model)
        task = settings.task(lm)
        lengths = settings.lengths or default_lengths(lm, task, settings.repeats, Watch())
        for text in methods:
            cost = plan(
                task,
                method(text),
                lm,
                lengths=lengths,
                repeats=settings.repeats,
                seed=settings.seed,
                batch=batch,
                chunk=chunk or default_chunk(lm, lengths[-1]),
            )
            yield lm.name, str(method(text)), task.settings, cost


def default_lengths(lm: LM, task: Perplexity, repeats: int, watch: Watch) -> tuple[int, ...]:
    """Powers of two from 512, or a quarter of the trained length, to twice the trained length, or to where positions
    or the text end.

    Raises:
        ValueError: more target tokens than there is room for.
    """
    trained = lm.trained_length or DEFAULT_TRAINED_LENGTH
    room = 2 * trained
    if lm.position_limit is not None:
        room = min(room, lm.position_limit - task.num_tokens(lm, 0))
    shortest = shortest_length(trained)
    while task.targets != "all" and shortest < 2 * task.target_tokens:
        shortest *= 2
    lengths = [shortest << i for i in range(room.bit_length()) if shortest << i <= room]
    if not lengths:
        if task.targets != "all":
            check_target_tokens(task.target_tokens, (room,))
        return (room,)
    fitting = [length for length in lengths if task.text.num_windows(length, repeats) >= repeats]
    if fitting and fitting != lengths:
        watch.notice(f"the text is too short for lengths of {lengths[-1]:,}: they end at {fitting[-1]:,} tokens")
    return tuple(fitting or lengths[:1])


def default_chunk(lm: LM, longest: int) -> int | None:
    """Tokens of one forward: fewer than the reader's own where these would make the mask of a long text the largest
    part of what it takes on a CPU. None: the reader's own."""
    if lm.device.type != "cpu" or CHUNK * longest <= MASK:
        return None
    return max(SMALLEST_CHUNK, MASK // longest)


def _resolved(settings: PerplexitySettings, models: Sequence[str | LM], loader: Load) -> PerplexitySettings:
    return settings.resolved([loader.trained(model) for model in models])
