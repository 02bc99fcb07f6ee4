"""Wrong inputs, continued: models, texts, data, runs, checkpoints, caches and indexes that are damaged or hostile.

A damage is a function of the copy of the stage that a command runs in.
"""

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from attack.inputs import (
    ASK,
    ATTENTION,
    COMPARE,
    CURVE,
    DOCTOR,
    ICL,
    IMPORT,
    INDEX,
    LONGER,
    MADE,
    OWN,
    PERPLEXITY,
    QA,
    RALM,
    RECALL,
    REPORT,
    TRAIN,
    Damage,
    Input,
    shown,
    write,
)

REMOVED = object()  # for a value: without the key
LLAMA = "models/llama"
PWNED = "pwned"  # a file that is there when something ran that must not


class Evil:
    """A pickle that leaves a file when it is loaded."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {PWNED}",)


def edit_json(here: Path, place: str, path: Sequence[str | int], value: Any) -> None:
    """Sets one value in a JSON file; `path` (): the whole of it."""
    whole = values = json.loads((here / place).read_text())
    if not path:
        write(here, place, json.dumps(value))
        return
    for key in path[:-1]:
        values = values[key]
    _set(values, path[-1], value)
    write(here, place, json.dumps(whole))


def _set(values: Any, key: str | int, value: Any) -> None:
    if value is REMOVED:
        values.pop(key, None)
    else:
        values[key] = value


FILE_DAMAGES: dict[str, Callable[[bytes], bytes] | None] = {
    "cut": lambda data: data[: len(data) // 2],
    "cut by a byte": lambda data: data[:-1],
    "empty": lambda data: b"",
    "zeros": lambda data: b"\0" * len(data),
    "garbage": lambda data: bytes((i * 37 + 11) % 256 for i in range(max(64, min(len(data), 4096)))),
    "text": lambda data: b"no such thing\n",
    "json of another kind": lambda data: b"[1, 2]",
    "deep json": lambda data: b"[" * 100_000 + b"]" * 100_000,
    "a pickle": lambda data: pickle.dumps(Evil()),
    "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0x55]) + data[len(data) // 2 + 1 :],
    "longer": lambda data: data + b"\0" * 64,
    "missing": None,
    "a folder": None,
    "a link to nothing": None,
    "a link to itself": None,
}


def damage_file(here: Path, place: str, how: str) -> None:
    """Damages the first file that the pattern `place` names."""
    path = sorted(here.glob(place))[0]
    data = path.read_bytes()
    path.unlink()
    damaged = FILE_DAMAGES[how]
    if damaged is not None:
        path.write_bytes(damaged(data))
    elif how == "a folder":
        path.mkdir()
    elif how.startswith("a link"):
        path.symlink_to("/nothere" if "nothing" in how else path)


# models

# key of config.json -> values, and those of them that have a meaning or none at all
CONFIG: dict[str, tuple[list[Any], list[Any]]] = {
    "num_hidden_layers": ([0, -1, 1, 3, "x", 1e400, None, 10**6], []),
    "num_attention_heads": ([0, -1, 3, "x", None, 1000], []),
    "num_key_value_heads": ([0, -1, 3, "x"], [8]),
    "hidden_size": ([0, -1, 33, 64, "x", None, 10**9], []),
    "intermediate_size": ([0, -1, 32, "x"], []),
    "vocab_size": ([0, -1, 10, 299, 301, "x", 10**12], []),
    "max_position_embeddings": ([0, -5, "x", 64.5], [1, None, 10**30]),
    "head_dim": ([-1, 7, "x"], [0]),
    "rms_norm_eps": (["x"], [-1, 0]),
    "rope_parameters": (
        [
            {"rope_type": "nothere"},
            {"rope_type": "linear"},
            {"rope_type": "default", "rope_theta": "x"},
            {"rope_type": "llama3"},
        ],
        ["x", [], {"rope_type": "default", "rope_theta": 0}, {"rope_type": "yarn", "factor": -1.0}],
    ),
    "dtype": (["int99", "x"], [7, "int8", "float8_e4m3fn"]),
    "model_type": (["nothere", "", "bert", "t5", "gpt2", "mamba", None], [3]),
    "architectures": ([], [["Nothere"], "x", []]),
    "hidden_act": (["nothere", 3], []),
    "tie_word_embeddings": ([], [True, "x"]),
    "bos_token_id": ([], [-1, 9999, "x"]),
    "eos_token_id": ([], [[], "x", 9999]),
    "pad_token_id": ([], [9999, -7, 10**30]),
    "layer_types": ([["nothere", "nothere"]], [["full_attention"]]),
    "quantization_config": ([{"quant_method": "nothere"}, "x", {"quant_method": "gptq", "bits": 4}], [{}]),
    "attention_bias": ([True], ["x"]),
    "is_encoder_decoder": ([], [True]),
    "sliding_window": ([], [-1, 0, "x"]),
    "attn_implementation": ([], ["nothere"]),
}

# a file of a model folder -> damages that are harmless, and those that may be
MODEL_FILES: dict[str, tuple[str, ...]] = {
    "config.json": ("cut by a byte",),
    "model.safetensors": ("flipped", "longer"),
    "tokenizer.json": ("flipped",),
    "tokenizer_config.json": tuple(FILE_DAMAGES),
    "generation_config.json": tuple(FILE_DAMAGES),
}


QUERIES, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
KEYS, MORE = "model.layers.1.self_attn.k_proj.weight", "model.layers.2.self_attn.k_proj.weight"
WEIGHTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "one NaN": (lambda state: state[QUERIES][0, 0].fill_(math.nan), "not finite"),
    "all NaN": (lambda state: [tensor.fill_(math.nan) for tensor in state.values()], "not finite"),
    "infinite": (lambda state: state[DOWN].fill_(math.inf), "not finite"),
    "one missing": (lambda state: state.pop(KEYS), "refused"),
    "one more": (lambda state: state.update({MORE: state[KEYS].clone()}), "refused"),
    "other shape": (lambda state: state.update({KEYS: state[KEYS][:3].clone()}), "refused"),
    "integers": (lambda state: state.update({name: one.char() for name, one in state.items()}), "refused"),
    "none": (dict.clear, "refused"),
}
# weights that give no numbers: rows are measured as `nan`; a text or a training is refused
NOT_FINITE = {"curve": "failed", "perplexity": "failed", "ask": "refused", "smt": "refused", "doctor": "failed"}

TEMPLATES: dict[str, str] = {
    "bad syntax": "{% for x in %}",
    "raising": "{{ raise_exception('no') }}",
    "undefined": "{{ nothere.at.all }}",
    "attack": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "control characters": "\x1b]0;owned\x07{{ messages[0]['content'] }}",
    "division": "{{ 1 / 0 }}",
    "empty": "",
    "no such item": "{{ messages[5]['content'] }}",
    "type error": "{{ messages + 1 }}",
}


def edit_weights(here: Path, place: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    from safetensors.torch import load_file, save_file

    path = here / place / "model.safetensors"
    state = load_file(path)
    edit(state)
    path.unlink()
    save_file(state, path, metadata={"format": "pt"})


def evil_model(here: Path, place: str) -> None:
    """A model folder with code of its own, which leaves a file where it runs."""
    auto = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoModel": "evil.Evil"}
    edit_json(here, f"{place}/config.json", ("auto_map",), auto)
    edit_json(here, f"{place}/config.json", ("model_type",), "evil")
    edit_json(here, f"{place}/tokenizer_config.json", ("auto_map",), {"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    edit_json(here, f"{place}/tokenizer_config.json", ("tokenizer_class",), "Evil")
    write(here, f"{place}/evil.py", f"import os\nos.system('touch {here}/{PWNED}')\nclass Evil: pass\n")


def bin_weights(here: Path, place: str, shard: str) -> None:
    """Pickled weights: of the usual name (`shard` empty), or named by the index of the safetensors files."""
    import torch

    state = {"lm_head.weight": torch.zeros(300, 32), "evil": Evil()}
    (here / place / "model.safetensors").unlink()
    for file in ("weights.bin", "pytorch_model.bin"):
        torch.save(state, here / place / file)
    torch.save(state, here / place / ".." / "weights.bin")
    if shard:
        (here / place / "pytorch_model.bin").unlink()
        index = {"metadata": {}, "weight_map": {"lm_head.weight": shard}}
        write(here, f"{place}/model.safetensors.index.json", json.dumps(index))


def git_folder(here: Path) -> None:
    """A git repository whose configuration runs a command when its state is read."""
    write(here, ".git/HEAD", "ref: refs/heads/main\n")
    write(here, ".git/refs/heads/.keep", "")
    write(here, ".git/objects/.keep", "")
    evil = f"touch {here}/{PWNED}"
    write(
        here,
        ".git/config",
        f'[core]\nrepositoryformatversion = 0\nbare = false\nfsmonitor = "{evil}; false"\npager = "{evil}"\n'
        f'[filter "evil"]\nclean = "{evil}"\nsmudge = "{evil}"\n[alias]\ndescribe = "!{evil}"\n',
    )
    write(here, ".gitattributes", "* filter=evil\n")


def models() -> Iterator[Input]:
    """Damaged folders of models, under commands that load them."""
    loading = {"curve": CURVE, "ask": ASK, "doctor": DOCTOR, "smt": TRAIN["smt"], "perplexity": PERPLEXITY}
    config = f"{LLAMA}/config.json"
    for key, (refused, harmless) in CONFIG.items():
        for number, value in enumerate([*refused, *harmless]):
            damage = partial(edit_json, place=config, path=(key,), value=value)
            expect = "refused" if number < len(refused) else "any"
            for command in ("curve", "ask" if number % 2 else "smt"):
                name = f"config {key}={shown(json.dumps(value))}, {command}"
                yield Input("models", name, loading[command], expect, (LLAMA, key), damage)
    for key in ("model_type", "vocab_size", "hidden_size", "num_attention_heads", "architectures", "bos_token_id"):
        damage = partial(edit_json, place=config, path=(key,), value=REMOVED)
        yield Input("models", f"config without {key}", CURVE, "any", (LLAMA, key), damage)
    for file, harmless_damages in MODEL_FILES.items():
        for how in FILE_DAMAGES:
            damage = partial(damage_file, place=f"{LLAMA}/{file}", how=how)
            expect = "any" if how in harmless_damages else "refused"
            for command in ("curve", "ask" if len(how) % 2 else "smt"):
                yield Input("models", f"{file} {how}, {command}", loading[command], expect, (LLAMA,), damage)
    for name, (edit, expect) in WEIGHTS.items():
        damage = partial(edit_weights, place=LLAMA, edit=edit)
        for command, argv in loading.items():
            expected = NOT_FINITE[command] if expect == "not finite" else expect
            yield Input("models", f"weights: {name}, {command}", argv, expected, (LLAMA, "model"), damage)
    for name, template in TEMPLATES.items():
        damage = partial(write, place=f"{LLAMA}/chat_template.jinja", content=template)
        yield Input("models", f"chat template: {name}", ASK, "any", (LLAMA, "template"), damage)
    for key, value in (("added_tokens", "x"), ("model", {}), ("pre_tokenizer", {"type": "Nothere"}), ("version", 9)):
        damage = partial(edit_json, place=f"{LLAMA}/tokenizer.json", path=(key,), value=value)
        yield Input("models", f"tokenizer {key}={value!r}", CURVE, "any", (LLAMA, "tokenizer.json"), damage)
    names = ["m[/x]y", "[bold]m", "cost_$^$b", "a$\\frac$z", "m\x1b[31m", "m\x9b2J", "m\n2", "\udcff", "m" * 200, "-m"]
    for name in names:
        damage = partial(_renamed, name=name)
        for command, argv in {**loading, "compare": COMPARE}.items():
            named = [f"./models/{name}" if one == LLAMA else one for one in argv]
            if command == "smt":
                named += ["--set", f"model.name=./models/{name}"]
            expect, about = ("refused", ("UTF-8",)) if name == "\udcff" else ("ok", ())
            yield Input("models", f"named {shown(name)}, {command}", tuple(named), expect, about, damage)
            if command in ("curve", "perplexity", "compare"):
                yield Input(
                    "models", f"named {shown(name)}, {command} --plan", (*named, "--plan"), expect, about, damage
                )


def _renamed(here: Path, name: str) -> None:
    place = os.fsencode(here / "models") + b"/" + os.fsencode(name)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    os.rename(here / LLAMA, place)


def code() -> Iterator[Input]:
    """What would run code that comes with a folder, were it let to."""
    evil = partial(evil_model, place=LLAMA)
    commands = {
        "curve": CURVE, "recall": RECALL, "perplexity": PERPLEXITY, "attention": ATTENTION, "compare": COMPARE,
        "own": OWN, "ask": ASK, "doctor": DOCTOR, "smt": TRAIN["smt"], "cepe": TRAIN["cepe"],
        "distill": TRAIN["distill"], "mlm": TRAIN["mlm"],
        "index": (*INDEX, "--passage-tokens", "5", "--tokenizer", LLAMA),
        "lm": (*TRAIN["lm"], "--set", f"tokenizer={{folder={LLAMA!r}}}"),
    }  # fmt: skip
    for command, argv in commands.items():
        yield Input("code", f"model, {command}", argv, "refused", (LLAMA,), evil, stdin="y\n" * 9)
        if not command.startswith(("index", "lm")):
            yield Input("code", f".git/config, {command}", argv, "any", (), git_folder)
    encoder = "models/encoder"
    for name, argv in {
        "encoder": TRAIN["cepe"],
        "random encoder": (*TRAIN["cepe"], "--set", "model.random_encoder=true"),
        "start": (*TRAIN["mlm"], "--set", f"encoder={{start={encoder!r}}}"),
        "of a dense index": (*INDEX, "--kind", "dense", "--encoder", encoder),
    }.items():
        damage = partial(evil_model, place=encoder)
        yield Input("code", name, argv, "refused", (encoder,), damage, stdin="y\n" * 9)
    shards = ("", "weights.bin", "../weights.bin", "/etc/passwd", "nothere.safetensors", "../gpt2/model.safetensors")
    for shard in shards:
        for place, argv in ((LLAMA, CURVE), (LLAMA, TRAIN["smt"]), (encoder, TRAIN["cepe"])):
            damage = partial(bin_weights, place=place, shard=shard)
            name = f"{shard or 'pytorch_model.bin'} of {place}, {argv[0]}"
            yield Input("code", name, argv, "refused", (place, "weights"), damage)


# texts and data

TEXT_FILES: dict[str, tuple[str, bytes | str, str]] = {  # name -> file, content, expectation
    "latin-1": ("a.txt", b"caf\xe9 " * 900, "refused"),
    "utf-16": ("a.txt", ("word " * 900).encode("utf-16"), "refused"),
    "empty": ("a.txt", b"", "refused"),
    "blank": ("a.txt", b" \n" * 900, "refused"),
    "zeros": ("a.txt", b"\0" * 9000, "any"),
    "short": ("a.txt", b"word", "refused"),
    "byte-order mark": ("a.txt", "\ufeff" + "word " * 900, "ok"),
    "surrogates": ("a.txt", b"\xed\xa0\x80 word" * 900, "refused"),
    "escape sequences": ("a.txt", "\x1b]0;owned\x07 word \x9b2J" * 900, "ok"),
    "one long line": ("a.txt", "x" * 200_000, "any"),
    "special tokens": ("a.txt", "<s> word </s>" * 900, "ok"),
    "unknown letters": ("a.txt", "\U0001f600\u200b" * 900, "ok"),
    "jsonl: no json": ("a.jsonl", "no json\n", "refused"),
    "jsonl: a list": ("a.jsonl", "[1]\n", "refused"),
    "jsonl: another key": ("a.jsonl", '{"content": "x"}\n', "refused"),
    "jsonl: cut": ("a.jsonl", '{"text": "' + "word " * 900 + '"}\n{"text": "wo', "refused"),
    "jsonl: deep": ("a.jsonl", '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n", "refused"),
    "jsonl: null": ("a.jsonl", '{"text": null}\n' * 9, "refused"),
    "jsonl: number": ("a.jsonl", '{"text": 12345}\n' * 900, "refused"),
    "jsonl: true": ("a.jsonl", '{"text": true}\n' * 900, "refused"),
    "jsonl: NaN": ("a.jsonl", '{"text": NaN}\n' * 900, "refused"),
    "jsonl: messages": ("a.jsonl", '{"text": [{"role": "user", "content": "hi"}]}\n' * 900, "refused"),
    "jsonl: a dict": ("a.jsonl", '{"text": {"a": "b"}}\n' * 900, "refused"),
    "jsonl: lone surrogate": ("a.jsonl", '{"text": "\\ud800 ' + "word " * 900 + '"}\n', "refused"),
    "jsonl: latin-1": ("a.jsonl", '{"text": "caf\xe9"}\n'.encode("latin-1"), "refused"),
    "jsonl: byte-order mark": ("a.jsonl", '\ufeff{"text": "' + "word " * 900 + '"}\n', "any"),
    "jsonl: empty": ("a.jsonl", "", "refused"),
    "jsonl: huge number": ("a.jsonl", '{"text": "x", "n": ' + "9" * 5000 + "}\n", "refused"),
    "jsonl: key twice": ("a.jsonl", '{"text": "a", "text": "' + "word " * 900 + '"}\n', "any"),
    "parquet: text": ("a.parquet", "no parquet", "refused"),
    "parquet: empty": ("a.parquet", b"", "refused"),
    "parquet: magic alone": ("a.parquet", b"PAR1" + b"\0" * 50 + b"PAR1", "refused"),
    "markdown": ("a.md", "# word\n" * 900, "ok"),
    "capital suffix": ("a.TXT", "word " * 900, "ok"),
    "no suffix": ("a", "word " * 900, "ok"),
    "gzip": ("a.txt.gz", b"\x1f\x8b\x08\0" + b"\x91" * 900, "refused"),
    "name with #": ("a#b.txt", "word " * 900, "any"),
    "name with brackets": ("a[/x].txt", "word " * 900, "ok"),
    "name with dollars": ("a$\\frac$z.txt".replace("\\", "_"), "word " * 900, "ok"),
    "name with an escape": ("a\x1b[31m.txt", "word " * 900, "ok"),
}


COLUMNS: dict[str, Any] = {
    "numbers": 1,
    "bytes": b"\xff\xfe",
    "lists": ["a", "b"],
    "structs": {"role": "user", "content": "hi"},
    "nulls": None,
    "booleans": True,
    "floats": math.nan,
    "dates": datetime(2026, 1, 1),
}


def _column(here: Path, values: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.string() if values == "nulls" else None
    pq.write_table(pa.table({"text": pa.array([COLUMNS[values]] * 9, kind)}), here / "a.parquet")


def _link_loop(here: Path) -> None:
    (here / "loop").mkdir()
    (here / "loop" / "again").symlink_to(here / "loop")
    write(here, "loop/a.txt", "word " * 900)


def _folder(here: Path, how: str) -> None:
    (here / "f").mkdir()
    write(here, "f/a.txt", "word " * 900)
    if how == "a folder named x.txt":
        (here / "f" / "x.txt").mkdir()
    elif how == "a link to nothing":
        (here / "f" / "b.txt").symlink_to("/nothere")
    elif how == "a pipe":
        os.mkfifo(here / "f" / "b.txt")
    elif how == "a bad file":
        write(here, "f/b.txt", b"caf\xe9")
    elif how == "a bad jsonl":
        write(here, "f/b.jsonl", "{")
    elif how == "a name that is no UTF-8":
        (Path(os.fsdecode(os.fsencode(here / "f") + b"/\xff.txt"))).write_text("word " * 9)


def texts() -> Iterator[Input]:
    """Damaged and hostile texts, under commands that read them."""

    def of(command: str, text: str) -> tuple[str, ...]:
        if command in TRAIN:
            return (*TRAIN[command], "--set", f"data.text={text}")
        base = {"curve": CURVE, "index": INDEX}[command]
        return (*base, f"--text={text}")

    for name, (file, content, expect) in TEXT_FILES.items():
        damage = partial(write, place=file, content=content)
        for command in ("curve", "index", "lm"):
            if command == "index" and name == "short":
                continue
            expected = "any" if command == "lm" and expect == "ok" else expect
            expected = "any" if command == "index" and name in ("unknown letters", "zeros") else expected
            path = f"./{file}" if file.startswith("-") else file
            yield Input("texts", f"{name}, {command}", of(command, path), expected, (file, repr(file)[1:-1]), damage)
    for values in COLUMNS:
        damage = partial(_column, values=values)
        for command in ("curve", "index", "lm"):
            argv = of(command, "a.parquet")
            yield Input("texts", f"parquet: {values}, {command}", argv, "refused", ("a.parquet",), damage)
    for how, expect in {
        "a folder named x.txt": "any",
        "a link to nothing": "any",
        "a pipe": "any",
        "a bad file": "refused",
        "a bad jsonl": "refused",
        "a name that is no UTF-8": "any",
    }.items():
        for command in ("curve", "index"):
            damage = partial(_folder, how=how)
            yield Input("texts", f"folder with {how}, {command}", of(command, "f"), expect, ("f/",), damage)
    yield Input("texts", "folder with a link to itself", of("curve", "loop"), "any", ("loop",), _link_loop)


QUESTIONS: dict[str, str] = {
    "no json": "no json\n",
    "a list": "[1]\n",
    "answers a number": '{"question": "who", "answers": 5}\n' * 9,
    "answers null": '{"question": "who", "answers": null}\n' * 9,
    "answers empty": '{"question": "who", "answers": []}\n' * 9,
    "answers nested": '{"question": "who", "answers": [["a"]]}\n' * 9,
    "question a number": '{"question": 5, "answers": ["a"]}\n' * 9,
    "question null": '{"question": null, "answers": ["a"]}\n' * 9,
    "no question": '{"answers": ["a"]}\n' * 9,
    "no passages": '{"question": "who", "answers": ["a"]}\n' * 9,
    "passages text": '{"question": "who", "answers": ["a"], "ctxs": "x"}\n' * 9,
    "passages of numbers": '{"question": "who", "answers": ["a"], "ctxs": [1, 2, 3]}\n' * 9,
    "passage text null": '{"question": "who", "answers": ["a"], "ctxs": [{"text": null}, {"text": 3}]}\n' * 9,
    "score text": '{"question": "who", "answers": ["a"], "ctxs": [{"text": "x", "score": "y"}, {"text": "x"}]}\n' * 9,
    "deep": '{"question": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
    "lone surrogate": '{"question": "\\ud800", "answers": ["a"], "ctxs": [{"text": "x"}, {"text": "y"}]}\n' * 9,
    "empty": "",
    "one question": '{"question": "who", "answers": ["a"], "ctxs": [{"text": "x"}, {"text": "y"}]}\n',
}
LABELLED: dict[str, str] = {
    "no json": "no json\n",
    "no text": '{"label": 0}\n' * 9,
    "no label": '{"text": "x"}\n' * 9,
    "label text": '{"text": "x", "label": "nothere"}\n' * 9,
    "label out of range": '{"text": "x", "label": 99}\n' * 9,
    "label negative": '{"text": "x", "label": -1}\n' * 9,
    "label null": '{"text": "x", "label": null}\n' * 9,
    "label half": '{"text": "x", "label": 0.5}\n' * 9,
    "text a number": '{"text": 5, "label": 0}\n' * 9,
    "text null": '{"text": null, "label": 0}\n' * 9,
    "empty": "",
}


def data() -> Iterator[Input]:
    """Damaged sets of questions and of labelled texts."""
    for name, content in QUESTIONS.items():
        damage = partial(write, place="nq.jsonl", content=content)
        yield Input("data", f"qa: {name}", QA, "any" if name == "lone surrogate" else "refused", ("nq.jsonl",), damage)
    for name, content in LABELLED.items():
        for split in ("train", "test"):
            damage = partial(write, place=f"icl/{split}.jsonl", content=content)
            yield Input("data", f"icl {split}: {name}", ICL, "refused", (split,), damage)
    for how in ("cut", "empty", "garbage", "missing", "a folder"):
        damage = partial(damage_file, place="nq.jsonl", how=how)
        yield Input("data", f"qa: file {how}", QA, "refused", ("nq.jsonl",), damage)


AUTHORS: dict[str, str] = {
    "empty": "",
    "a number": "3",
    "empty list": "[]",
    "a dict": "{}",
    "null": "null",
    "a list of numbers": "[1, 2]",
    "deep": "[" * 100_000 + "]" * 100_000,
    "cut": '[{"length": 64, "copy_accs": [0.5',
    **{
        f"{key} {shown(value)}": json.dumps([{"length": 64, "copy_accs": [0.5, 0.6], "lm_accs": [0.3, 0.3]}]).replace(
            f'"{key}": ' + json.dumps({"length": 64, "copy_accs": [0.5, 0.6], "lm_accs": [0.3, 0.3]}[key]),
            f'"{key}": {value}',
        )
        for key in ("length", "copy_accs", "lm_accs")
        for value in (
            "-64", "0", "64.7", "true", "null", '"x"', "1e400", "1e30", "1" + "0" * 400, "[]", "[0.5]", "[0.5, 2]",
            "[0.5, -1]", "[0.5, NaN]", "[0.5, null]", '["x", "y"]', "[[0.5], [0.6]]", "{}", "Infinity", '"64"',
        )
    },
    "no length": '[{"copy_accs": [0.5], "lm_accs": [0.3]}]',
    "no copy_accs": '[{"length": 64, "lm_accs": [0.3]}]',
    "a length twice": '[{"length": 64, "copy_accs": [0.5], "lm_accs": [0.3]}, {"length": 64, "copy_accs": [0.6], '
    '"lm_accs": [0.3]}]',
}  # fmt: skip


def imports() -> Iterator[Input]:
    """Result files that are none."""
    for name, content in AUTHORS.items():
        damage = partial(write, place="authors.json", content=content)
        yield Input("imports", name, IMPORT, "refused", ("authors.json",), damage)


# runs

WRONG: dict[str, Any] = {
    "null": None, "text": "x", "a list": [], "a dict": {}, "a number": 7.5, "true": True, "negative": -5,
    "NaN": float("nan"), "huge": 10**30, "deep": None,
}  # fmt: skip
ROW_FIELDS: dict[str, tuple[str, ...]] = {  # field -> values that it may have
    "model": ("text",),
    "method": ("text",),
    "task": ("text",),
    "version": ("huge", "true", "negative"),
    "settings": ("a dict",),
    "length": (),
    "repeat": ("huge", "true", "negative"),
    "seed": ("huge", "negative", "true"),
    "example": ("text",),
    "depth": (),
    "status": ("text",),
    "reason": ("text",),
    "scores": (),
    "num_seen": ("huge", "true", "negative"),
    "num_kept": ("huge", "true", "negative"),
    "seconds": ("a number", "huge", "true", "negative"),
    "peak_bytes": ("huge", "true", "negative"),
}
SCORES: dict[str, dict[str, Any]] = {  # command -> scores that no measurement gives
    "curve": {
        "copy": 7.0, "control": -1.0, "scored": 0, "copy_hits": "zz", "control_hits": 5, "context": -3,
        "control_repeat": "x", "copy_nats": "x", "distance": "x", "target": 5,
    },
    "perplexity": {"nats": "x", "accuracy": 7.0, "hits": "zz", "scored": 0, "target": 5},
    "own": {"right": 7.0, "control": "x", "recall": -1.0, "pairs": 3.0, "cloze": "x"},
    "recall": {"copy": 7.0, "scored": 0, "distance": "x"},
}  # fmt: skip


def edit_row(here: Path, field: str, value: Any, score: bool = False) -> None:
    """Sets a field, or one of the scores, of the first row."""
    first, *others = (here / "run" / "rows.jsonl").read_text().splitlines(keepends=True)
    row = json.loads(first)
    _set(row["scores"] if score else row, field, value)
    write(here, "run/rows.jsonl", "".join([json.dumps(row) + "\n", *others]))


def edit_rows(here: Path, edit: Callable[[list[str]], str]) -> None:
    lines = (here / "run" / "rows.jsonl").read_text().splitlines(keepends=True)
    write(here, "run/rows.jsonl", edit(lines))


ROWS: dict[str, tuple[Callable[[list[str]], str], str]] = {
    "torn": (lambda lines: "".join(lines)[:-30], "same"),
    "no newline": (lambda lines: "".join(lines)[:-1], "same"),
    "NUL tail": (lambda lines: "".join(lines) + "\0" * 50, "same"),
    "empty": (lambda lines: "", "any"),
    "carriage returns": (lambda lines: "".join(lines).replace("\n", "\r\n"), "same"),
    "garbage between": (lambda lines: lines[0] + "garbage\n" + "".join(lines[1:]), "refused"),
    "cut between": (lambda lines: lines[0][:50] + "\n" + "".join(lines[1:]), "refused"),
    "blank line between": (lambda lines: lines[0] + "\n" + "".join(lines[1:]), "any"),
    "a list between": (lambda lines: lines[0] + "[1]\n" + "".join(lines[1:]), "refused"),
    "deep line": (lambda lines: lines[0] + '{"model": ' + "[" * 99_999 + "\n" + "".join(lines[1:]), "refused"),
    "deep balanced": (lambda lines: lines[0] + "[" * 99_999 + "]" * 99_999 + "\n" + "".join(lines[1:]), "refused"),
    "all twice": (lambda lines: "".join(lines) * 2, "any"),
    "reversed": (lambda lines: "".join(reversed(lines)), "same"),
    "one key more": (lambda lines: lines[0].replace("{", '{"more": 1, ', 1) + "".join(lines[1:]), "refused"),
    "a key twice": (lambda lines: lines[0].replace("{", '{"length": 9, ', 1) + "".join(lines[1:]), "any"),
    "byte-order mark": (lambda lines: "\ufeff" + "".join(lines), "same"),
    "huge number": (lambda lines: "".join(lines).replace('"seed": 0', f'"seed": {"9" * 5000}'), "refused"),
    "lone surrogate": (lambda lines: "".join(lines).replace('"reason": ""', '"reason": "\\ud800"'), "any"),
    "zeros": (lambda lines: "\0" * 500, "any"),
}
HEADERS: list[tuple[tuple[str, ...], Any, str]] = [
    (("settings",), None, "refused"), (("settings",), [], "refused"), (("settings",), "x", "refused"),
    (("settings",), {}, "refused"), (("models",), None, "refused"), (("models",), [], "refused"),
    (("models",), "x", "refused"), (("models",), 5, "refused"), (("models", LLAMA), None, "refused"),
    (("models", LLAMA), "x", "refused"), (("models", LLAMA), [], "refused"), (("models", LLAMA), {}, "refused"),
    (("models", LLAMA, "name"), 5, "refused"), (("models", LLAMA, "name"), REMOVED, "refused"),
    (("models", LLAMA, "trained_length"), "x", "refused"), (("models", LLAMA, "trained_length"), -5, "refused"),
    (("models", LLAMA, "trained_length"), 10**30, "refused"), (("models", LLAMA, "fingerprint"), "x", "refused"),
    (("models", LLAMA, "characters_per_token"), "x", "refused"), (("sessions",), None, "refused"),
    (("sessions",), {}, "refused"), (("sessions",), "x", "refused"), (("sessions",), [], "any"),
    (("sessions",), [5], "refused"), (("sessions", 0), None, "refused"), (("sessions", 0, "command"), 5, "refused"),
    (("sessions", 0, "packages"), "x", "refused"), (("sessions", 0, "started"), 5, "any"),
    (("sessions", 0, "command"), ["\x1b[31m", "[/x]"], "any"), (("settings", "lengths"), "x", "refused"),
    (("settings", "seed"), 99, "refused"), (("settings", "text"), "another", "refused"), ((), [], "refused"),
    ((), None, "refused"), ((), 5, "refused"), ((), {}, "refused"),
]  # fmt: skip
# which of these `report`, which does not compare settings, may read
REPORTED = {("settings",), ("settings", "lengths"), ("settings", "seed"), ("settings", "text"), ("models", LLAMA),
            ("models", LLAMA, "fingerprint"), ("models",), ("models", LLAMA, "name")}  # fmt: skip
EXAMPLES: dict[str, tuple[Callable[[str], str | bytes], str]] = {
    "torn": (lambda text: text[: len(text) // 2], "ok"),
    "no newline": (lambda text: text[:-1], "ok"),
    "empty": (lambda text: "", "ok"),
    "garbage": (lambda text: "garbage\n" + text, "refused"),
    "a list": (lambda text: "[1]\n" + text, "refused"),
    "null": (lambda text: "null\n", "refused"),
    "no model": (lambda text: '{"what": "x"}\n', "refused"),
    "parts text": (lambda text: text.replace('"parts": [', '"parts": [5, ', 1), "refused"),
    "deep": (lambda text: "[" * 99_999 + "]" * 99_999 + "\n", "refused"),
    "latin-1": (lambda text: b"\xe9\n" + text.encode(), "refused"),
    "lone surrogate": (lambda text: text.replace('["', '["\\ud800', 1), "any"),
    "escape": (lambda text: text.replace('["', '["\\u001b[31m', 1), "ok"),
}


def edit_examples(here: Path, edit: Callable[[str], str | bytes]) -> None:
    write(here, "run/examples.jsonl", edit((here / "run" / "examples.jsonl").read_text()))


def linked(here: Path, file: str) -> None:
    """A file of a run is a link to a file of the user's that no command may write."""
    write(here, "precious", "mine\n")
    path = here / "run" / file
    path.parent.mkdir(exist_ok=True)
    if path.exists() or path.is_symlink():
        path.unlink()
    path.symlink_to(here / "precious")


def runs() -> Iterator[Input]:
    """Damaged runs, repeated and reported."""
    commands = {"resume": CURVE, "report": REPORT}
    rows, header = ("rows.jsonl", "run/", "line"), ("run.json", "run")
    for field, allowed in ROW_FIELDS.items():
        for name, value in [*WRONG.items(), ("missing", REMOVED)]:
            if name == "deep":
                value = json.loads("[" * 500 + "]" * 500)
            defaults = ("depth", "status", "reason", "num_seen", "num_kept", "seconds", "peak_bytes")
            expect = "any" if name in allowed or (name == "missing" and field in defaults) else "refused"
            for command, argv in commands.items():
                damage = partial(edit_row, field=field, value=value)
                yield Input("runs", f"{field} {name}, {command}", argv, expect, rows, damage, "curve")
    for made, scores in SCORES.items():
        for score, value in scores.items():
            for command, argv in (("resume", MADE[made]), ("report", REPORT)):
                damage = partial(edit_row, field=score, value=value, score=True)
                yield Input("runs", f"{made} {score}={value!r}, {command}", argv, "refused", rows, damage, made)
        for score in scores:
            damage = partial(edit_row, field=score, value=REMOVED, score=True)
            yield Input("runs", f"{made} without {score}, report", REPORT, "any", rows, damage, made)
    for made in ("curve", "perplexity", "compare", "own"):
        for name, (edit, expect) in ROWS.items():
            for command, argv in (("resume", MADE[made]), ("report", REPORT)):
                expected = "ok" if expect == "same" and command == "report" else expect
                damage = partial(edit_rows, edit=edit)
                yield Input("runs", f"{made} rows {name}, {command}", argv, expected, rows, damage, made)
    for path, value, expect in HEADERS:
        for command, argv in commands.items():
            expected = "any" if command == "report" and path in REPORTED else expect
            damage = partial(edit_json, place="run/run.json", path=path, value=value)
            shown_value = "removed" if value is REMOVED else shown(json.dumps(value))
            name = f"run.json {'.'.join(map(str, path)) or 'whole'}={shown_value}, {command}"
            yield Input("runs", name, argv, expected, header, damage, "curve")
    for file in ("run.json", "rows.jsonl", "examples.jsonl"):
        for how in FILE_DAMAGES:
            for command, argv in commands.items():
                damage = partial(damage_file, place=f"run/{file}", how=how)
                expect = "any" if file != "run.json" or how in ("cut by a byte", "missing") else "refused"
                yield Input("runs", f"{file} {how}, {command}", argv, expect, (file, "run"), damage, "curve")
    for name, (edit_example, expect) in EXAMPLES.items():
        for command, argv in commands.items():
            expected = "any" if command == "resume" else expect
            damage = partial(edit_examples, edit=edit_example)
            yield Input("runs", f"examples {name}, {command}", argv, expected, ("examples.jsonl",), damage, "curve")
    for file in ("curve.png", "examples.jsonl", "rows.jsonl", "run.json", "curves.csv"):
        yield Input("links", f"{file}, resume", CURVE, "any", (), partial(linked, file=file), "curve")
    for file in ("../report/report.html", "../report/curves.csv", "../report/report.md"):
        damage = partial(linked, file=file)
        yield Input("links", f"{file}, report", REPORT, "any", (), damage, "curve")


# checkpoints of trainings, caches and indexes


LENIENT = ("trainer_state.json", "training_args.bin")  # without the first a checkpoint was not written to its end


def checkpoints() -> Iterator[Input]:
    """Every file of every checkpoint and of a training's folder, damaged, and the training repeated."""
    files = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", *LENIENT)
    for kind, argv in LONGER.items():
        longer, made = (*argv, "--set", "trainer.steps=6"), f"{kind}, longer"
        yield Input("checkpoints", f"{kind} undamaged", longer, "ok", made=made)
        for file in files:
            place = f"out/checkpoints/checkpoint-4/{file}"
            for how in FILE_DAMAGES:
                expect = "any" if file in LENIENT else "refused"
                if how == "flipped" or (how == "longer" and file != "trainer_state.json"):
                    expect = "any"
                damage = partial(_checkpoint_file, place=place, how=how)
                names = (file, "checkpoint-4")
                yield Input("checkpoints", f"{kind} {file} {how}", longer, expect, names, damage, made)
        for how in ("cut", "empty", "garbage", "json of another kind", "missing", "a folder", "deep json"):
            damage = partial(damage_file, place="out/settings.json", how=how)
            expect = "any" if how == "missing" else "refused"
            yield Input("checkpoints", f"{kind} settings.json {how}", longer, expect, ("settings.json",), damage, made)
        for edit in ("checkpoint-best", "checkpoint-", "checkpoint-4.5", "checkpoint-4x"):
            damage = partial(_other_checkpoint, name=edit)
            yield Input("checkpoints", f"{kind} folder {edit}", longer, "any", (edit,), damage, made)
        for path, value in (
            (("more",), 1), (("global_step",), "x"), (("global_step",), -1), (("global_step",), 10**30),
            (("log_history",), 5), (("log_history",), None), (("max_steps",), "x"), ((), []), ((), {}),
        ):  # fmt: skip
            place = "out/checkpoints/checkpoint-4/trainer_state.json"
            damage = partial(edit_json, place=place, path=path, value=value)
            name = f"{kind} trainer_state {'.'.join(path) or 'whole'}={shown(json.dumps(value))}"
            yield Input("checkpoints", name, longer, "any", ("trainer_state.json", "checkpoint-4"), damage, made)


def _checkpoint_file(here: Path, place: str, how: str) -> None:
    if not (here / place).exists():  # of a training whose checkpoints do not have it
        found = sorted((here / place).parent.glob(f"*{Path(place).suffix}"))
        if not found:
            return
        place = str(found[0].relative_to(here))
    damage_file(here, place, how)


def _other_checkpoint(here: Path, name: str) -> None:
    shutil.copytree(here / "out/checkpoints/checkpoint-4", here / "out/checkpoints" / name)


def _ids(here: Path, value: int) -> None:
    (path,) = here.glob("cache/corpora/*/tokens.npy")
    tokens = np.load(path)
    path.unlink()
    np.save(path, np.full_like(tokens, value))


STARTS: dict[str, Callable[[Any], Any]] = {
    "longer": lambda starts: np.append(starts, starts[-1] + 99),
    "shorter": lambda starts: starts[:-1],
    "shifted": lambda starts: starts + 1,
    "descending": lambda starts: starts[::-1].copy(),
    "negative": lambda starts: -starts,
    "floats": lambda starts: starts.astype(float),
    "objects": lambda starts: np.array([Evil()], dtype=object),
    "two-dimensional": lambda starts: starts[None],
}


def _starts(here: Path, place: str, change: str) -> None:
    (path,) = here.glob(place)
    starts = np.load(path)
    path.unlink()
    np.save(path, STARTS[change](starts), allow_pickle=True)


def caches() -> Iterator[Input]:
    """A cached text that is damaged: it is made again, or refused, and never measured."""
    argv = (*CURVE[:-1], "again")
    for file in ("tokens.npy", "starts.npy"):
        for how in FILE_DAMAGES:
            damage = partial(damage_file, place=f"cache/corpora/*/{file}", how=how)
            yield Input("caches", f"{file} {how}", argv, "same", ("cache",), damage, "curve")
    for value in (0, -1, 299, 300, 2**31 - 1):
        yield Input("caches", f"all ids {value}", argv, "same", ("cache",), partial(_ids, value=value), "curve")
    for change in STARTS:
        damage = partial(_starts, place="cache/corpora/*/starts.npy", change=change)
        yield Input("caches", f"starts {change}", argv, "same", ("cache",), damage, "curve")
    damage = partial(write, place="cache", content="")
    yield Input("caches", "the folder is a file", CURVE, "refused", ("cache",), damage)


INDEX_VALUES: list[tuple[tuple[str, ...], Any]] = [
    (("kind",), "nothere"), (("kind",), None), (("kind",), "dense"), (("kind",), "faiss"), (("format",), 99),
    (("format",), "1"), (("documents",), "x"), (("cut",), None), (("text_hash",), 5), ((), []), ((), {}), ((), None),
    (("encoder",), 5), (("kind",), REMOVED), (("text_hash",), REMOVED),
]  # fmt: skip


def _sealed(here: Path, damage: Damage) -> None:
    """A damage of an index that its checksums do not tell, as a stranger's may be."""
    from farspan.text import checksums

    damage(here)
    checksums.seal(here / "index")


def indexes() -> Iterator[Input]:
    """Every file of an index, damaged, and a task that searches it, and `index` repeated."""
    again = (*RALM[:-1], "again")
    commands = {"search": (again, "same"), "made again": (INDEX, "any")}
    for file in ("index.json", "passages.txt", "starts.npy", "documents.npy", "bm25/*"):
        for how in FILE_DAMAGES:
            for command, (argv, expect) in commands.items():
                damage = partial(damage_file, place=f"index/{file}", how=how)
                yield Input("indexes", f"{file} {how}, {command}", argv, expect, ("index",), damage, "ralm")
    for change in STARTS:
        damage = partial(_starts, place="index/starts.npy", change=change)
        yield Input("indexes", f"starts {change}, search", again, "same", ("index",), damage, "ralm")
        sealed = partial(_sealed, damage=damage)
        expect = "any" if change in ("longer", "shorter", "shifted") else "same"  # other passages, but whole ones
        yield Input("indexes", f"starts {change}, sealed, search", again, expect, ("index",), sealed, "ralm")
    for path, value in INDEX_VALUES:
        damage = partial(edit_json, place="index/index.json", path=path, value=value)
        name = f"index.json {'.'.join(path) or 'whole'}={'removed' if value is REMOVED else shown(json.dumps(value))}"
        for command, (argv, _) in commands.items():
            expect = "same" if command == "search" else "any"
            yield Input("indexes", f"{name}, {command}", argv, expect, ("index",), damage, "ralm")
            sealed = partial(_sealed, damage=damage)
            yield Input("indexes", f"{name}, sealed, {command}", argv, "any", ("index",), sealed, "ralm")
