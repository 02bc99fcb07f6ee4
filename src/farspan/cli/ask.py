"""`farspan ask`."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farspan.cli.messages import err, one_line_errors
from farspan.cli.options import RUN, TASK, AsJson, Chunk, Loading, Model, OneMethod, count, option
from farspan.terminal import Terminal

if TYPE_CHECKING:
    from farspan.ask import Conversation
    from farspan.methods import Method
    from farspan.reader import Reader


def ask(
    model: Model = None,
    question: Annotated[str | None, typer.Argument(help="The question; not needed with --interactive.")] = None,
    *,
    context: Annotated[list[Path] | None, option(TASK, "A text file to ask about. Repeatable.")] = None,
    interactive: Annotated[
        bool, option(TASK, "Read the files once, then answer questions until an empty line.", "--interactive")
    ] = False,
    max_new_tokens: Annotated[int, count(TASK, "Largest number of tokens of an answer.")] = 256,
    temperature: Annotated[float, option(TASK, "Temperature of sampling; 0: the most likely token.", min=0.0)] = 0.0,
    top_p: Annotated[float, option(TASK, "Sample from the most likely tokens whose probabilities sum to this.")] = 1.0,
    seed: Annotated[int | None, option(TASK, "Random seed of sampling.", metavar="N")] = None,
    method: OneMethod = "full",
    loading: Loading,
    chunk: Chunk = None,
    plan: Annotated[bool, option(RUN, "Print tokens and memory of the context, and stop.", "--plan")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a question about text files of any length, read by any method."""
    with one_line_errors():
        from dataclasses import asdict

        from farspan.ask import num_tokens, read_texts, refuse_empty
        from farspan.methods import method as parsed
        from farspan.reader import CHUNK, check_sampling
        from farspan.report.export import memory_size

        if loading.base_url is not None and question is None:
            model, question = None, model  # the only argument is the question
        model = loading.only_model(model)
        loading.refuse_chunk(chunk, [model])
        if question is None and not interactive and not plan:
            raise ValueError("no question was given: write it after the model, or use --interactive")
        if question is not None:
            refuse_empty(question)  # before the files are read
        check_sampling(temperature, top_p, seed)
        if temperature == 0 and (top_p != 1 or seed is not None):
            given = "--top-p" if top_p != 1 else "--seed"
            raise ValueError(f"{given} has no effect without --temperature: the likeliest token is taken; give both")
        how, texts = parsed(method), read_texts(context or [])
        loader = loading.loader()
        console, lm = err if as_json else Terminal(), loader(model, weights=not plan)
        how, tokens = how.fitted(lm.trained_length), num_tokens(lm, texts)
        keys = lm.key_bytes(how.kept(tokens), CHUNK)
        files = f"{len(texts)} {'file' if len(texts) == 1 else 'files'}"
        say = f"{files}, {tokens:,} tokens; keys of {how.kept(tokens):,} tokens: {memory_size(keys)}"
        err.print(say, style="dim", highlight=False)
        if warning := _beyond(how, tokens, lm.trained_length):
            err.print(warning, style="yellow", highlight=False)
        if plan:
            if as_json:
                print(json.dumps({"tokens": tokens, "kept": how.kept(tokens), "key_bytes": keys}))
            return
        with how.on(lm) as reader:
            reader.chunk = chunk or reader.chunk
            conversation, answers = _read(reader, texts, tokens), []
            while True:
                if question is None:
                    question = _next_question()
                if not question.strip() and interactive:
                    break
                answer = conversation.ask(
                    question,
                    max_new_tokens,
                    temperature=temperature,
                    top_p=top_p,
                    seed=seed,
                    on_text=lambda text: console.print(text, end="", markup=False, highlight=False, soft_wrap=True),
                )
                console.print()
                seen = f"decoder {answer.num_seen - answer.num_encoded:,} tokens ({answer.num_kept:,} kept)"
                took = f"{answer.num_tokens:,} token{'s' * (answer.num_tokens != 1)} in {answer.seconds:.1f} s"
                err.print(f"{seen}, encoder {answer.num_encoded:,}; {took}", style="dim", highlight=False)
                answers.append({"question": question} | asdict(answer))
                if not interactive:
                    break
                question = None
        if as_json:
            print(json.dumps({"model": model, "method": str(how), "answers": answers}))


def _next_question() -> str:
    """Return the next line of the input; at its end an empty one, which ends the questions."""
    try:
        return err.input("? ") if err.is_terminal else input()
    except EOFError:
        return ""


def _beyond(how: "Method", tokens: int, trained: int | None) -> str:
    """Return a warning of a text beyond the tokens that a model reaches under a method, with methods that reach it; ""
    if it reaches the text, or the method reads part of it, or gives it other positions."""
    from farspan.methods.base import ATTENTION, PASSAGES

    reach = how.extended(trained)
    if not trained or not reach or tokens <= reach or {ATTENTION, PASSAGES} & {*how.changes}:
        return ""
    scaled = f", and the method scales its positions to {reach:,}" if reach != trained else ""
    return (
        f"the text has {tokens:,} tokens, the model was trained with {trained:,}{scaled}: answers beyond that are "
        f"unreliable. Give --method rope:type=yarn,factor={-(-tokens // trained)}, or sinks:window=N, which reads all "
        "of it but sees the last N tokens only; `farspan methods` lists others"
    )


def _read(reader: "Reader", texts: list[str], tokens: int) -> "Conversation":
    """Read the texts, and print how far the reading is and how long it took."""
    from farspan.ask import Conversation
    from farspan.report.progress import reading

    started = time.perf_counter()
    with reading(err, tokens) as reader.on_read:
        conversation = Conversation(reader, texts)
    reader.on_read = None
    err.print(f"read in {time.perf_counter() - started:.1f} s", style="dim", highlight=False)
    return conversation
