"""Answer questions about files of any length: the files are read once, under a method, and each question is answered
from the memory. Methods that need text after the files to read them (`replug:weights=bm25` without `tail`) are refused.

Base models see the files, each followed by an empty line, and then `Question: ...` and `Answer:`. Models with a chat
template see one user turn that begins with the files and ends with the question.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from farspan.lm import LM
from farspan.loading.errors import BROKEN, one_line
from farspan.reader import Memory, Reader
from farspan.text.prompts import continued, encoded
from farspan.text.utf8 import read_text, refuse_surrogates

PLAIN = "{context}Question: {question}\nAnswer:"
BETWEEN = "\n\n"  # after each file
MARK, ASKED = "\u2402context\u2403", "\u2402question\u2403"  # placeholders while a chat template is filled in
CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")  # how templates of transformers ask for the date
TEMPLATE_LINES = 2_000_000  # lines of Python that filling in a chat template may run: some seconds
TEMPLATE_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Answer:
    """A model's answer, and its cost."""

    text: str
    num_tokens: int
    num_seen: int  # tokens of the context and of the template before it
    num_kept: int  # of these, tokens whose keys the decoder holds
    num_encoded: int  # of these, tokens read by an encoder instead of the decoder
    seconds: float  # from the question to the end of the answer


class Conversation:
    """Files that were read, for questions about them."""

    def __init__(self, reader: Reader, texts: Sequence[str]) -> None:
        """Read the texts, in order, each as a passage of its own.

        Raises:
            ValueError: no text, one without tokens, more than the model or method can read, or a method that needs text
                after the passages.
        """
        self.lm = reader.lm
        before, self._between, self._after = template(self.lm)
        refuse_no_context(texts)
        passages = _passages(self.lm, texts)
        if empty := [number for number, text in enumerate(texts, 1) if not text.strip()]:
            raise ValueError(f"context {empty[0]} is empty: leave it out, or give a file with text")
        reader.check_answers(passages)  # before they are read, which can take long
        head = torch.tensor([_of_template(self.lm, before)]) if before else torch.tensor([self.lm.separator.ids])
        reader.capacity = head.shape[1] + sum(passage.shape[1] for passage in passages)
        self.memory: Memory = reader.read(*passages, head=head)

    def ask(
        self,
        question: str,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Answer:
        """Return the answer to one question, independent of earlier questions.

        Args:
            on_text: called with each new piece of the answer.

        Raises:
            ValueError: an empty question, or more tokens than the model has positions.
        """
        refuse_empty(question)
        refuse_surrogates(question, "the question")
        started, ids, shown = time.perf_counter(), [], ""

        def stream(token: Tensor) -> None:
            nonlocal shown
            if int(token) >= 0:
                ids.append(int(token))
                text = self.lm.tokenizer.decode(ids, skip_special_tokens=True)
                if not text.endswith("\ufffd"):  # half a character; the next token completes it
                    on_text(text[len(shown) :])
                    shown = text

        self.memory.generate(
            asked(self.lm, self._between, question.strip(), self._after),
            max_new_tokens,
            stop=self.lm.stop_tokens,
            on_token=stream,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        text = self.lm.tokenizer.decode(ids, skip_special_tokens=True)
        on_text(text[len(shown) :])
        encoded = self.memory.num_encoded
        return Answer(
            text=text.strip(),
            num_tokens=len(ids),
            num_seen=self.memory.num_seen,
            num_kept=self.memory.num_kept - encoded,
            num_encoded=encoded,
            seconds=time.perf_counter() - started,
        )


def refuse_empty(question: str) -> None:
    """Raise ValueError for a blank question."""
    if not question.strip():
        raise ValueError("the question is empty: write one")


def refuse_no_context(given: Sequence[Any]) -> None:
    """Raise ValueError without any file or text."""
    if not given:
        raise ValueError("there is no context: give at least one file with --context")


def read_texts(files: Sequence[Path]) -> list[str]:
    """Return the files as text.

    Raises:
        ValueError: no file, a missing file, a folder, or a file that is blank or not UTF-8 text.
    """
    refuse_no_context(files)
    texts = []
    for file in files:
        if not file.is_file():
            problem = "a folder: name its files" if file.is_dir() else "not there: correct the path"
            raise ValueError(f"--context {file} is {problem}")
        text = read_text(file)
        if not text.strip():
            raise ValueError(f"--context {file} is empty: leave it out, or give a file with text")
        texts.append(text)
    return texts


def num_tokens(lm: LM, texts: Sequence[str]) -> int:
    """Return the number of context tokens that a conversation about these texts reads."""
    return sum(passage.shape[1] for passage in _passages(lm, texts))


def template(lm: LM, day: datetime | None = None) -> tuple[str, str, str]:
    """Return the text before the context, between it and the question, and after the question: from the model's
    chat template, if it has one. `day`: the date for templates that write one, such as Llama 3's; None: today."""
    filled = PLAIN.format(context=MARK, question=ASKED)
    if getattr(lm.tokenizer, "chat_template", None):
        filled = _filled(lm, day)
    before, _, rest = filled.partition(MARK)
    between, found, after = rest.partition(ASKED)
    if not found:
        raise ValueError(f"the chat template of {lm.name} leaves out the user's message: no question can be asked")
    return before, between, after


def _filled(lm: LM, day: datetime | None) -> str:
    turn = [{"role": "user", "content": f"{MARK}{ASKED}"}]
    given = {}
    try:
        if day is not None:
            dated = CLOCK.sub(lambda call: repr(day.strftime(call[2])), lm.tokenizer.get_chat_template())
            given = {"chat_template": dated}
        with _bounded(TEMPLATE_LINES):
            filled = lm.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True, **given)
        if len(filled) > TEMPLATE_CHARACTERS:
            raise ValueError(f"it writes {len(filled):,} characters, expected at most {TEMPLATE_CHARACTERS:,}")
    except (TemplateError, *BROKEN) as error:
        raise ValueError(
            f"the chat template of {lm.name} cannot be filled in: {one_line(error)}. Correct it (chat_template.jinja, "
            "or chat_template in tokenizer_config.json), or remove it to ask without one"
        ) from error
    return str(filled)


@contextmanager
def _bounded(most: int) -> Iterator[None]:
    """Raise ValueError after `most` lines of Python: a template comes with the model, and its loops may not end.

    Lines are counted rather than seconds, so that the same template is refused on every machine.
    """
    before, count = sys.gettrace(), 0

    def counting(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        if count > most:
            raise ValueError(f"it runs more than {most:,} lines, as in loops within loops")
        return counting

    sys.settrace(counting)
    try:
        yield
    finally:
        sys.settrace(before)


def _passages(lm: LM, texts: Sequence[str]) -> list[Tensor]:
    return [torch.from_numpy(encoded(lm.tokenizer, text.rstrip() + BETWEEN))[None] for text in texts]


def _of_template(lm: LM, text: str) -> list[int]:
    return list(lm.tokenizer(text, add_special_tokens=False)["input_ids"])


def asked(lm: LM, between: str, question: str, after: str) -> Tensor:
    """Return the tokens of a question inside its template, after the context. Only the template can have special
    tokens: those named in a question are text, or it could end the user's turn. The plain text around the question is
    tokenised with it."""
    named = [re.escape(one.content) for one in lm.tokenizer.added_tokens_decoder.values() if one.special]
    special = re.compile("|".join(sorted(named, key=len, reverse=True)) or r"(?!)")
    begin = max((found.end() for found in special.finditer(between)), default=0)
    found = special.search(after)
    end = len(after) if found is None else found.start()
    text = between[begin:] + question + after[:end]
    middle = encoded(lm.tokenizer, text) if begin else continued(lm.tokenizer, text)[0]
    ids = [*_of_template(lm, between[:begin]), *middle.tolist(), *_of_template(lm, after[end:])]
    return torch.tensor([ids], dtype=torch.long)
