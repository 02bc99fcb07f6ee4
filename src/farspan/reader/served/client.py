"""Requests to an inference server: refusals, retries and error messages."""

import math
import os
import random
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import count
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from farspan.extras import optional_import

KEYS = ("FARSPAN_API_KEY", "OPENAI_API_KEY")  # environment variables that hold the key; it is never recorded
TRIED_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # statuses of a server that may answer later
FIRST_WAIT = 5.0  # seconds, for the first answer
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0  # seconds
# in errors; TGI: `inputs` must have less than, `inputs` tokens + `max_new_tokens` must be <=
TOO_LONG = re.compile(
    r"(context|allowed|model) (length|size|window)|` must (be <=|have less than)|too (long|many tokens)", re.I
)
TIMEOUTS = 10.0, 600.0  # seconds: to connect, and for one answer; a prompt of 128K tokens takes minutes on a CPU


class ServerError(ValueError):
    """No answer, or one that does not follow the server's protocol."""


class NotServedError(ServerError):
    """A server that lacks the requested path or refuses its arguments."""

    def __init__(self, line: str, status: int = 0) -> None:
        super().__init__(line)
        self.status = status  # of HTTP


class TooLongError(ServerError):
    """More tokens than the server accepts."""


class OtherTokensError(ServerError):
    """An answer about tokens other than those sent."""


class NoTextError(ServerError):
    """Tokens for a server that takes text only, which no text has."""


@dataclass
class Usage:
    """The work of a server for one row."""

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # prefix of the X-Request-Id of all its requests
    requests: int = 0  # answered ones
    prompt_tokens: int = 0  # of all these
    cached_tokens: int | None = 0  # of these, taken from the server's cache; None: it does not report them

    def add(self, prompt: int, cached: int | None) -> None:
        self.prompt_tokens += prompt
        self.cached_tokens = None if cached is None or self.cached_tokens is None else self.cached_tokens + cached


@dataclass
class Client:
    """Sends JSON to one server. Threads may share it.

    Args:
        base_url: such as http://127.0.0.1:8000, with or without /v1.
        wait: seconds to wait for a server that has answered before and cannot be reached or is busy.
        insecure: allow http to machines other than this one.
    """

    base_url: str
    wait: float = 60.0
    insecure: bool = False
    usage: Usage = field(default_factory=Usage)
    answered: bool = False  # at least once; until then, an unreachable server is waited for only briefly
    _sent: Iterator[int] = field(default_factory=count, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def __post_init__(self) -> None:
        self.base_url = self.base_url.rstrip("/").removesuffix("/v1")
        address = urlsplit(self.base_url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ValueError(
                f"base URL {self.base_url!r} is not an address: expected one such as http://127.0.0.1:8000"
            )
        if address.username or address.password:
            raise ValueError(f"the base URL holds a password: remove it, and set {KEYS[0]} instead")
        local = _is_loopback(address.hostname)
        if address.scheme == "http" and not local and not self.insecure:
            raise ValueError(
                f"{self.base_url} would send texts and key unencrypted to another machine: use https, or allow it "
                "(--insecure)"
            )
        key = next((os.environ[name] for name in KEYS if os.environ.get(name)), None)
        self._requests: Any = optional_import("requests", "served")
        self._session = self._requests.Session()
        if local:  # a proxy cannot reach this machine's own addresses
            self._session.trust_env = False
            self._session.verify = os.environ.get("REQUESTS_CA_BUNDLE") or True
        self._session.headers.update({"Authorization": f"Bearer {key}"} if key else {})
        self._session.auth = lambda request: request  # else a .netrc file would replace the key

    def get(self, path: str) -> Any:
        """Return the JSON at a path.

        Raises:
            NotServedError: the server has no such path.
            ServerError: no server, or another answer than JSON.
        """
        return self._send("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send JSON and return the JSON of the answer. Raises the same errors as `get`."""
        return self._send("POST", path, body)

    def count(self, prompt: int, cached: int | None) -> None:
        """Add the tokens of one answered prompt to the usage; `cached`: None if the server does not report them."""
        with self._lock:
            self.usage.add(prompt, cached)

    def take(self) -> Usage:
        """Return the usage since the last call, and start counting for another row."""
        with self._lock:
            taken, self.usage = self.usage, Usage()
        return taken

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        url, pause, end = f"{self.base_url}{path}", FIRST_PAUSE, math.inf
        options = {"json": body, "timeout": TIMEOUTS, "allow_redirects": False}
        while True:
            # servers refuse the id of a request that is still running, such as one that was too slow
            headers = {"X-Request-Id": f"{self.usage.request_id}-{next(self._sent)}"}
            try:
                answer = self._session.request(method, url, headers=headers, **options)
            except self._requests.RequestException as error:
                problem: ServerError = ServerError(self._unreachable(error))
                again = not isinstance(error, self._requests.exceptions.SSLError)
            else:
                if answer.status_code < 300:
                    with self._lock:
                        self.answered = True
                        self.usage.requests += method == "POST"
                    return self._parsed(answer)
                problem = _problem(url, answer)
                again = answer.status_code in TRIED_AGAIN
            # counted from the first failure: a single answer may take longer than `wait`
            end = min(end, time.monotonic() + (self.wait if self.answered else min(FIRST_WAIT, self.wait)))
            left = end - time.monotonic()
            if not again or left <= 0:
                raise problem
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))  # so that many clients do not return together
            pause = min(2 * pause, LONGEST_PAUSE)

    def _unreachable(self, error: Exception) -> str:
        while error.args and isinstance(error.args[0], Exception):  # the cause is wrapped several times
            error = error.args[0]
        what = str(getattr(error, "reason", error)).rpartition(">: ")[2] or type(error).__name__
        if "CERTIFICATE" in what.upper():
            return (
                f"the certificate of {self.base_url} cannot be verified ({what}): name the file of its authority in "
                "REQUESTS_CA_BUNDLE"
            )
        proxy = next((name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")), None)
        through = f" through the proxy of {proxy}" if proxy and self._session.trust_env else ""
        hint = (
            "it was waited for (--wait)" if self.answered else "is it running, and is the address right (--base-url)?"
        )
        return f"no answer from {self.base_url}{through} ({what}): {hint}"

    def _parsed(self, answer: Any) -> Any:
        try:
            return answer.json()
        except ValueError as error:
            kind = "a page of HTML" if "<html" in answer.text[:500].lower() else "no JSON"
            raise ServerError(f"{answer.url} answers with {kind}: is {self.base_url} an inference server?") from error


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name, which may begin with digits
        return False


def _problem(url: str, answer: Any) -> ServerError:
    reason = _reason(answer)
    line = f"{url} answers {answer.status_code}: {reason}"
    if answer.status_code in (401, 403, *TRIED_AGAIN):
        return ServerError(line)
    too_long = answer.status_code == 413 or TOO_LONG.search(reason)  # the former of a proxy before the server
    return TooLongError(line) if too_long else NotServedError(line, answer.status_code)


def _reason(answer: Any) -> str:
    """Return the error message of a server on one line."""
    try:
        found = answer.json()
    except ValueError:
        return "a page of HTML" if "<html" in answer.text[:500].lower() else answer.text.strip()[:200] or "no reason"
    for key in ("error", "message", "detail"):
        found = found.get(key, found) if isinstance(found, dict) else found
    return " ".join(str(found).split())[:300]
