"""Models behind a server: the same hits and log-probabilities as in this process, on fake servers of each engine."""

import json
import math
import re
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from fake_servers import MODEL, Fake, serving
from jsonschema import Draft7Validator
from test_exports import SCHEMA
from tokenizers import Regex, pre_tokenizers
from typer.testing import CliRunner

from farspan import measure, served
from farspan.cli import app
from farspan.doctor.served import _apart
from farspan.lm import LM, wrap
from farspan.lm import load as load_model
from farspan.measuring.loader import Load
from farspan.methods import method
from farspan.reader import dense_reader
from farspan.reader.served import SENTENCE, ServerError, client
from farspan.reader.served.client import Client
from farspan.reader.served.transports import Completions
from farspan.record import read_rows
from farspan.report.exports import export
from farspan.report.page import write_report

from tiny import blank_first_tokenizer, saved, tiny_model

ENGINES = ("vLLM", "SGLang", "llama-server", "completions")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A model, with a text beside it."""
    folder = saved(tmp_path_factory.mktemp("served") / "tiny-llama", tokenizer)
    words = ("fox", "dog", "over", "lazy", "quick")
    (folder.parent / "text.txt").write_text(" ".join(f"{words[i * i % 5]} {i}" for i in range(300)))
    return folder


@pytest.fixture(scope="module")
def own(folder: Path) -> LM:
    return load_model(folder)


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return str(folder.parent / "text.txt")


@pytest.fixture
def ids(tokenizer: Any) -> torch.Tensor:
    """Tokens of whole characters: parts of them look alike as text."""
    whole = torch.tensor([id for id in range(3, len(tokenizer)) if tokenizer.decode([id]).isascii()])
    return whole[torch.randint(len(whole), (1, 60), generator=torch.Generator().manual_seed(0))]


def asked(fake: Fake) -> int:
    return sum(path.endswith(("completions", "completion", "generate")) for path, *_ in fake.requests)


@pytest.mark.parametrize("engine", ENGINES)
def test_hits_and_nats_are_those_of_this_process(engine: str, own: LM, folder: Path, ids: torch.Tensor) -> None:
    text, more = ids[:, :40], torch.cat([ids[:, 40:], ids[:, :20]])
    more[0, 7:15] = dense_reader(own).read(text).generate(more[:1, :7], 8)[0]  # so that there are hits
    expected = dense_reader(own).read(text).score(more, slice(5, None))
    greedy = dense_reader(own).read(text).generate(ids[:, 40:45], 6)[0].tolist()
    with serving(Fake(engine, own)) as url:
        lm = served(url, tokenizer=str(folder))
        with method("full").on(lm) as reader:
            memory = reader.read(text[:, :30], text[:, 30:])
            scores = memory.score(more, slice(5, None))
            new = memory.generate(ids[:, 40:45], 6)[0].tolist()
    assert lm.name == f"{MODEL} ({engine})"
    assert torch.equal(scores.rank == 0, expected.rank == 0)
    assert int((scores.rank == 0).sum()) >= 7
    known = scores.nats.isfinite()
    torch.testing.assert_close(scores.nats[known], expected.nats[known], rtol=1e-4, atol=1e-4)
    assert bool(known.all()) == (engine in ("vLLM", "SGLang")) == reader.gives_nats
    assert not bool(scores.failed.any())
    if engine != "completions":  # whose new tokens are text, which may be other tokens
        assert new == greedy


@pytest.mark.parametrize("engine", ENGINES)
def test_a_curve_has_the_same_hits(engine: str, own: LM, folder: Path, text: str, tmp_path: Path) -> None:
    task = "curve:protocol=probe,warmup=2,scored=4"
    arguments: dict[str, Any] = {"tasks": [task], "lengths": [16, 40], "repeats": 2, "text": text}
    here = measure([own], **arguments, out=tmp_path / "here").rows
    with serving(Fake(engine, own)) as url:
        there = measure([served(url, tokenizer=str(folder))], **arguments, out=tmp_path / "there").rows
    assert len(there) == 4
    for one, other in zip(
        *(sorted(rows, key=lambda row: (row.repeat, row.length)) for rows in (here, there)), strict=True
    ):
        assert (one.example, one.length) == (other.example, other.length)
        for half in ("copy_hits", "control_hits"):
            assert one.scores[half] == other.scores[half]
        assert other.reading["requests"] == (2 if engine in ("vLLM", "SGLang") else 8)


def test_a_served_model_reads_the_texts_of_a_longer_one(own: LM, folder: Path, text: str, tmp_path: Path) -> None:
    task, longer = "curve:protocol=probe,warmup=2,scored=4", replace(own, trained_length=160)
    with serving(Fake("vLLM", own)) as url:
        lm = replace(served(url, tokenizer=str(folder)), position_limit=100, trained_length=160)
        rows = measure([longer, lm], tasks=[task], repeats=2, text=text, out=tmp_path / "run").rows
    lengths = [{row.length for row in rows if row.model == one.name} for one in (longer, lm)]
    assert [max(some) for some in lengths] == [314, 78]
    assert len({row.example for row in rows}) == 2


def test_llama_server_computes_new_tokens_only(own: LM, folder: Path, text: str, tmp_path: Path) -> None:
    with serving(Fake("llama-server", own)) as url:
        lm = served(url, tokenizer=str(folder))
        task = "curve:protocol=probe,warmup=4,scored=8"
        rows = measure([lm], tasks=[task], lengths=[64, 128], repeats=2, text=text, out=tmp_path / "run").rows
    sent, cached = (sum(row.reading[name] for row in rows) for name in ("prompt_tokens", "cached_tokens"))
    assert cached > 0.9 * sent
    page = write_report([tmp_path / "run"], tmp_path / "page")
    last = [row.reading for row in rows if row.length == 128]
    share = sum(one["cached_tokens"] for one in last) / sum(one["prompt_tokens"] for one in last)
    assert f"<td>{share:.1%}</td>" in next(path for path in page if path.suffix == ".html").read_text()


def test_costs_of_a_server_are_refused(own: LM, folder: Path) -> None:
    with serving(Fake("vLLM", own)) as url, pytest.raises(ValueError, match="is read by its server, whose seconds"):
        measure([served(url, tokenizer=str(folder))], tasks="cost", lengths=64)


def test_cached_positions_of_vllm_are_never_read(own: LM, folder: Path, ids: torch.Tensor) -> None:
    expected = dense_reader(own).read(ids[:, :40]).score(ids[:, 40:])
    with serving(Fake("vLLM", own, forced=True)) as url:
        memory = served(url, tokenizer=str(folder)).own_reader().read(ids[:, :40])
        for _ in range(3):  # from the second on, all of it is in the cache
            torch.testing.assert_close(memory.score(ids[:, 40:]).nats, expected.nats, rtol=1e-4, atol=1e-4)


def test_a_task_that_needs_nats_is_refused_without_them(own: LM, folder: Path, text: str, tmp_path: Path) -> None:
    with serving(Fake("llama-server", own)) as url:
        lm = served(url, tokenizer=str(folder))
        with pytest.raises(ValueError, match=r"perplexity needs the log-probability .* vLLM or SGLang"):
            measure([lm], tasks=["perplexity"], lengths=[300], repeats=2, text=text, out=tmp_path / "run")
    with serving(Fake("vLLM", own)) as url:
        arguments: dict[str, Any] = {"tasks": ["perplexity"], "lengths": [300], "repeats": 2, "text": text}
        there = measure([served(url, tokenizer=str(folder))], **arguments, out=tmp_path / "there").rows
    here = measure([own], **arguments, out=tmp_path / "here").rows
    assert [row.scores["nats"] for row in there] == pytest.approx([row.scores["nats"] for row in here], rel=1e-4)


@pytest.mark.parametrize("text", ["the fox", "fox the\nlazy"])
def test_new_text_has_the_tokens_that_it_has_after_the_prompt(text: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "tiny", blank_first_tokenizer(["the", "fox", "lazy", *map(chr, (10, *range(33, 127)))]))
    own = load_model(folder)
    prompt, new = (own.tokenizer(part)["input_ids"] for part in ("lazy", f"lazy {text}"))
    with serving(fake := Fake("completions", own)) as url:
        memory = served(url, tokenizer=str(folder)).own_reader().read(torch.tensor([[1, *prompt[:-1]]]))
        fake.new = lambda prompt, body: new[len(prompt) - 1 :][: body["max_tokens"]]  # type: ignore[method-assign]
        [there] = memory.generate(torch.tensor([prompt[-1:]]), len(new) - len(prompt))
    assert there.tolist() == new[len(prompt) :]


def test_passkey_needs_hits_alone(folder: Path, tmp_path: Path) -> None:
    own = load_model(folder)
    digits = own.tokenizer(" 0123456789", add_special_tokens=False)["input_ids"]
    with torch.no_grad():  # a model that answers with digits, some of them right
        own.model.lm_head.weight[[id for id in range(own.vocabulary) if id not in digits]] *= 0.01
    arguments: dict[str, Any] = {"tasks": ["passkey:depths=2,digits=15"], "lengths": [420], "repeats": 3}
    here = measure([own], **arguments, out=tmp_path / "here").rows
    with serving(Fake("llama-server", own)) as url:
        there = measure([served(url, tokenizer=str(folder))], **arguments, out=tmp_path / "there").rows
    scores = [{(row.repeat, row.depth): row.scores["digits"] for row in rows} for rows in (here, there)]
    assert {row.status for row in there} == {"ok"}
    assert scores[0] == scores[1]
    assert any(scores[0].values())


def test_a_method_needs_the_model_itself(own: LM, folder: Path) -> None:
    with serving(Fake("vLLM", own)) as url:
        lm = served(url, tokenizer=str(folder))
        for text in ("sinks:window=20", "topk:k=4", "rope:type=yarn,factor=2", "snapkv:capacity=40"):
            with pytest.raises(ValueError, match="runs on a server"), method(text).on(lm) as reader:
                reader.read(torch.zeros(1, 30, dtype=torch.long)).score(torch.zeros(1, 3, dtype=torch.long))


@pytest.mark.parametrize("failure", [(429, {"error": "slow down"}), (503, "<html>busy</html>")])
def test_a_busy_server_is_asked_again(failure: Any, own: LM, folder: Path, ids: torch.Tensor) -> None:
    fake = Fake("vLLM", own, failure=failure)
    expected = dense_reader(own).read(ids[:, :40]).score(ids[:, 40:])
    with serving(fake) as url:
        lm = served(url, tokenizer=str(folder))
        fake.failures, before = 2, asked(fake)
        scores = lm.own_reader().read(ids[:, :40]).score(ids[:, 40:])
    torch.testing.assert_close(scores.nats, expected.nats, rtol=1e-4, atol=1e-4)
    assert asked(fake) == before + 3
    assert lm.client.take().requests == 1
    identities = [headers["X-Request-Id"] for *_, headers in fake.requests]
    assert len(set(identities)) == len(identities)


def test_without_log_probabilities_of_the_prompt_new_tokens_are_asked_for(own: LM, folder: Path) -> None:
    with serving(Fake("vLLM", own, echo="ignored")) as url:
        assert served(url, tokenizer=str(folder)).identity["attention"] == "one_token"


def test_a_server_that_names_ids_is_asked_by_them(own: LM, folder: Path) -> None:
    ids = torch.randint(3, 289, (1, 60), generator=torch.Generator().manual_seed(0))  # parts of characters among them
    expected = dense_reader(own).read(ids[:, :40]).score(ids[:, 40:])
    for named, exact in ((True, True), (False, False)):
        with serving(Fake("completions", own, named_ids=named)) as url:
            scores = served(url, tokenizer=str(folder)).own_reader().read(ids[:, :40]).score(ids[:, 40:])
        assert bool(scores.failed.any()) != exact
        assert torch.equal((scores.rank == 0)[~scores.failed], (expected.rank == 0)[~scores.failed])


def test_a_truncated_answer_is_asked_again(own: LM, folder: Path, ids: torch.Tensor) -> None:
    fake = Fake("vLLM", own, cut=0)
    with serving(fake) as url:
        lm = served(url, tokenizer=str(folder))
        fake.faults["cut"] = 1
        assert bool(lm.own_reader().read(ids[:, :40]).score(ids[:, 40:]).nats.isfinite().all())


FAULTS = {
    "ids": ("vLLM", {"other_ids": 1}, "answered about another token than"),
    "ids of SGLang": ("SGLang", {"other_ids": 1}, "answered about token"),
    "tokenizer": ("vLLM", {"shift": 1}, "does not match the server's: a sentence is"),
    "tokenizer, not asked": ("SGLang", {"words": 1, "other_words": 1}, "does not match the server's: new tokens are"),
    "spaces": ("completions", {"words": 1, "strips": 1}, "cannot be told from their text"),
    "vocabulary": ("llama-server", {"n_vocab": 100}, "289 entries, the model on .* only 100"),
    "several models": ("vLLM", {"models": 2}, r"serves tiny, tiny-1: name one \(--served-model\)"),
    "a model without id": (
        "vLLM",
        {"about": {"id": None}},
        r"/v1/models lists a model without a name: got {'id': None",
    ),
    "a number as id": ("vLLM", {"about": {"id": 7}}, r"a model without a name: .*'id': 7.*expected an object such as"),
    "a model that is no object": ("vLLM", {"listed": ["other"]}, "lists a model without a name: got 'other', expected"),
    "meta": ("llama-server", {"about": {"meta": "x"}}, "/v1/models: meta: got 'x', expected an object"),
    "n_vocab": ("llama-server", {"n_vocab": "many"}, "n_vocab: got 'many', expected a whole number from 0"),
    "n_params": (
        "llama-server",
        {"about": {"meta": {"n_params": "1B"}}},
        "n_params: got '1B', expected a whole number",
    ),
    "a context as text": (
        "vLLM",
        {"about": {"max_model_len": "512"}},
        "/v1/models: max_model_len: got '512', expected",
    ),
    "a negative context": (
        "vLLM",
        {"about": {"max_model_len": -1}},
        r"got -1, expected a whole number from 0 to 2,147",
    ),
    "an endless context": ("SGLang", {"about": {"max_model_len": 2**40}}, "max_model_len: got 1099511627776, expected"),
    "a slot": (
        "llama-server",
        {"props": {"default_generation_settings": [1]}},
        r"/props: default_.*: got \[1\], expected",
    ),
    "its context": (
        "llama-server",
        {"props": {"default_generation_settings": {"n_ctx": "x"}}},
        "n_ctx: got 'x', expected",
    ),
    "chat": ("chat", {}, "serves chats only"),
    "HTML": ("vLLM", {"page": (200, "<html>hello</html>")}, "a page of HTML: is .* an inference server"),
    "wrong path": ("vLLM", {"page": (404, "not found")}, "lists no models: is it the server's base URL"),
    "no completions": ("nothing", {}, "cannot score tokens. vLLM: .*404: no /v1/completions"),
    "no key": ("vLLM", {"page": (401, {"error": {"message": "no key"}})}, "answers 401: no key"),
}


@pytest.mark.parametrize(("engine", "faults", "message"), FAULTS.values(), ids=FAULTS)
def test_a_server_that_cannot_be_measured_is_refused(
    engine: str, faults: dict[str, Any], message: str, own: LM, folder: Path
) -> None:
    with serving(Fake(engine, own, **faults)) as url, pytest.raises(ValueError, match=message) as error:
        served(url, tokenizer=str(folder), wait=0.2)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://example.com:8000", r"unencrypted to another machine: use https, or allow it \(--insecure\)"),
        ("http://127.example.com:8000", r"unencrypted to another machine"),
        ("ftp://127.0.0.1", "is not an address"),
        ("http://user:secret@127.0.0.1", "holds a password: remove it, and set FARSPAN_API_KEY"),
        ("http://127.0.0.1:9", r"no answer from http://127.0.0.1:9 .*is it running"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Client(url, wait=0.1).get("/v1/models")
    assert "secret" not in str(error.value)


def test_a_certificate_of_its_own_is_refused_until_it_is_named(
    own: LM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openssl, file = shutil.which("openssl"), tmp_path / "certificate.pem"
    if openssl is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    made = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1"]
    subject = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*made, *subject, "-keyout", str(file), "-out", str(file) + ".2"], check=True, capture_output=True)
    file.write_text(file.read_text() + Path(str(file) + ".2").read_text())
    with serving(Fake("vLLM", own), certificate=file) as url:
        with pytest.raises(
            ServerError, match=r"^the certificate of https://.* cannot be verified .*REQUESTS_CA_BUNDLE$"
        ):
            served(url, tokenizer=str(folder), wait=0.2)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(file))
        assert served(url, tokenizer=str(folder)).trained_length == 512


def test_null_in_a_list_of_models_counts_as_left_out(own: LM, folder: Path) -> None:
    with serving(Fake("vLLM", own, about={"max_model_len": None, "meta": None, "root": None})) as url:
        lm = served(url, tokenizer=str(folder))
    assert (lm.trained_length, lm.position_limit, lm.identity["parameters"]) == (None, None, None)


def test_a_tokenizer_is_asked_for_where_the_server_names_none(own: LM) -> None:
    with (
        serving(Fake("vLLM", own)) as url,
        pytest.raises(ValueError, match=r"names its model 'tiny', .*\(--tokenizer\)"),
    ):
        served(url)


def test_a_wrong_model_name_is_refused_with_the_right_one(own: LM, folder: Path) -> None:
    with serving(Fake("vLLM", own)) as url, pytest.raises(ValueError, match="serves no model 'other': it has tiny"):
        served(url, model="other", tokenizer=str(folder))


def test_the_key_is_sent_and_never_recorded(
    own: LM, folder: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARSPAN_API_KEY", "sesame")
    fake = Fake("vLLM", own)
    with serving(fake) as url:
        lm = served(url, tokenizer=str(folder))
        run = measure([lm], tasks=["curve"], lengths=[32], repeats=2, text=text, out=tmp_path / "run").folder
    (tmp_path / "netrc").write_text("machine example.com login user password other")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    session = Client("https://example.com")._session
    request = session.prepare_request(requests.Request("GET", "https://example.com"))
    assert request.headers["Authorization"] == "Bearer sesame"
    assert {headers["Authorization"] for *_, headers in fake.requests} == {"Bearer sesame"}
    assert not any("sesame" in path.read_text() for path in run.glob("*.json*"))


def test_of_tied_tokens_the_first_is_the_hit(folder: Path, ids: torch.Tensor) -> None:
    own = load_model(folder)
    own.model.lm_head.weight = torch.nn.Parameter(own.model.lm_head.weight.detach().clone())
    own.model.lm_head.weight.data[1::2] = own.model.lm_head.weight.data[::2]  # each logit twice
    text = ids[:, :40]
    first = dense_reader(own).read(text).generate(ids[:, 40:41], 8)[0]
    for more, hits in ((first, 8), (first ^ 1, 0)):  # the other of the two
        more = torch.cat([ids[:, 40:41], more[None]], 1)
        expected = dense_reader(own).read(text).score(more, slice(1, 2))
        assert int((expected.rank == 0).sum()) == min(hits, 1)
        for engine in ("vLLM", "SGLang"):
            with serving(Fake(engine, own)) as url:
                scores = served(url, tokenizer=str(folder)).own_reader().read(text).score(more, slice(1, 2))
            assert torch.equal(scores.rank == 0, expected.rank == 0)


def test_a_server_that_takes_text_only_is_sent_text(
    own: LM, folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, text_of = list[tuple[int, ...]](), Completions._prompt
    monkeypatch.setattr(Completions, "_prompt", lambda self, ids: (made.append(tuple(ids)), text_of(self, ids))[1])
    ids = own.tokenizer(Path(text).read_text()[:400], return_tensors="pt")["input_ids"]
    expected = dense_reader(own).read(ids[:, :40]).score(ids[:, 40:80])
    with serving(Fake("text", own)) as url:
        reader = served(url, tokenizer=str(folder)).own_reader()
        made.clear()
        scores = reader.read(ids[:, :40]).score(ids[:, 40:80])
        assert len(made) == len(set(made)) == 40  # one text for each token
        letters = torch.tensor([own.tokenizer.convert_tokens_to_ids(list("fox"))])
        as_letters = reader.read(torch.cat([ids[:, :37], letters], 1)).score(ids[:, 40:80])
    known = ~scores.failed
    assert int(known.sum()) > 20
    assert torch.equal((scores.rank == 0)[known], (expected.rank == 0)[known])
    assert bool(as_letters.failed.all())  # no text has these tokens


def test_as_many_requests_as_allowed_are_sent_at_once(own: LM, folder: Path, ids: torch.Tensor) -> None:
    for engine, given, most in (("completions", 3, 3), ("llama-server", 2, 2), ("llama-server", None, 1)):
        fake = Fake(engine, own, slow=0.01)
        with serving(fake) as url:
            lm = served(url, tokenizer=str(folder), concurrency=given)
            lm.own_reader().read(ids[:, :40]).score(ids[:, 40:])
        assert fake.most_at_once == most


def test_answers_that_take_too_long_are_asked_for_again(
    own: LM, folder: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake("vLLM", own)
    with serving(fake) as url:
        lm = served(url, tokenizer=str(folder), wait=0.3)
        monkeypatch.setattr(client, "TIMEOUTS", (1.0, 0.5))  # longer than servers are waited for
        fake.faults["slow"] = 0.8
        threading.Timer(0.4, fake.faults.pop, ("slow",)).start()
        scores = lm.own_reader().read(ids[:, :40]).score(ids[:, 40:])
    assert bool(scores.nats.isfinite().all())


def test_rows_of_one_text_are_asked_for_together_in_ascending_length(
    own: LM, folder: Path, text: str, tmp_path: Path
) -> None:
    fake = Fake("vLLM", own)
    with serving(fake) as url:
        lm = served(url, tokenizer=str(folder))
        fake.requests.clear()
        given: dict[str, Any] = {"lengths": [16, 32, 64], "repeats": 3, "text": text}
        rows = measure([lm], tasks=["curve:protocol=probe,warmup=4,scored=4"], **given, out=tmp_path / "run").rows
    prompts = [body["prompt"] for path, body, _ in fake.requests if path == "/v1/completions"]
    assert len(prompts) == 3 * 3 * 2
    for first in range(0, len(prompts), 6):
        lengths = [len(one) for one in prompts[first : first + 6]]
        assert lengths == sorted(lengths)
        assert len({tuple(one[:17]) for one in prompts[first : first + 6]}) == 1
    begins = {row.reading["request_id"] for row in rows}
    assert len(begins) == len(rows)
    assert {headers["X-Request-Id"].partition("-")[0] for *_, headers in fake.requests} == begins


@pytest.mark.parametrize("command", [["curve"], ["compare", "--task", "curve"]])
def test_a_server_that_stays_away_ends_the_command_and_a_repeated_one_asks_for_the_rest(
    command: list[str], own: LM, folder: Path, text: str, tmp_path: Path, runner: CliRunner
) -> None:
    name, *task = command
    fake = Fake("vLLM", own, failure=(503, {"error": "gone"}))
    with serving(fake) as url:
        given = ["--tokenizer", str(folder), "--text", text, "--repeats", "4", "--lengths", "16,32", "--wait", "0"]
        line = [name, url, *given, *task, "--out", str(tmp_path / "run")]
        fake.failing_after = 10
        done = runner.invoke(app, line)
        assert done.exit_code == 2, done.output
        assert "answers 503: gone" in done.output
        there = [row for row in read_rows(tmp_path / "run") if row.status == "ok"]
        assert there == read_rows(tmp_path / "run")
        assert 0 < len(there) < 8
        fake.failing_after = math.inf
        before = asked(fake)
        done = runner.invoke(app, line)
        assert done.exit_code == 0, done.output
        assert asked(fake) == before + 3 + 2 * (8 - len(there))  # three checks, and copy and control of each row
    assert len(read_rows(tmp_path / "run")) == 8


@pytest.mark.parametrize(
    ("engine", "fault", "reason"),
    [
        ("vLLM", "refused_above", "maximum context length"),
        ("vLLM", "proxied_up_to", "answers 413: a page of HTML"),
        ("SGLang", "refused_above", "exceeds the maximum allowed length"),
        ("completions", "refused_above", "must have less than 100 tokens"),
        ("SGLang", "pool", "needs 162 tokens, and one more is written; the server takes 94"),
        ("llama-server", "cuts_to", "read 100 tokens, 1"),
        ("vLLM", "limit", "needs 162 tokens, and one more is written; the server takes 100"),
    ],
)
def test_a_text_that_is_too_long_for_the_server_is_a_row(
    engine: str, fault: str, reason: str, own: LM, folder: Path, text: str, tmp_path: Path
) -> None:
    with serving(Fake(engine, own, **{fault: 100})) as url:
        lm = served(url, tokenizer=str(folder))
        rows = measure([lm], tasks=["curve"], lengths=[32, 64, 80], repeats=2, text=text, out=tmp_path / "run").rows
    assert {(row.length, row.status) for row in rows} == {(32, "ok"), (64, "too_long"), (80, "too_long")}
    assert reason in next(row.reason for row in rows if row.length == 80)


def test_the_context_of_an_old_sglang_server_is_that_of_its_own_report(own: LM, folder: Path) -> None:
    with serving(Fake("SGLang", own, old=True, limit=100)) as url:
        lm = served(url, tokenizer=str(folder))
    assert (lm.trained_length, lm.position_limit) == (100, 99)


def test_an_export_names_no_engine_for_a_served_model(own: LM, folder: Path, text: str, tmp_path: Path) -> None:
    with serving(Fake("vLLM", own)) as url:
        lm = served(url, tokenizer=str(folder))
        measure([lm], tasks=["perplexity"], lengths=[64], repeats=2, text=text, out=tmp_path / "run")
    (path,) = export(tmp_path / "run", "every-eval-ever", tmp_path / "made")
    written = json.loads(path.read_text())
    assert not list(Draft7Validator(json.loads(SCHEMA.read_text())).iter_errors(written))
    assert "inference_engine" not in written["model_info"]
    assert written["model_info"]["additional_details"]["deployment_type"] == "unknown"


def test_of_a_special_token_nothing_is_known_unless_the_server_names_ids(
    own: LM, folder: Path, ids: torch.Tensor
) -> None:
    target = torch.cat([ids[:, 40:45], torch.tensor([[own.tokenizer.eos_token_id]])], 1)
    for named in (True, False):
        with serving(Fake("completions", own, named_ids=named)) as url:
            scores = served(url, tokenizer=str(folder)).own_reader().read(ids[:, :40]).score(target)
        assert (scores.rank[0] >= 0).tolist() == [True] * 5 + [named]


@pytest.mark.parametrize("engine", ["vLLM", "llama-server"])
def test_a_server_without_ids_of_new_tokens_is_asked_in_another_way(
    engine: str, own: LM, folder: Path, ids: torch.Tensor
) -> None:
    with serving(Fake(engine, own, no_ids=1)) as url:
        lm = served(url, tokenizer=str(folder))
        memory = lm.own_reader().read(ids[:, :40])
        assert int((~memory.score(ids[:, 40:]).failed).sum()) > 0
        if engine == "vLLM":
            with pytest.raises(ServerError, match="returns no ids of new tokens"):
                memory.generate(ids[:, 40:45], 6)
    assert lm.identity["attention"] == ("prompt_logprobs" if engine == "vLLM" else "one_token")


@pytest.mark.parametrize(
    ("engine", "defaults"),
    [
        ("vLLM", {"penalty": 9.0}),
        ("SGLang", {"penalty": 9.0}),
        ("llama-server", {"penalty": 9.0}),
        ("llama-server", {"presence": 9.0}),
        ("llama-server", {"samplers": ["top_k"]}),
    ],
)
def test_the_sampling_defaults_of_a_server_change_no_answer(
    engine: str, defaults: dict[str, Any], own: LM, folder: Path, ids: torch.Tensor
) -> None:
    with serving(Fake(engine, own, **defaults)) as url:
        memory = served(url, tokenizer=str(folder)).own_reader().read(ids[:, :40])
        [there] = memory.generate(ids[:, 40:45], 12)
        ranks = memory.score(ids[:, 40:]).rank
    here = dense_reader(own).read(ids[:, :40])
    [expected] = here.generate(ids[:, 40:45], 12)
    assert there.tolist() == expected.tolist()
    assert torch.equal(ranks == 0, here.score(ids[:, 40:]).rank == 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_answer_that_the_server_cuts_is_refused(engine: str, own: LM, folder: Path, ids: torch.Tensor) -> None:
    with serving(Fake(engine, own, most_new=8)) as url:
        memory = served(url, tokenizer=str(folder)).own_reader().read(ids[:, :40])
        memory.generate(ids[:, 40:45], 8)
        with pytest.raises(ServerError, match=r"after 8 of 12 new tokens \(l[a-z]+\)\. If it has a limit"):
            memory.generate(ids[:, 40:45], 12)


@pytest.mark.parametrize("reason", ["abort", "error"])
@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
def test_an_answer_that_the_server_gives_up_is_refused(
    engine: str, reason: str, own: LM, folder: Path, ids: torch.Tensor
) -> None:
    with serving(Fake(engine, own, most_new=8, reason=reason)) as url:
        memory = served(url, tokenizer=str(folder)).own_reader().read(ids[:, :40])
        with pytest.raises(ServerError, match=rf"after 8 of 12 new tokens \({reason}\)"):
            memory.generate(ids[:, 40:45], 12)


@pytest.mark.parametrize("engine", ENGINES[:3])
def test_a_stop_token_that_only_the_server_knows_is_no_new_token(
    engine: str, own: LM, folder: Path, ids: torch.Tensor
) -> None:
    [expected] = dense_reader(own).read(ids[:, :40]).generate(ids[:, 40:45], 12)
    stop = expected[6]
    before = expected[: int((expected == stop).nonzero()[0, 0])]
    with serving(Fake(engine, own, own_stop=int(stop))) as url:
        [there] = served(url, tokenizer=str(folder)).own_reader().read(ids[:, :40]).generate(ids[:, 40:45], 12)
    assert there.tolist() == before.tolist()


def test_an_answer_whose_tokens_the_server_does_not_count_is_not_cut(own: LM, folder: Path, ids: torch.Tensor) -> None:
    with serving(Fake("completions", own, uncounted=True)) as url:
        memory = served(url, tokenizer=str(folder)).own_reader().read(ids[:, :40])
        assert len(memory.generate(ids[:, 40:45], 12)[0]) > 0


def test_sglang_is_sent_a_seed_only_where_it_takes_one(own: LM, folder: Path, ids: torch.Tensor) -> None:
    with serving(fake := Fake("SGLang", own, seeds=True)) as url:
        memory = served(url, tokenizer=str(folder)).own_reader().read(ids[:, :40])
        memory.generate(ids[:, 40:45], 2, seed=2**63 - 1, temperature=0.5)
        assert fake.requests[-1][1]["sampling_params"]["sampling_seed"] == 2**31 - 1
        fake.faults["seeds"] = False
        with pytest.raises(ValueError, match="seeds unless it is started with --enable-deterministic-inference: got"):
            memory.generate(ids[:, 40:45], 2, seed=7, temperature=0.5)
        memory.generate(ids[:, 40:45], 2, seed=7)  # greedy
        assert "sampling_seed" not in fake.requests[-1][1]["sampling_params"]


@pytest.mark.parametrize("silent", [False, True])
def test_tokens_from_the_cache_are_recorded_where_they_are_reported(
    silent: bool, own: LM, folder: Path, text: str, tmp_path: Path
) -> None:
    with serving(Fake("vLLM", own, silent=silent)) as url:
        lm = served(url, tokenizer=str(folder))
        (row, *_) = measure([lm], tasks=["curve"], lengths=[32], repeats=2, text=text, out=tmp_path / "run").rows
    assert ("cached_tokens" in row.reading) == (not silent)
    assert row.reading["requests"] == 2


@pytest.mark.parametrize(
    "command",
    [
        "recall --length 64 --warmup 8 --scored 8",
        "perplexity --lengths 300",
        "task passkey --lengths 300",
        "task needle --lengths 600",
    ],
)
def test_every_command_that_measures_takes_a_server(
    command: str, own: LM, folder: Path, text: str, tmp_path: Path, runner: CliRunner
) -> None:
    with serving(Fake("vLLM", own, limit=1024, models=2)) as url:
        given = ["--base-url", url, "--served-model", MODEL, "--tokenizer", str(folder), "--repeats", "2"]
        given += [] if "passkey" in command else ["--text", text]  # which has a text of its own
        done = runner.invoke(app, [*command.split(), *given, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert "tiny (vLLM) is queried through prompt_logprobs: one request scores all tokens" in " ".join(
        done.output.split()
    )


@pytest.mark.parametrize(("engine", "faults", "message"), FAULTS.values(), ids=FAULTS)
def test_a_command_says_in_one_line_why_a_server_cannot_be_measured(
    engine: str, faults: dict[str, Any], message: str, own: LM, folder: Path, text: str, runner: CliRunner
) -> None:
    with serving(Fake(engine, own, **faults)) as url:
        done = runner.invoke(
            app, ["curve", url, "--tokenizer", str(folder), "--text", text, "--lengths", "16", "--wait", "0"]
        )
    assert done.exit_code == 2
    assert re.search(message, " ".join(done.output.split()))
    assert "Traceback" not in done.output, done.output[-1500:]


def test_a_proxy_is_not_asked_for_this_machine(own: LM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(Fake("vLLM", own)) as url:
        assert served(url, tokenizer=str(folder)).trained_length == 512


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def test_the_command_line_measures_compares_and_resumes(
    own: LM, folder: Path, text: str, tmp_path: Path, runner: CliRunner
) -> None:
    fake = Fake("vLLM", own)
    with serving(fake) as url:
        given = ["--tokenizer", str(folder), "--text", text, "--repeats", "2"]
        common = ["--lengths", "16,32", "--out", str(tmp_path / "run"), *given]
        done = runner.invoke(app, ["curve", "--base-url", url, *common])
        assert done.exit_code == 0, done.output
        assert "cost on the server" in done.output
        assert "not reported" not in done.output
        before = asked(fake)
        assert runner.invoke(app, ["curve", url, *common]).exit_code == 0
        assert asked(fake) == before + 3  # the probe, whether model and tokenizer are the run's: all rows are there
        task = ["--task", "curve", "--lengths", "16", "--out", str(tmp_path / "both"), *given]
        both = runner.invoke(app, ["compare", str(folder), "--base-url", url, *task])
        assert both.exit_code == 0, both.output
    rows = [row for row in read_rows(tmp_path / "both") if row.task == "curve"]
    by_model = {name: [r.scores["copy_hits"] for r in rows if r.model == name] for name in {r.model for r in rows}}
    assert len(by_model) == 2
    assert len({json.dumps(hits) for hits in by_model.values()}) == 1


def test_no_model_at_all_is_one_line(runner: CliRunner) -> None:
    done = runner.invoke(app, ["curve"])
    assert done.exit_code == 2
    assert "no model: give a folder" in done.output


def test_a_server_is_asked_once_what_it_is(own: LM, folder: Path) -> None:
    fake = Fake("vLLM", own)
    with serving(fake) as url:
        loader = Load(served={"tokenizer": str(folder)})
        assert loader.trained(url) == 512
        assert loader(url) is loader(url)
        assert [path for path, *_ in fake.requests].count("/v1/models") == 1


def test_nothing_is_guessed_of_tokens_outside_the_likeliest(own: LM, folder: Path, ids: torch.Tensor) -> None:
    with serving(Fake("llama-server", own)) as url:
        lm = served(url, tokenizer=str(folder))
        scores = lm.own_reader().read(ids[:, :40]).score(ids[:, 40:])
    expected = dense_reader(own).read(ids[:, :40]).score(ids[:, 40:])
    assert torch.equal(scores.nats.isnan(), expected.rank >= 10)
    assert bool((scores.rank >= 0).all())
    assert math.isnan(float(scores.nats.mean()))


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
def test_a_log_probability_of_minus_infinity_is_a_failure(
    engine: str, own: LM, folder: Path, text: str, tmp_path: Path, ids: torch.Tensor
) -> None:
    fake = Fake(engine, own)
    with serving(fake) as url:
        lm = served(url, tokenizer=str(folder))
        fake.faults["impossible"] = ids[0, 50:52].tolist()
        scores = lm.own_reader().read(ids[:, :40]).score(ids[:, 40:])
        fake.faults["impossible"] = list(range(own.vocabulary))
        task, more = "curve:protocol=probe,warmup=2,scored=4", {"lengths": [16], "repeats": 2, "text": text}
        rows = measure([lm], tasks=[task], out=tmp_path / "run", **more).rows
    assert torch.equal(scores.failed, torch.isin(ids[:, 40:], ids[:, 50:52]))
    assert torch.equal(scores.nats.isinf(), scores.failed)
    assert {(row.status, row.reason) for row in rows} == {("nan", "8 scored tokens have no finite log-probability")}


def test_a_probability_too_small_for_llama_server_is_not_known(own: LM, folder: Path, ids: torch.Tensor) -> None:
    fake = Fake("llama-server", own)
    with serving(fake) as url:
        lm = served(url, tokenizer=str(folder))
        fake.faults["impossible"] = list(range(own.vocabulary - 5))  # so that some are among the ten that it lists
        listed = fake.logits(ids[0, :40].tolist())[-1].topk(10).indices
        scores = lm.own_reader().read(ids[:, :40]).score(listed[None, -1:])
    assert math.isnan(float(scores.nats))
    assert not bool(scores.failed.any())


def test_a_server_that_dies_and_returns_is_waited_for(own: LM, folder: Path, ids: torch.Tensor) -> None:
    fake = Fake("vLLM", own)
    with serving(fake) as url:
        lm = served(url, tokenizer=str(folder))
        fake.closed = True
        threading.Timer(0.6, setattr, (fake, "closed", False)).start()
        scores = lm.own_reader().read(ids[:, :40]).score(ids[:, 40:])
    assert bool(scores.nats.isfinite().all())
    assert lm.client.take().requests == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_the_doctor_finds_nothing_wrong_with_a_server(
    engine: str, own: LM, folder: Path, text: str, runner: CliRunner
) -> None:
    given = ["--tokenizer", str(folder), "--text", text]
    with serving(Fake(engine, own)) as url:
        done = runner.invoke(app, ["doctor", "--base-url", url, *given, "--json"])
        assert done.exit_code == 0, done.output
        checks = {one["name"]: one["passed"] for one in json.loads(done.output.splitlines()[-1])["checks"]}
        assert all(passed is not False for passed in checks.values())
        assert checks["log-probabilities"] is (True if engine in ("vLLM", "SGLang") else None)
        assert checks["prefix cache"] is (True if engine in ("SGLang", "llama-server") else None)
        refused = runner.invoke(app, ["doctor", url, *given, "--method", "sinks:window=20"])
        assert refused.exit_code == 2
        assert "runs on a server" in refused.output


def test_the_doctor_finds_leftovers_at_cached_positions(own: LM, folder: Path, text: str, runner: CliRunner) -> None:
    with serving(Fake("vLLM", own, forced="unsalted", silent=True)) as url:
        done = runner.invoke(app, ["doctor", url, "--tokenizer", str(folder), "--text", text, "--json"])
    assert done.exit_code == 1
    checks = {one["name"]: one["passed"] for one in json.loads(done.output.splitlines()[-1])["checks"]}
    assert checks["repeats"] is checks["order of requests"] is False


def test_nats_that_are_there_only_once_are_a_difference() -> None:
    assert _apart([(2.3, 1), (math.nan, 1)], [(2.31, 1), (math.nan, 1)]) == pytest.approx(0.01)
    assert _apart([(2.3, 1), (0.1, 0)], [(math.nan, 1), (0.1, 0)]) == math.inf


def test_errors_are_server_errors(own: LM, folder: Path) -> None:
    fake = Fake("vLLM", own)
    with serving(fake) as url:
        lm = served(url, tokenizer=str(folder), wait=0.1)
    with pytest.raises(ServerError, match=r"no answer from .* it was waited for \(--wait\)"):
        lm.own_reader().read(torch.zeros(1, 4, dtype=torch.long)).score(torch.zeros(1, 2, dtype=torch.long))


def test_a_run_is_not_continued_on_a_server_with_other_weights(
    own: LM, folder: Path, text: str, tmp_path: Path
) -> None:
    fake, given = Fake("vLLM", own), {"text": text, "lengths": (16,), "repeats": 2, "out": tmp_path / "run"}
    with serving(fake) as url:
        measure(served(url, tokenizer=str(folder)), "full", "perplexity:target_tokens=8", **given)
        measure(served(url, tokenizer=str(folder)), "full", "perplexity:target_tokens=8", **given)
        other = tiny_model()
        torch.nn.init.normal_(other.model.layers[0].mlp.down_proj.weight)
        fake.lm = wrap(other, own.tokenizer, "tiny")
        fake.known.clear()
        with pytest.raises(ValueError, match="scores a sentence differently than when this run began"):
            measure(served(url, tokenizer=str(folder)), "full", "perplexity:target_tokens=8", **given)


def test_the_sentence_that_is_compared_tells_ways_to_split_text_apart() -> None:
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False)
    one_digit, three = (
        pre_tokenizers.Digits(individual_digits=True),
        r"\p{N}{1,3}|[^\r\n\p{L}\p{N}]?\p{L}+|\s*[\r\n]+|\s+",
    )
    ways = (
        bytes_of,
        pre_tokenizers.Sequence([one_digit, bytes_of]),
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(three), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        ),
    )
    found = {tuple(piece for piece, _ in way.pre_tokenize_str(SENTENCE)) for way in ways}
    assert len(found) == len(ways)
