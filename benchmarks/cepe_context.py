"""What the context in CEPE's encoder brings: its own text, that of another document, or none.

    python benchmarks/cepe_context.py MODEL --text FOLDER [--length 8192] [--window 512] [--repeats 32] [--record]

The last 256 tokens of windows of a text are scored, and the decoder always reads the same tokens before them. The
encoder reads the earlier tokens of the window, or as many of another window (half of all windows further on, so of
another document where there are many), or none. Prints nats per token and paired differences; --record keeps the rows
in benchmarks/cepe_context.jsonl.gz.
"""

from pathlib import Path

import numpy as np
import recorded
import torch
from common import interval, parser_of, run_script, with_ends

from farspan.lm import load
from farspan.methods import method
from farspan.text.corpora import load as load_text

SCORED = 256
ROWS = Path(__file__).with_suffix(".jsonl.gz")


def main() -> None:
    parser = parser_of(__doc__, check=None)
    parser.add_argument("model", help="a folder of a CEPE model")
    parser.add_argument("--text", required=True, help="see `farspan.text.documents`")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a window")
    parser.add_argument("--window", type=int, default=512, help="tokens that the decoder may hold")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a chunk")
    parser.add_argument("--repeats", type=int, default=32)
    parser.add_argument("--record", action="store_true", help="keep the rows")
    options = parser.parse_args()
    lm = load(options.model, dtype="bfloat16")
    text = load_text(options.text, lm.tokenizer)
    windows = torch.from_numpy(np.stack(text.windows(options.length, options.repeats, 0))).long()
    head = torch.tensor([lm.separator.ids])
    chunks = -(-(options.length + head.shape[1] - options.window) // options.chunk)  # the encoder's; the rest fits
    encoded = chunks * options.chunk
    rows = []
    with method(f"cepe:chunk={options.chunk},decoder_window={options.window}").on(lm) as reader:
        for number, window in enumerate(windows):
            other = windows[(number + len(windows) // 2) % len(windows)]
            befores = {"own": window[:encoded], "other": other[:encoded], "none": window[:0]}
            nats = {}
            for name, before in befores.items():
                ids = torch.cat([before, window[encoded:]])[None]
                memory = reader.read(ids[:, :-SCORED], head=head)
                nats[name] = float(memory.score(ids[:, -SCORED:]).nats.double().mean())
            rows.append({"text": options.text, "repeat": number, "length": options.length, "encoded": encoded, **nats})
            print(rows[-1], flush=True)
    if options.record:
        recorded.write_lines(ROWS, rows)
    for name, less in (("own", "none"), ("other", "none"), ("own", "other")):
        more = interval(np.array([row[name] - row[less] for row in rows]))
        print(f"{name} less {less}: {with_ends(more, 4, '+')} nats per token")


if __name__ == "__main__":
    run_script(main)
