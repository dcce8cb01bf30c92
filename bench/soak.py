"""A server under everything that clients do to one, for minutes: does it leak, does it answer wrongly, does it stop?

    python bench/soak.py [--seconds 300] [--clients 200] [--model tiny] [--seed 0] [any flag of nano_sgl.server]

Starts `python -m nano_sgl.server` with a KV pool of a fifth of the working set (all the distinct tokens that its clients ask for again and
again), in float32. Each client repeats: pick a prompt (beginnings are shared, lengths random) and something to do with it.

    answer     plain or streamed, over /generate, /v1/completions, /v1/chat/completions; greedy, so that the text is known
    sample     temperature, n, logprobs, penalties, stop strings: only the shape of the answer is looked at
    constrain  an output that follows a regex: the same few again and again, and new ones; what has ended must match
    leave      close the connection at once (the request is queued), later (it runs), or after some events of a stream
    slow       read a stream through a small window, a few hundred bytes at a time
    malformed  no JSON, no UTF-8, no HTTP, ids out of range, bodies that are too large or end too early: 4xx, or a closed connection

Violations, each of which makes the exit code 1: an answer that does not come or has a 5xx status (503 with Retry-After is asked for by
--max-queued-requests); malformed input that is not refused; a text that differs from what the same server says alone, or from the plain
engine's (no cache, one request at a time; where the two best logits of the plain engine differ by less than 1e-3, it is a fork, and one in
100,000 tokens may be); requests or KV slots left over, or tokens made for clients that have left; an engine process that was replaced; a
traceback in the log; memory, file descriptors or threads of either process that grow after the warm-up.

--model tiny is a random checkpoint that tests/tiny.py makes; its greedy texts do not repeat. For `demo` give it fewer clients, or more time.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import tiny  # noqa: E402
from nano_sgl import LLM, SamplingParams  # noqa: E402

TIE = 1e-3             # logits nearer than this may be swapped by another order of summation
TOKENS_A_FORK = 100_000
ANSWER_WITHIN_S = 120
GROWTH = 0.04, 12      # memory may grow by this share and so many MiB after the warm-up: allocators are not exact
WINDOWS = (0.3, 0.5), (0.8, 1.0)  # of the time: the warm-up's end, the run's end


@dataclass(frozen=True)
class Prompt:
    """What one request asks, and how much of an answer. Exactly one of ids, messages."""
    number: int
    ids: list[int] | None
    messages: list[dict] | None
    max_tokens: int

    def body(self, path: str, stream: bool, **sampling) -> dict:
        """The greedy request for a route; `sampling` changes it."""
        sampling = {"temperature": 0, "max_tokens": self.max_tokens, "ignore_eos": True, **sampling}
        if path == "/generate":
            return {"input_ids": self.ids, "stream": stream, "sampling_params": sampling}
        return {"prompt": self.ids, "stream": stream, **sampling} if path == "/v1/completions" else {
            "messages": self.messages, "stream": stream, **sampling}

    def path(self, rng: random.Random) -> str:
        return "/v1/chat/completions" if self.messages else rng.choice(["/generate", "/v1/completions"])


def catalogue(count: int, context_len: int, seed: int) -> tuple[list[Prompt], int]:
    """Prompts that share beginnings, ten to each; and the working set: the distinct tokens of all of them and their answers."""
    rng, prompts, tokens = random.Random(seed), [], 0
    longest = context_len // 4
    for group in range(-(-count // 10)):
        shared = [rng.randrange(256) for _ in range(rng.randint(8, longest))]
        tokens += len(shared)
        for number in range(10 * group, min(10 * group + 10, count)):
            own, max_tokens = rng.randint(4, longest), rng.choice([8, 40, 100, 160])
            words = " ".join(str(token) for token in shared[:len(shared) // 4])
            messages = [{"role": "user", "content": f"{words} and {number}"}] if number % 10 > 7 else None
            prompts.append(Prompt(number, None if messages else shared + [rng.randrange(256) for _ in range(own)], messages, max_tokens))
            tokens += own + max_tokens
    return prompts, tokens


# ------------------------------------------------------------------------------------------------------------------------ the server

class Server:
    """`python -m nano_sgl.server` in processes of its own, and what /proc says of them."""

    def __init__(self, model: str, folder: Path, flags: list[str]):
        self.log_file = folder / "server.log"
        command = [sys.executable, "-m", "nano_sgl.server", "--model", model, "--dtype", "float32", "--port", "0", *flags]
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, cwd=ROOT)
        end = time.monotonic() + 300
        while "curl" not in self.log and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        if "curl" not in self.log:
            raise SystemExit(f"the server did not start:\n{self.log}")
        self.url = re.search(r"http://\S+?:\d+", self.log)[0]
        self.pids = {"HTTP": self.process.pid, "engine": self.engine_pid()}

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def engine_pid(self) -> int | None:
        """The process whose parent is the HTTP process; None where there is none."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    return int(stat.parent.name)

    def measure(self) -> dict[str, tuple[float, int, int]]:
        """Per process: MiB of memory, file descriptors, threads."""
        found = {}
        for name, pid in self.pids.items():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                values = [int(re.search(rf"{key}:\s+(\d+)", status)[1]) for key in ("VmRSS", "Threads")]
                found[name] = values[0] / 1024, len(os.listdir(f"/proc/{pid}/fd")), values[1]
        return found

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


# ----------------------------------------------------------------------------------------------------------------------- the clients

@dataclass
class Load:
    """What the clients share, and what they have seen."""
    server: Server
    http: httpx.AsyncClient
    prompts: list[Prompt]
    may_refuse: bool                     # the queue has a limit, so 503 is an answer
    texts: dict[int, collections.Counter] = field(default_factory=lambda: collections.defaultdict(collections.Counter))
    did: collections.Counter = field(default_factory=collections.Counter)
    statuses: collections.Counter = field(default_factory=collections.Counter)
    seconds: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    violations: list[str] = field(default_factory=list)
    samples: list[tuple[float, dict]] = field(default_factory=list)  # (share of the time, Server.measure())

    def wrong(self, what: str) -> None:
        self.violations.append(what)

    def status(self, response: httpx.Response, what: str) -> bool:
        """Whether this is an answer. What is none, and was not asked for, is a violation."""
        self.statuses[response.status_code] += 1
        refused = response.status_code == 503 and self.may_refuse and "retry-after" in response.headers
        if response.status_code != 200 and not refused:
            self.wrong(f"{what}: status {response.status_code}")
        return response.status_code == 200


def text_of(path: str, bodies: list[dict]) -> str:
    """The text of a plain answer (one body) or of a stream's events."""
    if path == "/generate":
        return bodies[-1]["text"]
    choices = [choice for body in bodies for choice in body["choices"]]
    return "".join(c["text"] if "text" in c else (c["delta"] if "delta" in c else c["message"]).get("content", "") for c in choices)


async def answer(load: Load, prompt: Prompt, rng: random.Random) -> None:
    """A greedy answer, whole."""
    path, stream, start = prompt.path(rng), rng.random() < 0.6, time.monotonic()
    body = prompt.body(path, stream)
    if not stream:
        response = await load.http.post(path, json=body)
        if load.status(response, "answer"):
            load.texts[prompt.number][text_of(path, [response.json()])] += 1
    else:
        events, last = [], start
        async with load.http.stream("POST", path, json=body) as response:
            if not load.status(response, "answer"):
                return
            async for line in response.aiter_lines():
                if line:
                    now = time.monotonic()
                    load.seconds["between events" if events else "first event"].append(now - last)
                    events, last = [*events, line[6:]], now
        if events[-1:] != ["[DONE]"] or any("error" in json.loads(event) for event in events[:-1]):
            return load.wrong(f"a stream ended with {events[-1:]}")
        load.texts[prompt.number][text_of(path, [json.loads(event) for event in events[:-1]])] += 1
    load.seconds["whole answer"].append(time.monotonic() - start)


async def sample(load: Load, prompt: Prompt, rng: random.Random) -> None:
    """Everything that is not greedy."""
    path = "/v1/chat/completions" if prompt.messages else "/v1/completions"
    options = rng.choice([{"n": 3, "seed": 5}, {"logprobs": True, "top_logprobs": 3} if prompt.messages else {"logprobs": 3}, {"stop": ["a", " the"]},
                          {"frequency_penalty": 0.5, "top_p": 0.9}, {"top_k": 5, "priority": 3}, {"cache_salt": f"salt {rng.randrange(5)}"}])
    body = prompt.body(path, False, temperature=1.0, **options)
    response = await load.http.post(path, json=body)
    if load.status(response, "sample") and len(response.json()["choices"]) != options.get("n", 1):
        load.wrong(f"{options} gave {len(response.json()['choices'])} choices")


def pattern(rng: random.Random) -> str:
    """A regex, one of a few or one that nobody has sent before."""
    if rng.random() < 0.7:
        return rng.choice([r"(yes|no)[.!]?", r"[a-z]{1,8}( [a-z]{1,8}){0,12}\.", r'\{"a": \d{1,3}(, "b": "[^"\\\n]{0,20}")?\}', r"(\w| ){0,60}"])
    return f"[a-{rng.choice('fkpz')}]{{{rng.randrange(1, 9)},{rng.randrange(9, 40)}}}-{rng.randrange(10**9)}"


async def constrain(load: Load, prompt: Prompt, rng: random.Random) -> None:
    """See above."""
    path, regex = prompt.path(rng), pattern(rng)
    response = await load.http.post(path, json=prompt.body(path, False, temperature=1.0, regex=regex, max_tokens=60))
    if load.status(response, "constrain"):
        body = response.json()
        reason = body["meta_info"]["finish_reason"]["type"] if path == "/generate" else body["choices"][0]["finish_reason"]
        if reason == "stop" and not re.fullmatch(regex, text_of(path, [body])):
            load.wrong(f"an answer does not match {regex!r}")


async def leave(load: Load, prompt: Prompt, rng: random.Random) -> None:
    """Ask, and go before the answer is whole."""
    path, stream = prompt.path(rng), rng.random() < 0.5
    body = prompt.body(path, stream, max_tokens=100, **({"regex": pattern(rng)} if rng.random() < 0.3 else {}))

    async def read() -> None:
        async with load.http.stream("POST", path, json=body) as response:
            seen, enough = 0, rng.randrange(1, 20)
            async for _ in response.aiter_lines():
                if (seen := seen + 1) > enough:
                    return
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), rng.choice([0.002, 0.02, 0.2, 1.0]) * rng.random())


async def slow(load: Load, prompt: Prompt, rng: random.Random) -> None:
    """Read a large stream slowly: nobody else may have to wait for it."""
    path = prompt.path(rng)
    extra = {"return_logprob": True, "top_logprobs_num": 5} if path == "/generate" else {}
    raw = json.dumps({**prompt.body(path, True), **extra}).encode()
    async with connection(load, window=2048) as (reader, writer):
        writer.write(head(path, len(raw)) + raw)
        received, until = b"", time.monotonic() + rng.uniform(0.2, 3)
        while piece := await asyncio.wait_for(reader.read(300 if time.monotonic() < until else 65536), ANSWER_WITHIN_S):
            received += piece
            if time.monotonic() < until:
                await asyncio.sleep(0.02)
        status = int(received[9:12] or 0)
        load.statuses[status] += 1
        if status == 503 and load.may_refuse:
            return
        # A chunk of the transfer encoding holds whole events, so that no line of one is ever cut.
        events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
        if status != 200 or b"data: [DONE]" not in received or any("error" in event for event in events):
            return load.wrong(f"a slow reader got {received[:20]!r}...{received[-60:]!r}")
        load.texts[prompt.number][text_of(path, events)] += 1


MALFORMED = {  # name -> what follows the request line's path: (path, headers, body); None as headers: the bytes as they stand
    "no JSON": ("/v1/completions", "", b'{"prompt": "a", '), "no UTF-8": ("/v1/completions", "", b'{"prompt": "\xff\xfe"}'),
    "deep": ("/generate", "", b'{"text": ' + b"[" * 50_000), "no type": ("/v1/completions", "text/plain", b'{"prompt": "a"}'),
    "negative id": ("/generate", "", b'{"input_ids": [5, -1]}'), "large id": ("/v1/completions", "", b'{"prompt": [99999999]}'),
    "too long": ("/generate", "", json.dumps({"input_ids": [7] * 9000}).encode()), "empty": ("/v1/completions", "", b'{"prompt": ""}'),
    "no messages": ("/v1/chat/completions", "", b'{"messages": []}'), "NaN": ("/v1/completions", "", b'{"prompt": "a", "temperature": NaN}'),
    "n": ("/v1/completions", "", b'{"prompt": "a", "n": 1000000000}'), "unknown": ("/v1/completions", "", b'{"prompt": "a", "tmperature": 1}'),
    "stops": ("/v1/completions", "", json.dumps({"prompt": "a", "stop": ["x"] * 10_000}).encode()), "no route": ("/v2/nothing", "", b"{}"),
    "regex": ("/v1/completions", "", b'{"prompt": "a", "stop_regex": "(((("}'),
    "grammar": ("/v1/completions", "", b'{"prompt": "a", "regex": "a(?=b)"}'),
    "no HTTP": ("", None, b"\x16\x03\x01\x02\x00 hello\r\n\r\n"), "large": ("", None, b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: "
                                                                        b"application/json\r\nContent-Length: 1000000000\r\n\r\n{"),
}


def head(path: str, length: int, kind: str = "application/json") -> bytes:
    """The head of a request whose connection ends with the answer."""
    return f"POST {path} HTTP/1.1\r\nHost: soak\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode()


@contextlib.asynccontextmanager
async def connection(load: Load, window: int | None = None):
    """(reader, writer) of a fresh connection; window: bytes that the system may take in before they are read."""
    sock = socket.socket()
    sock.setblocking(False)
    if window:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    await asyncio.get_running_loop().sock_connect(sock, (load.http.base_url.host, load.http.base_url.port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=window or 65536)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def malformed(load: Load, prompt: Prompt, rng: random.Random) -> None:
    """Something that is no request. Now and then one that only never ends: it is left open for a while."""
    async with connection(load) as (reader, writer):
        if rng.random() < 0.2:
            raw = head("/v1/completions", 1000) + b'{"prompt": "a'
            writer.write(raw[:rng.randrange(1, len(raw))])
            return await asyncio.sleep(rng.random())
        name = rng.choice(sorted(MALFORMED))
        path, kind, raw = MALFORMED[name]
        writer.write(raw if kind is None else head(path, len(raw), kind or "application/json") + raw)
        status = (await asyncio.wait_for(reader.read(12), ANSWER_WITHIN_S))[9:]
        load.statuses[int(status or 0)] += 1
        if status and not status.startswith(b"4"):
            load.wrong(f"malformed ({name}): status {status.decode()}")


ACTS = {answer: 10, sample: 3, constrain: 4, leave: 6, slow: 1, malformed: 3}  # act -> how often


async def client(load: Load, rng: random.Random, end: float) -> None:
    """One client: acts, one after the other."""
    while time.monotonic() < end:
        [act] = rng.choices(list(ACTS), list(ACTS.values()))
        load.did[act.__name__] += 1
        try:
            await act(load, rng.choice(load.prompts), rng)
        except (httpx.HTTPError, OSError, ValueError, LookupError, asyncio.TimeoutError) as error:
            load.wrong(f"{act.__name__}: {error!r}")
        await asyncio.sleep(rng.expovariate(10))


async def watch(load: Load, start: float, seconds: float) -> None:
    """Measure the processes until cancelled."""
    while True:
        load.samples.append(((time.monotonic() - start) / seconds, load.server.measure()))
        await asyncio.sleep(min(1.0, seconds / 50))


# ---------------------------------------------------------------------------------------------------------------------- the verdicts

async def abandon(load: Load) -> None:
    """Ask for as much as fits, and leave at the first word."""
    body = {"input_ids": [7, 8, 9], "stream": True, "sampling_params": {"max_new_tokens": 100_000, "ignore_eos": True}}
    async with load.http.stream("POST", "/generate", json=body) as response:
        await anext(response.aiter_lines())


async def counts(load: Load) -> dict:
    """The engine's own."""
    return (await load.http.get("/get_server_info")).json()["stats"]


async def settle(load: Load, before: dict) -> dict:
    """The load is over: everything must come back, also from twenty more who leave. Returns the server's counts."""
    await asyncio.gather(*(abandon(load) for _ in range(20)))
    made = (await counts(load))["output_tokens"]
    for _ in range(100):
        stats = await counts(load)
        if stats["running"] == stats["waiting"] == 0 and stats["kv_free"] + stats["kv_cached"] == stats["kv_capacity"]:
            break
        await asyncio.sleep(0.1)
    else:
        load.wrong(f"left over: {stats['running']} running, {stats['waiting']} waiting, {stats['kv_free']} free and {stats['kv_cached']} cached "
                   f"of {stats['kv_capacity']} slots")
    if stats["output_tokens"] - made > 20 * 10:
        load.wrong(f"{stats['output_tokens'] - made} tokens were made for twenty clients that had left")
    if load.server.engine_pid() != load.server.pids["engine"]:
        load.wrong("the engine process was replaced")
    await asyncio.sleep(0.5)
    for name, (_, descriptors, threads) in load.server.measure().items():
        if descriptors > before[name][1] + 4 or threads > before[name][2] + 4:
            load.wrong(f"{name}: {before[name][1:]} file descriptors and threads before, {(descriptors, threads)} after")
    return stats


async def empty(load: Load) -> None:
    """/flush_cache must leave every slot free."""
    load.status(await load.http.post("/flush_cache"), "/flush_cache")
    stats = await counts(load)
    if stats["kv_free"] != stats["kv_capacity"]:
        load.wrong(f"after /flush_cache {stats['kv_free']} of {stats['kv_capacity']} slots are free")


def judge_memory(load: Load) -> list[tuple[str, float, float]]:
    """(process, MiB at the end of the warm-up, MiB at the end) each: medians of the two windows."""
    rows = []
    for name in load.server.pids:
        early, late = ([m[name][0] for at, m in load.samples if low <= at <= high and name in m] for low, high in WINDOWS)
        if early and late:
            warm, last = statistics.median(early), statistics.median(late)
            rows.append((name, warm, last))
            if last > warm * (1 + GROWTH[0]) + GROWTH[1]:
                load.wrong(f"{name}: {warm:.0f} MiB when warm, {last:.0f} MiB at the end")
    return rows


async def ask_again(load: Load, numbers: list[int]) -> None:
    """The same server, with nobody else in it."""
    rng = random.Random(0)
    for number in numbers:
        path = load.prompts[number].path(rng)
        response = await load.http.post(path, json=load.prompts[number].body(path, False))
        if load.status(response, "alone"):
            load.texts[number][text_of(path, [response.json()])] += 1


def judge_texts(load: Load, numbers: list[int], model: str) -> tuple[int, int]:
    """Compare with the plain engine. Returns the texts compared and those that forked at a tie."""
    compared = forks = tokens = 0
    with LLM(model, dtype="float32", disable_radix_cache=True, max_running_requests=1) as plain:
        for number in numbers:
            prompt = load.prompts[number]
            ids = prompt.ids if prompt.ids else plain.chat_ids(prompt.messages)
            output = plain.generate(ids, SamplingParams(temperature=0, max_tokens=prompt.max_tokens, ignore_eos=True, logprobs=2))
            for text, count in load.texts[number].items():
                compared, tokens = compared + count, tokens + count * len(output.output_ids)
                if text != output.text:
                    gap = gap_at_fork(output, text, plain.tokenizer)
                    forks += gap < TIE
                    if gap >= TIE:
                        load.wrong(f"prompt {number}: {count} answers {text!r}, plain {output.text!r} (logits {gap:.4f} apart)")
    if forks > max(1, tokens / TOKENS_A_FORK):
        load.wrong(f"{forks} forks in {tokens} tokens")
    return compared, forks


def gap_at_fork(output, text: str, tokenizer) -> float:
    """How far apart the two best tokens are where a text parts from the plain engine's; a character may be several tokens."""
    common = len(os.path.commonprefix([output.text, text]))
    at = next((n for n in range(len(output.output_ids)) if len(tokenizer.decode(output.output_ids[:n + 1])) > common), 0)
    return min(entry.top[0][1] - entry.top[1][1] for entry in output.logprobs[max(at - 3, 0):at + 2])


async def play(server: Server, prompts: list[Prompt], args: argparse.Namespace, flags: list[str]) -> tuple[Load, dict, list]:
    """The load from beginning to end, and the verdicts that need the server."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_WITHIN_S, limits=limits) as http:
        load = Load(server, http, prompts, "--max-queued-requests" in flags)
        await http.get("/health", headers={"Connection": "close"})
        await constrain(load, prompts[0], random.Random(args.seed))  # the first starts the threads that make grammars
        before, start = server.measure(), time.monotonic()
        watching = asyncio.create_task(watch(load, start, args.seconds))
        await asyncio.gather(*(client(load, random.Random(f"{args.seed}/{n}"), start + args.seconds) for n in range(args.clients)))
        watching.cancel()
    async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_WITHIN_S) as load.http:  # the clients' connections are closed by now
        stats = await settle(load, before)
        numbers = sorted(load.texts)
        numbers = sorted(random.Random(args.seed).sample(numbers, min(args.compare, len(numbers))))
        await ask_again(load, numbers)
        await empty(load)
    return load, stats, numbers


def report(load: Load, stats: dict, memory: list, compared: int, forks: int, pool: int, working_set: int) -> str:
    """One table."""
    lines = ["acts           " + "  ".join(f"{name} {count}" for name, count in sorted(load.did.items())),
             "statuses       " + "  ".join(f"{status or 'closed'} {count}" for status, count in sorted(load.statuses.items())),
             f"tokens         prompt {stats['prompt_tokens']}  cached {stats['cached_tokens'] / max(stats['prompt_tokens'], 1):.0%}  "
             f"output {stats['output_tokens']}  retractions {stats['retractions']}  pool {pool} of a working set of {working_set}",
             f"texts          {compared} compared with the plain engine, {forks} forks at a tie"]
    for name, values in load.seconds.items():
        values = sorted(values)
        at = {q: values[min(int(q * len(values)), len(values) - 1)] for q in (0.5, 0.9, 0.99, 0.999)}
        lines.append(f"{name:15}" + "  ".join(f"p{100 * q:g} {1000 * v:.0f} ms" for q, v in at.items()) + f"  max {1000 * values[-1]:.0f} ms")
    for name, warm, last in memory:
        peaks = [max(m[name][i] for _, m in load.samples if name in m) for i in (1, 2)]
        lines.append(f"{name + ' process':15}{warm:.0f} MiB when warm, {last:.0f} MiB at the end; at most {peaks[0]} descriptors, {peaks[1]} threads")
    kinds = collections.Counter(load.violations)
    lines += [f"VIOLATION      {what}{f' ({count} times)' * (count > 1)}" for what, count in kinds.most_common(20)]
    return "\n".join([*lines, f"violations     {len(load.violations) or 'none'}"])


def soak(args: argparse.Namespace, flags: list[str], folder: Path) -> tuple[Load, str]:
    """Run it all. Returns what was seen, and the table."""
    model = args.model
    if model == "tiny":
        model = str(tiny.add_tokenizer(tiny.checkpoint(folder / "tiny")))
    prompts, working_set = catalogue(args.prompts, tiny.SHAPE["max_position_embeddings"], args.seed)
    pool = working_set // 5
    server = Server(model, folder, ["--max-total-tokens", str(pool), "--chunked-prefill-size", "256", *flags])
    try:
        load, stats, numbers = asyncio.run(play(server, prompts, args, flags))
        if "Traceback" in server.log:
            load.wrong(f"a traceback in the log: {server.log[server.log.index('Traceback'):][:2000]}")
    finally:
        server.stop()
    memory = judge_memory(load)
    compared, forks = judge_texts(load, numbers, model)
    return load, report(load, stats, memory, compared, forks, pool, working_set)


def arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the rest: the server's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=300, help="how long the clients go on (300)")
    parser.add_argument("--clients", type=int, default=200, help="how many act at once (200)")
    parser.add_argument("--prompts", type=int, default=200, help="distinct prompts; the pool holds a fifth of their tokens (200)")
    parser.add_argument("--compare", type=int, default=100, help="how many prompts' texts are compared with the plain engine (100)")
    parser.add_argument("--model", default="tiny", help="tiny, demo, or a directory (tiny)")
    parser.add_argument("--seed", type=int, default=0, help="of what the clients do (0)")
    return parser.parse_known_args(argv)


def main() -> int:
    args, flags = arguments()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        load, table = soak(args, flags, Path(folder))
    print(table)
    return bool(load.violations)


if __name__ == "__main__":
    sys.exit(main())
