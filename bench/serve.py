"""Our server and its peers, in turn on the same workloads, in one table: rates, their ratio, and what share of the machine's floor they are.

    python bench/serve.py [--workloads a,b,c,d,e,f,s,p] [--scale 1.0] [--seeds 1,2] [--rounds 1] [--concurrency 16] [--model demo]
        [--ours-args '--page-size 16'] [--peer NAME COMMAND] [--fields NAME JSON] [--out FILE]

A peer is any server with OpenAI's /v1/completions, given as the command that starts it in the foreground. {model} (a directory) and {port} in it are
replaced, variables may stand in front; it runs in the repository's root, without a shell:

    python bench/serve.py --rounds 3 --fields vllm '{"seed": null}' --peer vllm 'VLLM_CPU_KVCACHE_SPACE=2 VLLM_CPU_OMP_THREADS_BIND=0-1
        LD_PRELOAD=vllm/lib/libiomp5.so vllm/bin/python -m vllm.entrypoints.openai.api_server --model {model} --port {port} --dtype bfloat16
        --max-model-len 4096 --enable-prompt-tokens-details'

(vLLM leaves a core idle unless it is bound to all.) --fields says what a peer is sent instead of, or beside, what ours is: null leaves a field out
(vLLM on a CPU dies of a seed; not every server knows ignore_eos), the word {schema} as a value is the bare JSON schema (llama-server: '{"response_format": null, "json_schema": "{schema}"}').

The workloads are those of workloads.py. One server runs at a time, since an idle one may still spin. A round starts each engine in turn and plays
every workload once a seed: another seed is other text, so that nothing is known from before. Two requests of other text warm a workload up.
Requests are streamed, greedy (`e` is not) and go on to max_tokens, at most --concurrency at once (s and p: one), each on a connection of its own.

The table holds medians over rounds and seeds. `TTFT` is the time to the first text, `TPOT` from there to the last, per token after the first, in ms,
p50/p99. `ours/it` is our rate divided by that engine's, pair by pair of runs (lowest and highest in brackets): requests a second, for s a stream's
tokens a second, for p prompt tokens a second. `of floor`: the floor's seconds divided by the measured ones (see cpu.floor_seconds; its weights have
--dtype, so int8 may beat it). `same`: in how many of the greedy requests its text is ours. --out takes every single result, as a line of JSON.
"""

import argparse
import asyncio
import bisect
import contextlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import cpu
import msgspec
import torch
from tokenizers import Tokenizer
from workloads import ALONE, WORKLOADS, Request, build, ideal_work

from nano_sgl import weights
from nano_sgl.model import ARCHITECTURES, ModelConfig, resolve_dtype

ROOT = Path(__file__).resolve().parent.parent
OURS = "nano_sgl"
START_WITHIN_S = ANSWER_WITHIN_S = 900
RATES = {"s": "decode_tok_s", "p": "prompt_tok_s"}  # by which engines are compared; on the other workloads req_s


# ------------------------------------------------------------------------------------------------------------------------ the engines

@dataclass
class Engine:
    """How a server is started, and what it is sent that others are not."""
    name: str
    command: str
    fields: dict = field(default_factory=dict)

    def body(self, model: str, request: Request, prompt: str) -> dict:
        """The body of a request."""
        schema = request.schema
        body = {"model": model, "prompt": prompt, "max_tokens": request.max_tokens, "temperature": request.temperature, "seed": request.seed,
                "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": None if schema else True,
                "response_format": {"type": "json_schema", "json_schema": {"name": "card", "schema": schema}} if schema else None}
        wanted = {key: schema if value == "{schema}" else value for key, value in (body | self.fields).items()}
        return {key: value for key, value in wanted.items() if value is not None}


class Failed(Exception):
    """A server that cannot be measured: why, for the table."""


class Server:
    """An engine's processes, while a `with` lasts."""

    def __init__(self, engine: Engine, model: Path, folder: Path):
        self.log_file = folder / f"{engine.name}.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = [word.replace("{model}", str(model)).replace("{port}", str(self.port)) for word in shlex.split(engine.command)]
        variables = list(itertools.takewhile(re.compile(r"[A-Za-z_]\w*=").match, words))
        env = os.environ | dict(variable.split("=", 1) for variable in variables)
        try:
            with self.log_file.open("w") as log:
                self.process = subprocess.Popen(words[len(variables):], env=env, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        except OSError as error:
            raise Failed(f"cannot be started: {error}") from None

    def __enter__(self) -> "Server":
        try:
            self.model = self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> str:
        """The name of the served model, once a token has been made of it: some servers list a model that they are still loading."""
        end = time.monotonic() + START_WITHIN_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                name = json.loads(self.call("/v1/models"))["data"][0]["id"]
                self.call("/v1/completions", {"model": name, "prompt": "Hello", "max_tokens": 1})
                return name
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    raise Failed(f"does not know what a completion is: {error.url} answers {error.code} {error.read()[:300]!r}") from None
            except OSError:
                pass
            time.sleep(0.2)
        raise Failed(f"did not start; {self.last_words()}")

    def call(self, path: str, body: dict | None = None) -> bytes:
        """GET, or POST of a body. OSError where no good answer comes."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read()

    def last_words(self) -> str:
        """Whether it runs, and the end of its log."""
        code = self.process.poll()
        return (f"{'it still runs' if code is None else f'its exit code is {code}'}, its log ends with:\n"
                f"{self.log_file.read_text(errors='replace').strip()[-1500:]}")

    def __exit__(self, *_) -> None:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(self.process.pid, number)
                    self.process.wait(20)
        finally:  # also for children that it may have left, and where somebody pressed Ctrl-C once more
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


# ------------------------------------------------------------------------------------------------------------------------- the client

@dataclass
class Answer:
    """What came of a request. Times in seconds; tpot is None where there is one token."""
    prompt: str
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    ttft: float = 0.0
    tpot: float | None = None
    error: str | None = None


class Exchange(asyncio.Protocol):
    """A request and its response. What arrives is kept with its time and read when all is there: the client must leave the cores to the server."""

    def __init__(self, request: bytes):
        self.request, self.pieces, self.done = request, [], asyncio.get_running_loop().create_future()

    def connection_made(self, transport) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(self.pieces)


async def ask(port: int, body: dict) -> Answer:
    """Send a completion request; its answer, or what went wrong."""
    raw, answer, start = msgspec.json.encode(body), Answer(body["prompt"]), time.perf_counter()
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
            "Connection: close\r\n\r\n").encode()
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            transport, exchange = await asyncio.get_running_loop().create_connection(lambda: Exchange(head + raw), "127.0.0.1", port)
            with contextlib.closing(transport):
                read_answer(answer, start, await exchange.done)
    except (OSError, LookupError, ValueError) as error:  # no connection, no time left, no HTTP, no JSON
        answer.error = f"{type(error).__name__}: {error}"
    return answer


def read_answer(answer: Answer, start: float, pieces: list[tuple[float, bytes]]) -> None:
    """Fill in what a streamed response says. ValueError where it is none, or ends early."""
    usage, times, rest = {}, [], b""
    for now, chunk in read_chunks(pieces):
        *lines, rest = (rest + chunk).split(b"\n")
        for data in (line[5:].strip() for line in lines if line.startswith(b"data:")):
            event = {} if data == b"[DONE]" else msgspec.json.decode(data)
            if "error" in event:
                raise ValueError(f"the stream says: {event['error']}")
            usage = event.get("usage") or usage
            if text := "".join(choice["text"] for choice in event.get("choices", ())):
                answer.text += text
                times.append(now)
    answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    times = times or [pieces[-1][0]]  # tokens without a text
    answer.ttft = times[0] - start
    answer.tpot = (times[-1] - times[0]) / (answer.output_tokens - 1) if answer.output_tokens > 1 else None


def read_chunks(pieces: list[tuple[float, bytes]]) -> list[tuple[float, bytes]]:
    """The body of a response with status 200, as the chunks in which the server sent it, each with the time at which all of it was there."""
    raw, ends = b"".join(data for _, data in pieces), list(itertools.accumulate(len(data) for _, data in pieces))
    head, _, rest = raw.partition(b"\r\n\r\n")
    if head[9:12] != b"200" or b"transfer-encoding: chunked" not in head.lower():
        raise ValueError(f"no stream but {head[9:60].splitlines()[:1]} {rest[:300].decode(errors='replace')}")
    chunks, at = [], len(head) + 4
    while True:
        begin = raw.index(b"\r\n", at) + 2
        at = begin + int(raw[at:begin].partition(b";")[0], 16)
        if at == begin:
            return chunks
        chunks.append((pieces[bisect.bisect_left(ends, at)][0], raw[begin:at]))
        at += 2


async def play(server: Server, engine: Engine, requests: list[Request], concurrency: int) -> tuple[list[Answer], float]:
    """The answers to a workload, and the seconds it took. Of the requests that can be sent, the first in order goes next."""
    waiting, needs = {r.id: r for r in requests}, {r.id: r.needs for r in requests}
    answers: dict[str, Answer] = {}
    running: set[asyncio.Task] = set()

    async def send(request: Request) -> None:
        prompt = request.filled({name: answers[name].text for name in needs[request.id]})
        answers[request.id] = await ask(server.port, engine.body(server.model, request, prompt))

    start = time.perf_counter()
    while waiting or running:
        ready = (name for name in waiting if all(needed in answers for needed in needs[name]))
        for name in list(itertools.islice(ready, concurrency - len(running))):
            running.add(asyncio.create_task(send(waiting.pop(name))))
        finished, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            task.result()
    wall = time.perf_counter() - start
    return [answers[request.id] for request in requests], wall


# ------------------------------------------------------------------------------------------------------------------------ the figures

def percentile(values: list[float], share: float) -> float | None:
    """The value below which that share of the values lies; None of no values."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else None


def summary(answers: list[Answer], wall: float) -> dict:
    """The figures of one run of a workload; times in ms."""
    good, errors = [a for a in answers if a.error is None], [a.error for a in answers if a.error is not None]
    prompt, output, cached = (sum(getattr(a, kind) for a in good) for kind in ("prompt_tokens", "output_tokens", "cached_tokens"))
    found = {"seconds": wall, "requests": len(good), "prompt_tokens": prompt, "output_tokens": output, "req_s": len(good) / wall,
             "prompt_tok_s": prompt / wall, "out_tok_s": output / wall, "total_tok_s": (prompt + output) / wall,
             "cached": cached / prompt if prompt else None, "errors": len(errors), "error": errors[0] if errors else None}
    for name in ("ttft", "tpot"):
        values = [1000 * getattr(a, name) for a in good if getattr(a, name) is not None]
        found |= {f"{name}_p50": percentile(values, 0.5), f"{name}_p99": percentile(values, 0.99)}
    return found | {"decode_tok_s": 1000 / found["tpot_p50"] if found["tpot_p50"] else None}


class Bench:
    """A run: what was asked for, what it knows of the model, the results so far."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.results = args, []
        self.path = weights.resolve(args.model).resolve()
        self.tokenizer = Tokenizer.from_file(str(self.path / "tokenizer.json"))
        config = ModelConfig.from_dict(weights.load_config(self.path))
        dtype = resolve_dtype(args.dtype, config, weights.Checkpoint(self.path))
        self.model = ARCHITECTURES[config.architecture](config, dtype, "meta")  # shapes, no weights
        self.works: dict[tuple[str, int], tuple[int, int, int]] = {}            # (workload, seed) -> what floor_seconds wants to know
        self.texts: dict[tuple[int, str, int], list[str | None]] = {}           # (round, workload, seed) -> ours
        command = f"{shlex.quote(sys.executable)} -m nano_sgl.server --model {{model}} --port {{port}} --dtype {args.dtype} {args.ours_args}"
        self.engines = [Engine(OURS, command.strip()), *args.peers]

    def run(self) -> None:
        """All rounds."""
        runs = list(itertools.product(self.args.workloads, self.args.seeds))
        for number in range(1, self.args.rounds + 1):
            self.bandwidth, self.flops = cpu.read_bandwidth(), cpu.gemm_rate(self.model.dtype)
            print(f"round {number}: reads {self.bandwidth / 1e9:.1f} GB/s, GEMM {self.flops / 1e9:.0f} GFLOP/s", flush=True)
            for engine in self.engines:
                with tempfile.TemporaryDirectory(prefix="serve-") as folder:
                    try:
                        with Server(engine, self.path, Path(folder)) as server:
                            for workload, seed in runs:
                                self.note(number, engine.name, workload, seed, self.measure(number, engine, server, workload, seed))
                    except Failed as error:
                        for workload, seed in runs:
                            self.note(number, engine.name, workload, seed, summary([Answer("", error=str(error))], 1.0))

    def measure(self, number: int, engine: Engine, server: Server, workload: str, seed: int) -> dict:
        """The figures of one workload on a running server."""
        requests, concurrency = build(workload, seed, self.args.scale), 1 if workload in ALONE else self.args.concurrency
        warm = [request for request in build(workload, -1 - seed, self.args.scale) if not request.needs][:2]
        asyncio.run(play(server, engine, warm, concurrency))
        with contextlib.suppress(OSError):  # ours has this route
            server.call("/flush_cache", {})
        answers, wall = asyncio.run(play(server, engine, requests, concurrency))
        found = summary(answers, wall)
        if found["errors"] and server.process.poll() is not None:
            found["error"] += f"; {server.last_words()}"
        if not found["errors"] and (workload, seed) not in self.works:  # ours comes first
            self.works[workload, seed] = self.work(answers, concurrency)
        if (workload, seed) in self.works:
            found["floor_s"] = cpu.floor_seconds(self.model, *self.works[workload, seed], self.bandwidth, self.flops)
        texts = [None if answer.error else answer.text for request, answer in zip(requests, answers) if not request.temperature]
        same = [mine == its for mine, its in zip(self.texts.setdefault((number, workload, seed), texts), texts) if None not in (mine, its)]
        return found | {"same": sum(same), "compared": len(same)}

    def work(self, answers: list[Answer], concurrency: int) -> tuple[int, int, int]:
        """Prompt tokens and pairs to compute, and steps to decode, of what was asked and answered."""
        prompts = self.tokenizer.encode_batch([answer.prompt for answer in answers])
        outputs = self.tokenizer.encode_batch([answer.text for answer in answers], add_special_tokens=False)
        steps = -(-sum(answer.output_tokens - 1 for answer in answers) // concurrency)
        return *ideal_work((prompt.ids, output.ids) for prompt, output in zip(prompts, outputs)), steps

    def note(self, number: int, name: str, workload: str, seed: int, found: dict) -> None:
        """Keep a result, and tell."""
        self.results.append({"round": number, "engine": name, "workload": workload, "seed": seed, **found})
        print(f"round {number}: {name} {workload} seed {seed}: {found['req_s']:.2f} requests/s, {found['errors']} errors", file=sys.stderr)
        if self.args.out:
            with open(self.args.out, "a") as out:
                out.write(json.dumps(self.results[-1]) + "\n")

    # ---- what is printed

    def header(self) -> str:
        """What runs, on what."""
        return "\n".join([f"{self.args.model} in {str(self.model.dtype).removeprefix('torch.')}, {os.cpu_count()} cores, torch {torch.__version__}, "
                          f"Python {sys.version.split()[0]}; scale {self.args.scale:g}, seeds {self.args.seeds}, rounds {self.args.rounds}, "
                          f"concurrency {self.args.concurrency}", *(f"{engine.name}: {engine.command}" for engine in self.engines)])

    def table(self) -> str:
        """A row for each workload and engine; below it what went wrong."""
        head = ["", "engine", "req/s", "out tok/s", "total tok/s", "TTFT ms", "TPOT ms", "cached", "errors", "ours/it", "of floor", "same"]
        rows = [head, ["---"] * len(head)]
        rows += ([workload, engine.name, *self.cells(workload, engine.name)] for workload in self.args.workloads for engine in self.engines)
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
        return "\n".join([*lines, *dict.fromkeys(f"{r['engine']}: {r['error']}" for r in self.results if r["error"])])

    def cells(self, workload: str, name: str) -> list[str]:
        """The figures of a row."""
        runs = [r for r in self.results if (r["workload"], r["engine"]) == (workload, name)]
        good = [r for r in runs if not r["errors"]]

        def median(key: str, show: str) -> str:
            values = [r[key] for r in runs if r[key] is not None]
            return format(statistics.median(values), show) if values else "-"

        rate = RATES.get(workload, "req_s")
        rates = {(r["engine"], r["round"], r["seed"]): r[rate] for r in self.results if r["workload"] == workload and not r["errors"] and r[rate]}
        pairs = [(rates.get((OURS, r["round"], r["seed"])), rates.get((name, r["round"], r["seed"]))) for r in good if name != OURS]
        ratios = [mine / its for mine, its in pairs if mine and its]
        compared = sum(r.get("compared", 0) for r in runs) if name != OURS else 0
        return [median("req_s", ".2f"), median("out_tok_s", ".1f"), median("total_tok_s", ".0f"),
                f"{median('ttft_p50', '.0f')}/{median('ttft_p99', '.0f')}", f"{median('tpot_p50', '.1f')}/{median('tpot_p99', '.1f')}",
                median("cached", ".1%"), str(sum(r["errors"] for r in runs)),
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-",
                f"{statistics.median(r['floor_s'] / r['seconds'] for r in good):.2f}" if good else "-",
                f"{sum(r['same'] for r in runs if 'same' in r)}/{compared}" if compared else "-"]


# ----------------------------------------------------------------------------------------------------------------------- the arguments

def numbers(text: str) -> list[int]:
    """1,2 -> [1, 2]."""
    return [int(number) for number in text.split(",")]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags; `peers` becomes Engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, a directory, a hub id, a GGUF file (demo)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="of our server and the floor (as stored)")
    parser.add_argument("--workloads", default="a,b,c,d,e,f,s,p", help="letters of workloads.py (all but g, which needs a grammar)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests (1.0)")
    parser.add_argument("--seeds", type=numbers, default=[1, 2], help="one run of a workload each (1,2)")
    parser.add_argument("--rounds", type=int, default=1, help="how often every engine has its turn (1)")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once (16)")
    parser.add_argument("--ours-args", default="", help="more flags of nano_sgl.server, as one word")
    parser.add_argument("--peer", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"), help="may be given again")
    parser.add_argument("--fields", nargs=2, action="append", default=[], metavar=("NAME", "JSON"), help="for a peer that wants other requests")
    parser.add_argument("--out", help="file to append every single result to")
    args = parser.parse_args(argv)
    args.workloads, peers = args.workloads.split(","), {name: Engine(name, command) for name, command in args.peer}
    if unknown := set(args.workloads) - set(WORKLOADS):
        parser.error(f"--workloads: there is no {min(unknown)!r}; there are {', '.join(WORKLOADS)}")
    if len(peers) < len(args.peer) or OURS in peers:
        parser.error(f"--peer: each needs a name of its own, and none is {OURS}; got {', '.join(name for name, _ in args.peer)}")
    for name, command in args.peer:
        try:
            bad = not re.fullmatch(r"[\w.-]+", name) or not shlex.split(command)
        except ValueError:
            bad = True
        if bad:
            parser.error(f"--peer: expected a name of letters, digits, - and . and a command line, got {name!r} {command!r}")
    if min(args.rounds, args.concurrency) < 1 or not 0 < args.scale < math.inf:
        parser.error("--rounds and --concurrency are at least 1, --scale is above 0")
    for name, given in args.fields:
        try:
            peers[name].fields |= json.loads(given)
        except (KeyError, TypeError, ValueError):
            parser.error(f"--fields: expected the name of a --peer and a JSON object, got {name!r} {given!r}")
    args.peers = list(peers.values())
    return args


def main(argv: list[str] | None = None) -> int:
    bench = Bench(arguments(argv))
    print(bench.header(), flush=True)
    try:
        bench.run()
    finally:  # also of what was done before a Ctrl-C
        print(bench.table())
    return any(result["errors"] for result in bench.results)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that no server outlives its benchmark
    sys.exit(main())
