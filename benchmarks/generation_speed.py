"""What a new token costs after a long text: farspan's `generate` beside transformers' own.

    python benchmarks/generation_speed.py --model MODEL [--dtypes float32 bfloat16] [--contexts 2048 8192] [--tokens 16]
                                          [--methods selfextend:group=8 dca] [--check]
    python benchmarks/generation_speed.py --quick

`plain` is `model.generate` of transformers, greedy, with its own cache and SDPA; `farspan` is `generate` of the memory
that a reader has under `full`. Both read the same text, files of Python's own library, in one process with one thread.
The time of a new token is the mean from the first new token to the last, in CPU seconds, since others on the machine
only add to wall time. The tokens are compared one by one. --methods: farspan's time under these too. Last line: the
figures as JSON. --check fails where farspan takes longer than `plain`, or where a token differs in float32.
"""

import time
from typing import Any

import torch
from common import end, parser_of, run_script
from reading_speed import TEXT

import farspan
from farspan.methods import method
from farspan.text.corpora import load


class Clock:
    """Note the CPU seconds at each new token; a streamer of transformers."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, token: Any) -> None:
        self.seconds.append(time.process_time())

    def end(self) -> None: ...

    @property
    def milliseconds(self) -> float:
        """The mean of all new tokens but the first, whose time contains the reading of the text."""
        return 1000 * (self.seconds[-1] - self.seconds[0]) / (len(self.seconds) - 1)


def plain(lm: farspan.LM, ids: torch.Tensor, tokens: int) -> tuple[float, list[int]]:
    clock = Clock()
    new = lm.model.generate(
        ids, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, streamer=clock, pad_token_id=0
    )
    clock.seconds = clock.seconds[1:]  # the first call is with the text
    return clock.milliseconds, new[0, ids.shape[1] :].tolist()


def ours(lm: farspan.LM, ids: torch.Tensor, tokens: int, how: str = "full") -> tuple[float, list[int]]:
    clock = Clock()
    with method(how).on(lm) as reader:
        reader.capacity = ids.shape[1] + tokens
        (new,) = reader.read(ids[:, :-1]).generate(ids[:, -1:], tokens, on_token=clock.put)
    return clock.milliseconds, new.tolist()


def main() -> None:
    parser = parser_of(__doc__, "float32, a context of 256", "fail where farspan is slower or a token differs")
    parser.add_argument("--model", default="demo", help="a folder, a hub id or a GGUF file")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[2048, 8192], help="tokens before the new ones")
    parser.add_argument("--tokens", type=int, default=16, help="new ones")
    parser.add_argument("--methods", nargs="+", default=[], help="other methods than full")
    options = parser.parse_args()
    if options.quick:
        options.dtypes, options.contexts = ["float32"], [256]
    torch.set_num_threads(1)
    figures, missed = dict[str, Any](), list[str]()
    for dtype in options.dtypes:
        lm = farspan.load(options.model, dtype=dtype, device="cpu")
        text = load(TEXT, lm.tokenizer)
        for context in options.contexts:
            ids = torch.from_numpy(text.windows(context, 1, 0)[0]).long()[None]
            (theirs, expected), (own, new) = (run(lm, ids, options.tokens) for run in (plain, ours))
            differ = sum(a != b for a, b in zip(expected, new, strict=True))
            name = f"{dtype}, {context} tokens"
            times = f"plain {theirs:.1f} ms, farspan {own:.1f} ms"
            print(f"{name}: {times}, {differ} of {len(new)} tokens differ", flush=True)
            figures |= {f"{name}: plain": theirs, f"{name}: farspan": own, f"{name}: differ": differ}
            if own > theirs or (dtype == "float32" and differ):
                missed.append(name)
            for how in options.methods:
                figures[f"{name}: {how}"] = ours(lm, ids, options.tokens, how)[0]
                print(f"{name}: {how} {figures[f'{name}: {how}']:.1f} ms", flush=True)
    end(figures, missed, options.check)


if __name__ == "__main__":
    run_script(main)
