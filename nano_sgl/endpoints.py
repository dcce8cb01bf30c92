"""Endpoints: servers as backends of the language.

    RuntimeEndpoint(url)     a nano_sgl server, over /generate, /score and /hold: everything the engine in this process can, sharing too
    Runtime(model)           the same, in a process of its own that it starts and ends
    OpenAI(model, base_url)  any server that speaks OpenAI's API, completions or chat: what that API has, and whatever of the rest the server takes

                         texts, params              HTTP
      interpreter.py  ------------------> backend --------> server
                      <------------------         <--------
                       Completion: text, finish_reason, meta_info

A program's parameters are SamplingParams by name. RuntimeEndpoint sends them as they are, but for logprobs, which /generate spells otherwise; OpenAI
sends those of OpenAI's API under its names, and the others as further fields of the body, which most servers take and the others refuse by
name: nothing is dropped on the way.

`select` needs the log-probabilities of texts that are given. /score has them. Of OpenAI's API it is completions with `echo` and no new tokens that
has (here, in vLLM, in llama.cpp); a chat API has none, so there it is refused.

Invariant: a call either returns what was asked for or raises EndpointError with the server's own words. Both classes may be used by many threads.
Cost: a connection a thread, kept open. `usage` counts calls and tokens, and the calls that API speculative execution made needless. Stops holding: no
retries; a server that is busy says so, and that is an error here.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from .choices import Score, Token
from .ir import Image, Video

COMPLETES = ("instruct", "davinci", "babbage")    # what the names of models say that have no chat API
LOGPROB_PARAMS = ("logprobs", "prompt_logprobs", "logprob_start_len")
CONNECT_S = 10.0
POLL_S, STOP_S = 0.2, 20.0     # how often a server that starts is asked whether it is there, and how long one may take to end


class EndpointError(RuntimeError):
    """A server refused, failed, or is not there."""


@dataclass
class Completion:
    """What came back for one sample, or a piece of it."""

    text: str
    finish_reason: str | None
    meta_info: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class _Server:
    """A server, and what it has been asked. `usage`: calls, prompt_tokens, completion_tokens, cached_tokens, saved_calls."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float | None, verify: str | bool = True):
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"a server's address begins with http:// or https://, got {base_url!r}")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.base_url = base_url.rstrip("/")
        self._client = httpx.Client(headers=headers, verify=verify, timeout=httpx.Timeout(timeout_s, connect=CONNECT_S),
                                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=128))
        self.usage: Counter[str] = Counter()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def count_saved(self, calls: int) -> None:
        """So many gens were answered by a call that was made for another one."""
        self._count(saved_calls=calls)

    def _count(self, **more: int) -> None:
        with self._lock:
            self.usage.update(more)

    def _failed(self, error: Exception) -> EndpointError:
        return EndpointError(f"{self.base_url}: {type(error).__name__}: {error or 'no answer'}; is the server there?")

    @staticmethod
    def _refused(answer: httpx.Response) -> EndpointError:
        try:
            said = answer.json()["error"]
            said = said["message"] if isinstance(said, dict) else str(said)
        except Exception:
            said = answer.text[:500]
        return EndpointError(f"{answer.request.url} answered {answer.status_code}: {said}")

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        try:
            answer = self._client.request(method, self.base_url + path, json=body)
        except httpx.HTTPError as error:
            raise self._failed(error) from error
        if answer.status_code >= 400:
            raise self._refused(answer)
        try:
            return answer.json()
        except json.JSONDecodeError:
            return answer.text

    def _events(self, path: str, body: dict) -> Iterator[dict]:
        """Server-sent events, each of them JSON. Leaving the iterator closes the connection, which ends the request."""
        try:
            with self._client.stream("POST", self.base_url + path, json=body) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    raise self._refused(answer)
                for line in answer.iter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        event = json.loads(data)
                        if "error" in event:
                            said = event["error"]
                            raise EndpointError(said["message"] if isinstance(said, dict) else str(said))
                        yield event
        except httpx.HTTPError as error:
            raise self._failed(error) from error


class RuntimeEndpoint(_Server):
    """A nano_sgl server. api_key: where it wants one. verify: its certificate, or a file of those to trust. timeout_s: for an answer; None: as long
    as it takes."""

    def __init__(self, base_url: str, api_key: str | None = None, verify: str | bool = True, timeout_s: float | None = None):
        super().__init__(base_url, api_key, timeout_s, verify)
        self._info: dict[str, Any] | None = None

    @property
    def model_info(self) -> dict[str, Any]:
        """What the server says of its model."""
        if self._info is None:
            self._info = self._ask("GET", "/get_model_info")
        return self._info

    def get_server_info(self) -> dict[str, Any]:
        """What the server says of itself."""
        return self._ask("GET", "/get_server_info")

    def flush_cache(self) -> bool:
        """Empty its cache."""
        self._ask("POST", "/flush_cache")
        return True

    def chat_roles(self) -> dict[str, Any]:
        """What its model's template writes around messages."""
        return {role: tuple(texts) if isinstance(texts, list) else texts for role, texts in self.model_info["chat_roles"].items()}

    def generate(self, prompts: list[str], params: list[dict[str, Any]], *, parent: str = "", rid: str = "") -> list[Completion]:
        """See interpreter.Backend."""
        found = self._ask("POST", "/generate", self._body(prompts, params, parent, rid))
        made = [self._completion(item) for item in (found if isinstance(found, list) else [found])]
        self._used({**made[0].meta_info, "completion_tokens": sum(item.meta_info.get("completion_tokens", 0) for item in made)})
        return made

    def abort(self, rid: str) -> None:
        """See interpreter.Backend."""
        self._ask("POST", "/abort_request", {"rid": rid})

    def stream(self, prompt: str, params: dict[str, Any], *, parent: str = "", rid: str = "") -> Iterator[Completion]:
        """See interpreter.Backend."""
        sent, last = 0, {}
        for event in self._events("/generate", {**self._body(prompt, params, parent, rid), "stream": True}):
            piece, last = self._completion(event), event["meta_info"]
            piece.text, sent = piece.text[sent:], len(piece.text)
            yield piece
        self._used(last)

    def score(self, prefix: str, choices: list[str], *, unconditional: bool = False, parent: str = "") -> list[Score]:
        """See interpreter.Backend."""
        body = {"text": prefix, "choices": choices, "unconditional": unconditional, **({"parent": parent} if parent else {})}
        found = self._ask("POST", "/score", body)
        details = found["usage"].get("prompt_tokens_details") or {}
        self._count(calls=1, prompt_tokens=found["usage"].get("prompt_tokens", 0), cached_tokens=details.get("cached_tokens", 0))
        return [Score(s["text"], list(map(Token, s["token_ids"], s["logprobs"])),
                      None if s["unconditional_logprobs"] is None else list(map(Token, s["token_ids"], s["unconditional_logprobs"])))
                for s in found["scores"]]

    def hold(self, prefix: str, children: int, parent: str = "") -> str:
        """See interpreter.Backend."""
        return self._ask("POST", "/hold", {"text": prefix, "children": children, **({"parent": parent} if parent else {})})["hold"]

    def release(self, hold: str) -> None:
        """See interpreter.Backend."""
        self._ask("POST", "/abort_request", {"rid": hold})

    def _body(self, prompt: str | list[str], params: Any, parent: str, rid: str) -> dict[str, Any]:
        each = params if isinstance(params, list) else [params]
        logprobs = [p.get("logprobs") for p in each]
        body = {"text": prompt, "sampling_params": [{k: v for k, v in p.items() if k not in LOGPROB_PARAMS} for p in each]}
        if any(n is not None for n in logprobs):
            body |= {"return_logprob": [n is not None for n in logprobs], "top_logprobs_num": [n or 0 for n in logprobs],
                     "logprob_start_len": [p.get("logprob_start_len", 0) if "prompt_logprobs" in p else -1 for p in each],
                     "return_text_in_logprobs": True}
        if not isinstance(prompt, list):
            body = {name: value[0] if isinstance(value, list) else value for name, value in body.items()}
        return {**body, **({"parent": parent} if parent else {}), **({"rid": rid} if rid else {})}

    @staticmethod
    def _completion(item: dict) -> Completion:
        meta = item["meta_info"]
        reason = meta.get("finish_reason") or {}
        return Completion(item["text"], reason.get("type"), meta, reason.get("message"))

    def _used(self, meta: dict) -> None:
        self._count(calls=1, **{name: meta.get(name, 0) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")})


class Runtime(RuntimeEndpoint):
    """A nano_sgl server of one's own: a process that lives until `shutdown`, or until this program ends. flags: the server's, with underscores."""

    def __init__(self, model_path: str = "demo", *, port: int | None = None, start_timeout_s: float = 600.0, **flags: Any):
        if port is None:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
        options = {"model": model_path, "host": "127.0.0.1", "port": port, **flags}
        command = [sys.executable, "-m", "nano_sgl.server"]
        for name, value in options.items():
            command += [] if value is False else [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        self._log = tempfile.TemporaryFile()        # noqa: SIM115 (as long as the process)
        self._process = subprocess.Popen(command, stderr=self._log)
        self._stop = weakref.finalize(self, _stop_process, self._process)
        super().__init__(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + start_timeout_s
        while True:
            if self._process.poll() is not None:
                raise EndpointError(f"the server ended with code {self._process.returncode}: {' '.join(command)}\n{self.log(10)}")
            if time.monotonic() > deadline:
                self.shutdown()
                raise EndpointError(f"the server was not ready after {start_timeout_s:g} s: {' '.join(command)}")
            try:
                if self._client.get(self.base_url + "/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(POLL_S)

    def log(self, lines: int = 100) -> str:
        """The last lines that the server has logged."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-lines:])

    def shutdown(self) -> None:
        """End the server."""
        self.close()
        self._stop()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()


def _stop_process(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class OpenAI(_Server):
    """A server that speaks OpenAI's API. is_chat_model: whether to use /v1/chat/completions; otherwise it is /v1/completions; None: as the name of
    the model sounds. api_key: without it, what OPENAI_API_KEY says."""

    def __init__(self, model_name: str, is_chat_model: bool | None = None, base_url: str = "https://api.openai.com/v1", api_key: str | None = None,
                 timeout_s: float | None = None):
        super().__init__(base_url, api_key or os.environ.get("OPENAI_API_KEY"), timeout_s)
        self.model_name = model_name
        self.is_chat_model = not any(word in model_name for word in COMPLETES) if is_chat_model is None else is_chat_model

    @property
    def _path(self) -> str:
        return "/chat/completions" if self.is_chat_model else "/completions"

    def generate(self, prompts: list[Any], params: list[dict[str, Any]], *, parent: str = "") -> list[Completion]:
        """See interpreter.Backend; a chat model's prompts are lists of messages."""
        made = []
        for prompt, given in zip(prompts, params):
            found = self._ask("POST", self._path, self._body(prompt, given))
            usage = found.get("usage") or {}
            self._count(calls=1, prompt_tokens=usage.get("prompt_tokens", 0), completion_tokens=usage.get("completion_tokens", 0),
                        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
            made += [self._completion(choice, usage) for choice in found["choices"]]
        return made

    def stream(self, prompt: Any, params: dict[str, Any], *, parent: str = "") -> Iterator[Completion]:
        """See interpreter.Backend."""
        self._count(calls=1)
        usage: dict[str, Any] = {}
        for event in self._events(self._path, {**self._body(prompt, params), "stream": True, "stream_options": {"include_usage": True}}):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text = (choice["delta"].get("content") or "") if self.is_chat_model else choice["text"]
                yield Completion(text, choice.get("finish_reason"), {"finish_reason": {"type": choice.get("finish_reason")}, **usage})
        self._count(**{name: usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")})

    def score(self, prefix: str, choices: list[str], *, unconditional: bool = False, parent: str = "") -> list[Score]:
        """Scores of texts by `echo`: one call. See interpreter.Backend."""
        if self.is_chat_model:
            raise EndpointError("select needs the log-probabilities of texts, which a chat API has not; use OpenAI(..., is_chat_model=False)")
        prompts = [prefix + choice for choice in choices] + (list(choices) if unconditional else [])
        body = {"model": self.model_name, "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
        found = self._ask("POST", self._path, body)
        usage = found.get("usage") or {}
        self._count(calls=1, prompt_tokens=usage.get("prompt_tokens", 0))
        lists = [choice["logprobs"] for choice in sorted(found["choices"], key=lambda c: c["index"])]
        # the first token that reaches beyond the prefix, of any choice: what is before it is the same in all
        base = min(max((i for i, at in enumerate(got["text_offset"]) if at <= len(prefix)), default=0) for got in lists[:len(choices)])
        ids: dict[str, int] = {}        # there are none in this API: a token's text stands for it

        def tokens(got: dict) -> list[Token]:
            return [Token(ids.setdefault(text, len(ids)), logprob) for text, logprob in zip(got["tokens"], got["token_logprobs"])]
        alone = [tokens(got) for got in lists[len(choices):]] or [None] * len(choices)
        return [Score(choice, tokens(got)[base:], other) for choice, got, other in zip(choices, lists, alone)]

    def _body(self, prompt: Any, params: dict[str, Any]) -> dict[str, Any]:
        body = {"model": self.model_name, "messages" if self.is_chat_model else "prompt": prompt}
        for name, value in params.items():
            match name:
                case "logprobs":
                    body |= {"logprobs": True, "top_logprobs": value} if self.is_chat_model else {"logprobs": value}
                case "prompt_logprobs" | "logprob_start_len":
                    raise EndpointError(f"{name}: OpenAI's API has no log-probabilities of prompts")
                case "json_schema":
                    schema = json.loads(value) if isinstance(value, str) else value
                    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
                case "json_object":
                    body["response_format"] = {"type": "json_object"}
                case _:
                    body[name] = value
        return body

    def _completion(self, choice: dict, usage: dict) -> Completion:
        text = (choice["message"].get("content") or "") if self.is_chat_model else choice["text"]
        return Completion(text, choice["finish_reason"], {"finish_reason": {"type": choice["finish_reason"]}, **usage,
                                                          **({"logprobs": choice["logprobs"]} if choice.get("logprobs") else {})})

    def picture(self, node: Image) -> Sequence[dict]:
        """A picture, or a film with the number of its frames, as the content parts of a message; films in the form of vLLM and SGLang."""
        url, usual = node.source, "video/mp4" if isinstance(node, Video) else "image/png"
        if not (isinstance(url, str) and url.startswith(("http://", "https://", "data:"))):
            data = url if isinstance(url, bytes) else Path(url).read_bytes()
            kind = usual if isinstance(url, bytes) else mimetypes.guess_type(str(url))[0] or usual
            url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
        if isinstance(node, Video):
            return [{"type": "video_url", "video_url": {"url": url, "num_frames": node.num_frames}}]
        return [{"type": "image_url", "image_url": {"url": url}}]


def _demo() -> None:
    """A server of a few lines, and what the two of them send to it."""
    import http.server

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            print(f"{self.path:12} {json.dumps(body)}")
            choice = {"index": 0, "text": " Paris", "finish_reason": "stop"}
            found = {"choices": [choice]} if "model" in body else [{"text": " Paris", "meta_info": {"finish_reason": {"type": "stop"}}}]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for backend in (RuntimeEndpoint(url), OpenAI("demo", False, url)):
            print(backend.generate(["The capital of France is"], [{"max_tokens": 4, "regex": " [A-Z][a-z]+", "logprobs": 1}])[0].text)
            backend.close()
        server.shutdown()


if __name__ == "__main__":
    _demo()
