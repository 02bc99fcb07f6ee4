"""Fake servers: the answers of vLLM, SGLang, llama-server and others from a model in this process, and their faults."""

import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

MODEL = "tiny"
BLOCK = 16  # tokens of vLLM's cache


class Fake:
    """An engine's answers. `faults` names what it does wrong; `requests` counts what it was asked."""

    def __init__(self, engine: str, lm: Any, limit: int = 512, **faults: Any) -> None:
        self.engine, self.lm, self.limit, self.faults = engine, lm, limit, faults
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.seen: list[list[int]] = []  # prompts in the prefix cache
        self.known: dict[tuple[int, ...], torch.Tensor] = {}  # logits of prompts
        self.lock = threading.Lock()
        self.at_once = self.most_at_once = 0  # requests
        self.failures = faults.get("failures", 0)
        self.failing_after: float = faults.get("failing_after", math.inf)  # requests
        self.closed = False

    def cached(self, prompt: list[int], salt: str = "") -> int:
        """Return the tokens of a prompt that were there already; the last is always computed."""
        key = [hash(salt) if salt else 0, *prompt]
        longest = max((_common(key, one) for one in self.seen), default=0) - 1
        self.seen.append(key)
        return max(0, min(longest, len(prompt) - 1))

    def logits(self, prompt: list[int]) -> torch.Tensor:
        if (key := tuple(prompt)) not in self.known and self.faults.get("words"):  # the same ones, again and again
            words = self.lm.tokenizer(" the lazy dog jumps over the quick fox", add_special_tokens=False)["input_ids"]
            after = dict(zip(words, [*words[1:], words[0]], strict=True))
            likeliest = torch.tensor([after.get(one, words[0]) for one in prompt])
            self.known[key] = torch.nn.functional.one_hot(likeliest, self.lm.vocabulary).float().log_softmax(-1)
        if key not in self.known:
            with torch.no_grad():
                self.known[key] = self.lm.model(input_ids=torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        self.known[key][:, self.faults.get("impossible", [])] = -math.inf
        return self.known[key]

    def sent(self, logprob: torch.Tensor) -> float | None:
        """Return a log-probability as the engine writes it: JSON has no infinity."""
        instead = {"vLLM": -9999.0, "SGLang": None, "llama-server": torch.finfo(torch.float32).min}
        return float(logprob) if logprob.isfinite() else instead[self.engine]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return status and JSON."""
        if path == "/v1/models":
            about = {"id": MODEL}
            if self.engine in ("vLLM", "SGLang") and not self.faults.get("old"):
                about["max_model_len"] = self.limit
            if self.engine == "llama-server":
                about["meta"] = {"n_vocab": self.faults.get("n_vocab", self.lm.vocabulary)}
            about |= self.faults.get("about", {})
            others = [{"id": f"{MODEL}-{number}"} for number in range(1, self.faults.get("models", 1))]
            return 200, {"object": "list", "data": [about, *others, *self.faults.get("listed", [])]}
        if path == "/props" and self.engine == "llama-server":
            return 200, self.faults.get("props", {"default_generation_settings": {"n_ctx": self.limit}})
        if path == "/get_server_info" and self.engine == "SGLang":
            seeds = {"enable_deterministic_inference": self.faults.get("seeds", False)}
            if self.faults.get("old"):
                return 200, {"context_length": self.limit, **seeds}
            longest = self.faults.get("pool", self.limit) - 6  # tokens of keys, less what it reserves
            return 200, {"context_length": None, "max_req_input_len": longest, **seeds}
        if path == "/tokenize" and self.engine in ("vLLM", "llama-server"):
            ids = self.lm.tokenizer(body.get("prompt") or body.get("content"), add_special_tokens=False)["input_ids"]
            return 200, {"tokens": [(id + self.faults.get("shift", 0)) % self.lm.vocabulary for id in ids]}
        if self.engine == "vLLM" and path == "/v1/completions":
            return self.vllm(body)
        if self.engine == "SGLang" and path == "/generate":
            return self.sglang(body)
        if self.engine == "llama-server" and path == "/completion":
            return 200, self.llama(body)
        if self.engine in ("completions", "text", "llama-server") and path == "/v1/completions":
            return self.completions(body)
        if self.engine == "chat" and path == "/v1/chat/completions":
            return 400, {"error": {"message": "messages: field required"}}
        return 404, {"error": {"message": f"no {path}"}}

    def vllm(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt = body["prompt"]
        if len(prompt) > self.faults.get("proxied_up_to", math.inf):  # tokens of a request's largest size
            return 413, "<html><h1>413 Request Entity Too Large</h1></html>"
        if len(prompt) + body["max_tokens"] > self.faults.get("refused_above", self.limit):
            error = f"This model's maximum context length is {self.limit} tokens. However, you requested more."
            return 400, {"error": {"message": error, "type": "BadRequestError"}}
        cached = 0
        if salt := self.faults.get("forced"):  # reads its cache where log-probabilities are asked for, too
            cached = self.cached(prompt, "" if salt == "unsalted" else body.get("cache_salt", "")) // BLOCK * BLOCK
        found = self.logits(prompt)
        entries: list[Any] = [None]
        for i, token in enumerate(prompt[1:]):
            if i + 1 < cached:  # what its memory held
                entries.append({str(token): {"logprob": -1000.0 * torch.rand(()).item(), "rank": 1}})
                continue
            best = found[i].topk(body.get("prompt_logprobs") or 1)
            entries.append({str(int(one)): {"logprob": self.sent(found[i, one]), "rank": 1} for one in best.indices})
            rank = int((found[i] >= found[i, token]).sum())  # of tied ones, the last
            named = token if not self.faults.get("other_ids") else token + 1
            entries[-1][str(named)] = {"logprob": self.sent(found[i, token]), "rank": rank}
        if self.faults.get("echo") == "ignored":
            entries = entries[-1:]
        new = self.new(prompt, body)
        choice = {"text": self.text(prompt, new), "prompt_logprobs": entries, "token_ids": new}
        choice |= {"finish_reason": self.ended(new, body), "stop_reason": self.own_stop(new)}
        if not body.get("prompt_logprobs"):
            del choice["prompt_logprobs"]
        if self.faults.get("no_ids"):
            del choice["token_ids"]
        if body.get("echo"):
            scores = [self.sent(found[i, token]) for i, token in enumerate(prompt[1:])]
            choice["logprobs"] = {"token_logprobs": [None, *scores]}
        usage: dict[str, Any] = {"prompt_tokens": len(prompt)}
        if not self.faults.get("silent"):
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return 200, {"choices": [choice], "usage": usage}

    def text(self, prompt: list[int], new: list[int]) -> str:
        decode = self.lm.tokenizer.decode
        shifted = [(one + self.faults.get("other_words", 0)) % self.lm.vocabulary for one in new]
        return str(decode([prompt[-1], *shifted])[len(decode([prompt[-1]])) :])

    def new(self, prompt: list[int], body: dict[str, Any]) -> list[int]:
        tokens = list(prompt)
        most = min(body.get("max_tokens", body.get("n_predict", 1)), self.faults.get("most_new", math.inf))
        stop = {*body.get("stop_token_ids", ()), self.faults.get("own_stop")}
        named = "repeat_penalty" if self.engine == "llama-server" else "repetition_penalty"
        penalty = body.get(named, self.faults.get("penalty", 1.0))  # of a generation_config.json, unless sent
        presence = body.get("presence_penalty", self.faults.get("presence", 0.0))  # of a server's command, unless sent
        greedy = "temperature" in body.get("samplers", self.faults.get("samplers", ["temperature"]))
        while len(tokens) < len(prompt) + most:
            logits = self.logits(tokens)[-1].clone()
            logits[list(set(tokens))] *= penalty  # log-probabilities are negative
            logits[list(set(tokens))] -= presence
            tokens.append(int(logits.argmax() if greedy else logits.argmin()))
            if tokens[-1] in stop:
                break
        return tokens[len(prompt) :]

    def own_stop(self, new: list[int]) -> int | None:
        """Return the stop token that the model has besides the tokenizer's, if an answer ends with it."""
        return new[-1] if new[-1] == self.faults.get("own_stop") else None

    def ended(self, new: list[int], body: dict[str, Any]) -> str:
        """Return why an answer ended."""
        stopped = self.own_stop(new) is not None or new[-1] in body.get("stop_token_ids", ())
        return "stop" if stopped else self.faults.get("reason", "length")

    def sglang(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        prompt, first = body["input_ids"], body.get("logprob_start_len", 0)
        if len(prompt) >= (longest := self.faults.get("refused_above", self.faults.get("pool", self.limit) - 6)):
            error = f"Input length ({len(prompt)} tokens) exceeds the maximum allowed length ({longest} tokens)."
            return 400, {"error": {"message": f"{error} Use a shorter input or enable --allow-auto-truncate."}}
        cached = min(self.cached(prompt), first)
        meta: dict[str, Any] = {"prompt_tokens": len(prompt), "cached_tokens": cached}
        if body.get("return_logprob"):
            found = self.logits(prompt)
            entries: list[Any] = [[None, prompt[first], None]]
            top: list[Any] = [None]
            for i in range(first + 1, len(prompt)):
                score = self.sent(found[i - 1, prompt[i]])
                entries.append([score, prompt[i] + self.faults.get("other_ids", 0), None])
                best = found[i - 1].topk(body["top_logprobs_num"])
                top.append([[self.sent(value), int(id), None] for value, id in zip(*best, strict=True)])
            meta |= {"input_token_logprobs": entries, "input_top_logprobs": top}
        new = self.new(prompt, {"max_tokens": body["sampling_params"]["max_new_tokens"], **body["sampling_params"]})
        meta["finish_reason"] = {"type": self.ended(new, body["sampling_params"]), "matched": self.own_stop(new)}
        return 200, {"text": self.text(prompt, new), "output_ids": new, "meta_info": meta}

    def llama(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["prompt"][-self.faults.get("cuts_to", self.limit) :]
        cached, found = self.cached(prompt), self.logits(prompt)[-1]
        top = [{"id": int(i), "logprob": self.sent(found[i])} for i in found.topk(body.get("n_probs", 0)).indices]
        probabilities = {"completion_probabilities": [{"id": top[0]["id"], "top_logprobs": top}]} if top else {}
        timings = {"prompt_n": len(prompt) - cached, "cache_n": cached}
        new = self.new(prompt, body)
        answer = {"content": self.text(prompt, new), "tokens": new, "timings": timings, **probabilities}
        answer |= {"tokens_evaluated": len(prompt), "stop_type": "eos" if self.own_stop(new) else "limit"}
        if self.faults.get("no_ids"):
            del answer["tokens"]
        return answer

    def completions(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        prompt = body["prompt"]
        if self.engine == "text" and not isinstance(prompt, str):
            return 422, {"error": "prompt: invalid type: sequence, expected a string"}
        if self.engine == "text" and body.get("top_p") == 1.0:  # as TGI does
            return 422, {"error": "Input validation error: `top_p` must be > 0.0 and < 1.0"}
        if isinstance(prompt, str):
            prompt = self.lm.tokenizer(prompt)["input_ids"]
        if len(prompt) >= (most := self.faults.get("refused_above", math.inf)):  # as TGI does
            return 422, {
                "error": f"Input validation error: `inputs` must have less than {most} tokens. Given: {len(prompt)}"
            }
        new = self.new(prompt, body)
        text = self.text(prompt, new)
        choice: dict[str, Any] = {"text": text.strip() if self.faults.get("strips") else text}
        choice["finish_reason"] = "length"
        if self.faults.get("named_ids"):
            choice["logprobs"] = {"tokens": [f"token_id:{new[0]}"], "top_logprobs": [{}]}
        count = 0 if self.faults.get("uncounted") else len(new)
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": count}}


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@contextmanager
def serving(fake: Fake, *, certificate: Path | None = None) -> Iterator[str]:
    """Yield the base URL of a fake server on loopback; `certificate`: a file with it and its key, for https."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # which holds a body back for 40 ms, until its headers are acknowledged

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.reply({})

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: dict[str, Any]) -> None:
            with fake.lock:
                fake.at_once += 1
                fake.most_at_once = max(fake.most_at_once, fake.at_once)
            time.sleep(fake.faults.get("slow", 0.0))
            with fake.lock:
                fake.at_once -= 1
                if fake.closed:
                    self.close_connection = True
                    return
                fake.requests.append((self.path, body, dict(self.headers)))
                late = len(fake.requests) > fake.failing_after
                if (fake.failures or late) and self.path not in ("/v1/models",):
                    fake.failures -= not late
                    status, found = fake.faults.get("failure", (429, {"error": "too many requests"}))
                elif "page" in fake.faults:
                    status, found = fake.faults["page"]
                else:
                    status, found = fake.answer(self.path, body)
            kind, sent = ("application/json", json.dumps(found)) if not isinstance(found, str) else ("text/html", found)
            cut = fake.faults.get("cut") and status == 200 and "completion" in self.path
            if cut:
                fake.faults["cut"] -= 1
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent.encode()[: len(sent) // 2 if cut else None])
            if cut:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http{'s' if certificate else ''}://127.0.0.1:{server.server_port}"
    finally:
        fake.closed = True  # also for connections that are still open
        server.shutdown()
        server.server_close()


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Use another hub."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", address)


def closed_hub(monkeypatch: pytest.MonkeyPatch) -> str:
    """Use a hub that cannot be reached, return its address, and fail where a request to it is repeated."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
    use_hub(monkeypatch, address)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("a request is repeated"))
    return address
