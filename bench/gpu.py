"""The GPU path in one run: is it right, how near is it to what the card can do, and what do its parts save. Under five minutes on one GPU.

    python bench/gpu.py [--parts a,b,c,d,e,f] [--out results.json] [--seconds 270] [--tiny]

It needs torch with its Triton and transformers, this repository, and no model: weights are random (`--load-format dummy`), the shape is Llama-3-8B's,
in bfloat16; so the texts mean nothing, and the times are those of the real model.

a  every kernel against its twin in float32, on random ragged batches
b  attention of a layer: decode at 1k to 32k of context against the bandwidth of a large copy, prefill against the rate of a large product
c  the model: decode at batches of 1 to 256 and prefill, CUDA graphs on and off, overlap on and off, `transformers` beside it
d  attention over rows that share prefixes, grouped against apart; the ratio is predicted by counting bytes, then measured
e  steps that verify guesses (16 a row), that mix prefill with decode, and that are masked by grammars, with the bytes sent for masks: none
f  the loop under torch.cuda.set_sync_debug_mode("error"): a step that waits for the device fails

What is printed is a line a measurement: the time, the share of the floor that it reaches (1.00: nothing could be faster), the goal if there is one. A
floor is the bytes that must be read over the copy's bandwidth, or the FLOPs over the product's rate, as bench/roofline.py counts them. Parts come in
order of importance, each with a time limit; one that fails does not keep the others from running, but the exit code is 1. A goal that is missed is
told, and is no failure. All numbers go to `--out`, by default $OUT/gpu.json where $OUT is set.

`--tiny` runs all of it on a CPU, kernels in Triton's interpreter and the engine on the CPU's own, at the size of a toy: so that its first run on a
GPU is not its first. Its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
PARTS = {"a": 80, "b": 35, "f": 30, "c": 110, "e": 45, "d": 25}   # seconds each may take, in the order in which they run
SHARDS = 12                                                     # processes of part a
DECODE_GOAL = 1 / 1.15


class OutOfTime(Exception):
    """A part has used up its seconds."""


class Run:
    """What is known so far, and how it is told."""

    def __init__(self, device: str, tiny: bool, folder: Path):
        self.device, self.tiny, self.folder = device, tiny, folder
        self.rows: list[dict] = []
        self.notes: dict[str, dict] = {}
        self.failures: list[str] = []
        self.part, self.bandwidth, self.flops = "", 1.0, 1.0

    def row(self, what: str, seconds: float | None = None, share: float | None = None, rate: str = "", goal: float | None = None) -> None:
        """A measurement: its time, the share of its floor, what that is a second."""
        row = dict(part=self.part, what=what, seconds=seconds, share=share, rate=rate, goal=None if self.tiny else goal)
        self.rows.append(row)
        print("  ".join(cell for cell in cells(row) if cell), flush=True)

    def note(self, name: str, **numbers) -> None:
        """For the file alone."""
        self.notes[f"{self.part}: {name}"] = numbers

    def wrong(self, what: str) -> None:
        """A failure that leaves the part running."""
        self.failures.append(f"{self.part}: {what}")
        print(f"WRONG: {what}", flush=True)

    @contextlib.contextmanager
    def guarded(self, part: str, seconds: float):
        """A part, or a piece of one: what it raises is told, and the others go on. May be nested; a CPU's toy is given all the time it wants."""
        self.part = part
        started = time.perf_counter()

        def late(*_):
            raise OutOfTime(f"not done after {seconds:.0f} s")
        before = signal.getsignal(signal.SIGALRM)
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        seconds = min(seconds, left or seconds) if not self.tiny else 3600
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, seconds, 5)   # and again, where something has swallowed it
        try:
            yield
        except Exception as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.wrong(f"{type(error).__name__}: {str(error)[:500]}")
            traceback.print_exc()
        finally:
            took = time.perf_counter() - started
            signal.signal(signal.SIGALRM, before)
            signal.setitimer(signal.ITIMER_REAL, max(left - took, 10) if left else 0, 5 if left else 0)   # time to tidy up
            self.note("took", seconds=took)
            gc.collect()
            if self.device != "cpu":
                import torch
                torch.cuda.empty_cache()


def cells(row: dict) -> list[str]:
    seconds, share, goal = row["seconds"], row["share"], row["goal"]
    shown = "" if seconds is None else f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"
    met = "" if goal is None else f"{goal:.2f} {'met' if share >= goal else 'MISSED'}"
    return [row["part"], row["what"], shown, row["rate"], "" if share is None else f"{share:.2f}", met]


# ---- part a


def part_a(run: Run) -> None:
    """In processes side by side on a GPU; their sum is printed, and each that is wrong."""
    if run.tiny:
        import gpu_kernels
        found = gpu_kernels.checks(run.device, True)
    else:
        shards = [subprocess.Popen([sys.executable, __file__, "--shard", f"{i}/{SHARDS}"], stdout=subprocess.PIPE, text=True) for i in range(SHARDS)]
        try:
            outputs = [shard.communicate()[0] for shard in shards]
        finally:
            for shard in shards:
                shard.kill()
        if broken := [i for i, shard in enumerate(shards) if shard.returncode]:
            run.wrong(f"{len(broken)} of {SHARDS} processes ended with an error, see above: {broken}")
        found = [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith("{")]
    for check in found:
        if not check["error"] <= check["most"]:
            run.wrong(f"{check['name']}: differs by {check['error']:.2g}, more than {check['most']:.2g}")
    run.row(f"{sum(check['error'] <= check['most'] for check in found)} of {len(found)} kernels and cases agree with float32 twins")
    run.note("checks", found=found)


# ---- engines


def write_model(folder: Path, tiny: bool) -> Path:
    """A config of Llama-3-8B's shape and a tokenizer of its size, of made-up words: no weights. A directory that is there already is left."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    vocab = 640 if tiny else 128256
    shape = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2) if tiny else \
        dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    config = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=vocab, max_position_embeddings=512 if tiny else 32768,
                  rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu", tie_word_embeddings=False, torch_dtype="float32" if tiny else "bfloat16",
                  bos_token_id=vocab - 2, eos_token_id=vocab - 1, **shape)
    (folder / "config.json").write_text(json.dumps(config))
    letters, words = "etaoinshrdlucmfwypvbgkjqxz", sorted(pre_tokenizers.ByteLevel.alphabet())
    alphabet = set(words)
    for length in range(2, 6):
        for i in range(min(len(letters) ** length, vocab)):
            word = "".join(letters[i // len(letters) ** k % len(letters)] for k in range(length))
            words += [word, "\u0120" + word]
    words = [*sorted(alphabet), *dict.fromkeys(word for word in words if word not in alphabet)][: vocab - 2]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<|begin|>", "<|end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<|begin|>",
                                                                  eos_token="<|end|>", clean_up_tokenization_spaces=False)))
    return folder


def graph_modes() -> dict[str, dict]:
    """The flags for CUDA graphs, if this engine has them."""
    from nano_sgl import EngineConfig
    there = "disable_cuda_graph" in {field.name for field in dataclasses.fields(EngineConfig)}
    return {"graphs": {}, "no graphs": dict(disable_cuda_graph=True)} if there else {"no graphs": {}}


@contextlib.contextmanager
def engine(run: Run, **flags):
    """An engine with random weights, and its memory given back."""
    from nano_sgl import Engine, EngineConfig, weights
    if not hasattr(weights.load_tokenizer, "cache_info"):
        weights.load_tokenizer = functools.cache(weights.load_tokenizer)  # several engines, one tokenizer
    made = Engine(EngineConfig(**(dict(model=str(write_model(run.folder / "model", run.tiny)), load_format="dummy", random_seed=0, device=run.device,
                                       max_total_tokens=4096 if run.tiny else 300_000, disable_overlap_schedule=False) | flags)))
    try:
        yield made
    finally:
        try:
            made.synchronize()
            made.shutdown()
        finally:
            vars(made).clear()      # whoever still has the engine shall not keep its memory
            gc.collect()
            if run.device != "cpu":
                import torch
                torch.cuda.empty_cache()


class Requests:
    """Requests of random tokens, told apart by a number, and the steps of an engine."""

    def __init__(self, made):
        import torch
        self.engine, self.count, self.draw = made, 0, torch.Generator().manual_seed(0)

    def add(self, tokens: int, max_tokens: int, prompt: list[int] | None = None, **params) -> list[int]:
        """One request; its prompt."""
        import torch
        from nano_sgl import SamplingParams
        from nano_sgl.protocol import Request
        self.count += 1
        prompt = prompt or torch.randint(0, self.engine.vocab_size - 2, (tokens,), generator=self.draw).tolist()
        params = SamplingParams(**(dict(temperature=0, max_tokens=max_tokens, ignore_eos=True) | params))
        self.engine.add(Request(rid=str(self.count), prompt_ids=prompt, params=params))
        return prompt

    def step(self) -> list:
        """The chunks of a step. RuntimeError where a request has failed."""
        chunks = self.engine.step()
        for chunk in chunks:
            if chunk.error is not None:
                raise RuntimeError(f"request {chunk.rid}: {chunk.error}")
        return chunks

    def start(self, count: int) -> None:
        """Step until so many requests have their first token: what is left is decode."""
        started: set[str] = set()
        while len(started) < count:
            started |= {chunk.rid for chunk in self.step()}

    def rest(self) -> list:
        """The chunks of all steps that are left."""
        chunks = []
        while self.engine.has_work:
            chunks += self.step()
        return chunks

    def timed(self, steps: int) -> float:
        """Seconds of each of so many steps, in which no request ends; then all end."""
        self.engine.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            if any(chunk.finish_reason for chunk in self.step()):
                raise RuntimeError("a request has ended while the steps were timed")
        self.engine.synchronize()
        took = (time.perf_counter() - started) / steps
        self.end()
        return took

    def end(self) -> None:
        """Abort what is left."""
        for i in range(self.count):
            self.engine.abort(str(i + 1))
        while self.engine.has_work:
            self.engine.step()


def decode(made, batch: int, prompt: int, steps: int, **params) -> float:
    """Seconds of a decode step of a batch, all of which have their first token."""
    requests = Requests(made)
    for _ in range(batch):
        requests.add(prompt, ROOM + steps, **params)
    requests.start(batch)
    return requests.timed(steps)


ROOM = 64   # tokens that the first of a batch may make until the last has begun, and more


def shape_of(made):
    import roofline
    c = made.model.config
    return roofline.Shape(c.num_layers, c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size, c.vocab_size,
                          made.model.dtype.itemsize)


# ---- part c


def part_c(run: Run) -> None:
    """The model, in all modes; a mode that fails does not keep the next from running."""
    batches, prompt, steps = ((1, 2), 12, 4) if run.tiny else ((1, 16, 64, 256), 256, 32)
    modes = [(graphs, flags, overlap) for overlap in (True, False) for graphs, flags in graph_modes().items()]
    for number, (graphs, flags, overlap) in enumerate(modes):
        flags = flags | dict(disable_radix_cache=True, disable_overlap_schedule=not overlap)
        with run.guarded("c", 60), engine(run, **flags) as made:
            run_model(run, made, f"{graphs}, {'overlap' if overlap else 'in line'}", graphs == "graphs" and overlap, batches, prompt, steps)
            if number == 0:
                transformers_beside(run, made, batches, prompt, steps)


def run_model(run: Run, made, mode: str, has_goal: bool, batches, prompt: int, steps: int) -> None:
    """Decode and prefill in a mode. The first of each compiles, and captures its graphs."""
    import roofline
    shape = shape_of(made)
    for batch in batches:
        took = [decode(made, batch, prompt, steps) for _ in range(2)][-1]
        floor = roofline.floor(shape, batch, prompt + steps // 2).seconds(run.bandwidth, run.flops)
        run.row(f"decode, batch {batch}: {mode}", took, floor / took, f"{batch / took:,.0f} tok/s", DECODE_GOAL if has_goal and batch <= 64 else None)
    for rows, length in ((1, 40),) if run.tiny else ((1, 8192), (8, 1024)):
        for _ in range(2):
            requests = Requests(made)
            for _ in range(rows):
                requests.add(length, 1)
            started = time.perf_counter()
            requests.rest()
            took = time.perf_counter() - started
        floor = roofline.prefill_flops(shape, length, rows) / run.flops
        run.row(f"prefill, {rows} x {length}: {mode}", took, floor / took, f"{rows * length / took:,.0f} tok/s")


def transformers_beside(run: Run, made, batches, prompt: int, tokens: int) -> None:
    """The same weights, in the same memory, as `transformers` runs them; first that both say the same."""
    import roofline
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    warnings.filterwarnings("ignore", message=".*past_key_values")     # which newer versions want by another name
    config, shape = AutoConfig.from_pretrained(made.path), shape_of(made)
    with torch.device("meta"):
        peer = AutoModelForCausalLM.from_config(config, dtype=made.model.dtype, attn_implementation="sdpa").eval()
    peer.load_state_dict(made.model.parameters(), strict=True, assign=True)
    rotary = peer.model.rotary_emb
    peer.model.rotary_emb = type(rotary)(config).to(run.device)
    requests = Requests(made)
    ids = requests.add(min(prompt, 64), 1, logprobs=1)
    [entry] = [one for chunk in requests.rest() for one in chunk.logprobs or []]
    with torch.inference_mode():
        theirs = peer(torch.tensor([ids], device=run.device)).logits[0, -1].float().log_softmax(-1)[entry.token_id].item()
        if not abs(theirs - entry.logprob) < (1e-3 if run.tiny else 0.1):
            run.wrong(f"the logprob of the first token is {entry.logprob:.4f}, by transformers {theirs:.4f}")
        run.note("logprob of the first token", ours=entry.logprob, transformers=theirs)
        for batch in batches:
            ids = torch.randint(0, shape.vocab - 2, (batch, prompt), device=run.device)
            for repeat in range(2):
                out = peer(ids, use_cache=True, logits_to_keep=1)
                token = out.logits[:, -1:].argmax(-1)
                made.synchronize()
                started, count = time.perf_counter(), 2 if repeat == 0 else min(tokens, 16)
                for _ in range(count):
                    out = peer(token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
                    token = out.logits[:, -1:].argmax(-1)
                made.synchronize()
                took = (time.perf_counter() - started) / count
            floor = roofline.floor(shape, batch, prompt + tokens // 2).seconds(run.bandwidth, run.flops)
            run.row(f"decode, batch {batch}: transformers", took, floor / took, f"{batch / took:,.0f} tok/s")
            del out


# ---- part e


def part_e(run: Run) -> None:
    rows, prompt, tokens = (2, 12, 6) if run.tiny else (64, 256, 32)
    with engine(run) as made:
        run_masked(run, made, rows, prompt, tokens)
        run_mixed(run, made, rows, prompt)
    with engine(run, **GUESSES) as made:
        run_verify(run, made, rows, 8 * prompt, tokens)


GUESSES = dict(speculative_algorithm="ngram", speculative_num_draft_tokens=16, speculative_draft_length="fixed")
PATTERN = r"[a-z ]{400,4000}"


def run_masked(run: Run, made, rows: int, prompt: int, steps: int) -> None:
    """Steps under a grammar beside free ones; once its states are known, nothing is sent for masks."""
    free = [decode(made, rows, prompt, steps) for _ in range(2)][-1]
    for _ in range(6):      # rows of the tables are built beside the loop, ahead of who needs them: until there are no more
        sent_before = made.constraints.bytes_sent
        took = decode(made, rows, prompt, steps, regex=PATTERN)
        if made.constraints.bytes_sent == sent_before:
            break
    requests = Requests(made)
    for _ in range(rows):
        requests.add(prompt, ROOM + steps, regex=PATTERN)
    requests.start(rows)
    made.synchronize()
    before = made.constraints.bytes_sent
    with copies(run) as sent:
        requests.timed(steps)
    bytes_sent = made.constraints.bytes_sent - before
    if bytes_sent:
        run.wrong(f"{bytes_sent} bytes went to the device for masks in {steps} steady steps")
    run.row(f"decode, batch {rows}: free", free, rate=f"{rows / free:,.0f} tok/s")
    run.row(f"decode, batch {rows}: grammar, {bytes_sent} mask bytes sent in {steps} steps", took, rate=f"{rows / took:,.0f} tok/s")
    run.note("masks", bytes_sent=bytes_sent, steps=steps, ratio_to_free=took / free, all_copies_to_the_device=sent.get("bytes"))


@contextlib.contextmanager
def copies(run: Run):
    """Fills in the bytes of all copies from host to device, if this torch can profile them."""
    found: dict = {}
    if run.device == "cpu":
        yield found
        return
    import torch
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        try:
            profiler = stack.enter_context(torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]))
        except Exception as error:
            found["error"] = str(error)
        yield found
        with contextlib.suppress(Exception):
            stack.close()
            profiler.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
            found["bytes"] = sum(event["args"].get("bytes", 0) for event in events if "HtoD" in event.get("name", ""))


def run_mixed(run: Run, made, rows: int, prompt: int) -> None:
    """Rows that decode while a long prompt comes in chunks of what the budget leaves."""
    import roofline
    length, shape = (60 if run.tiny else 16384), shape_of(made)
    for _ in range(2):
        requests = Requests(made)
        for _ in range(rows):
            requests.add(prompt, 4 * ROOM)
        requests.start(rows)
        requests.add(length, 1)
        made.synchronize()
        started, steps, last = time.perf_counter(), 1, str(requests.count)
        while not any(chunk.rid == last for chunk in requests.step()):
            steps += 1
        took = time.perf_counter() - started
        requests.end()
    floor = (roofline.prefill_flops(shape, length) + 2 * steps * rows * shape.weight_bytes / shape.itemsize) / run.flops
    run.row(f"mixed: {rows} rows decode, {length} tokens of a prompt in {steps} steps", took, floor / took,
            f"{(length + steps * rows) / took:,.0f} tok/s")


def guessable(requests: Requests, rows: int, prompt: int, tokens: int, **params) -> None:
    """Requests whose texts repeat one token for ever, a row's own: a bias sees to that, and so guesses are made and right."""
    for i in range(rows):
        token = 5 + 3 * i
        requests.add(0, tokens, prompt=[token] * prompt, logit_bias={token: 100.0}, **params)


def run_verify(run: Run, made, rows: int, prompt: int, steps: int) -> None:
    """Steps of 16 guesses a row."""
    import roofline
    shape, count = shape_of(made), GUESSES["speculative_num_draft_tokens"]
    for _ in range(2):
        requests = Requests(made)
        guessable(requests, rows, prompt, (count + 1) * (steps + (4 if run.tiny else ROOM)))
        requests.start(rows)
        requests.step()
        made.synchronize()
        before, began = made.speculation.total.summary()["spec_num_proposed_drafts"], made.scheduler.step
        took = requests.timed(steps)
    judged = (made.speculation.total.summary()["spec_num_proposed_drafts"] - before) / rows / steps
    least = roofline.floor(shape, rows, prompt + (count + 1) * steps // 2)
    flops = 2 * rows * (count + 1) * shape.weight_bytes / shape.itemsize
    floor = max(least.bytes / run.bandwidth, flops / run.flops)
    if judged < count / 2:
        run.wrong(f"{judged:.1f} guesses a row and step were judged, not {count}: what was timed is something else")
    run.row(f"verify, batch {rows}: {judged:.1f} guesses judged a row and step", took, floor / took)
    run.note("verify", judged=judged, steps=made.scheduler.step - began)


# ---- part f


def part_f(run: Run) -> None:
    """Steady steps of every kind under the mode in which torch raises where the host waits for the device."""
    rows, prompt, steps = (2, 12, 4) if run.tiny else (16, 128, 16)
    kinds = {"decode": {}, "sampled": dict(temperature=0.8, top_p=0.9, top_k=40), "grammar": dict(regex=PATTERN)}
    for flags in ({}, GUESSES):
        with run.guarded("f", PARTS["f"]), engine(run, **flags) as made:
            for kind, params in kinds.items() if not flags else (("guesses", {}),):
                requests = Requests(made)
                if flags:
                    guessable(requests, rows, prompt, 17 * (2 * steps + 8) + ROOM)
                for _ in range(0 if flags else rows):
                    requests.add(prompt, ROOM + 2 * steps, **params)
                requests.start(rows)
                for _ in range(steps):      # graphs are captured, grammars' states met
                    requests.step()
                with run.guarded("f", PARTS["f"]), sync_is_an_error(run):
                    for _ in range(steps):
                        requests.step()
                    run.row(f"{steps} steps of {kind}: " + ("the host waits for nothing" if run.device != "cpu" else "no GPU to wait for"))
                requests.end()


@contextlib.contextmanager
def sync_is_an_error(run: Run):
    import torch
    if run.device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- parts b and d, and all in order


def part_b(run: Run) -> None:
    import gpu_kernels
    gpu_kernels.attention_rates(run)


def part_d(run: Run) -> None:
    import gpu_kernels
    gpu_kernels.forks(run)


def write(run: Run, out: Path | None, about: dict) -> None:
    """The file, after each part: what is there if the run is ended from outside."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(dict(about=about, rows=run.rows, notes=run.notes, failures=run.failures), indent=1, default=str))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="".join(PARTS), help="letters, in any order")
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) / "gpu.json" if os.environ.get("OUT") else None)
    parser.add_argument("--seconds", type=float, default=270, help="for all: a part that would begin later is left out, and counts as failed")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, in Triton's interpreter")
    parser.add_argument("--shard", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    began, parts = time.perf_counter(), set(args.parts.replace(",", ""))
    if not parts <= PARTS.keys():
        parser.error(f"--parts takes letters of {''.join(sorted(PARTS))}")
    import triton  # before the interpreter is asked for: its own helpers stay compiled
    if args.tiny:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    import torch
    if not torch.cuda.is_available() and not args.tiny:
        parser.error("there is no GPU here; --tiny shows what would be done")
    import transformers
    transformers.logging.set_verbosity_error()
    import gpu_kernels
    if args.shard:
        i, of = map(int, args.shard.split("/"))
        for found in gpu_kernels.checks("cuda", False, i, of):
            print(json.dumps(found), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run = Run("cpu" if args.tiny else "cuda", args.tiny, Path(folder))
        card = "a CPU" if args.tiny else torch.cuda.get_device_name()
        about = dict(card=card, torch=torch.__version__, triton=triton.__version__, transformers=transformers.__version__,
                     python=sys.version.split()[0], date=time.strftime("%Y-%m-%d"), tiny=args.tiny, graphs=list(graph_modes()))
        print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
        with run.guarded("0", 30):
            run.bandwidth, run.flops = gpu_kernels.ceilings(run.device, args.tiny)
            run.row("a large copy", rate=f"{run.bandwidth / 1e12:.3f} TB/s")
            run.row("a large bf16 product", rate=f"{run.flops / 1e12:.1f} TFLOP/s")
            run.note("ceilings", bandwidth=run.bandwidth, flops=run.flops)
        work = dict(a=part_a, b=part_b, c=part_c, d=part_d, e=part_e, f=part_f)
        for part, seconds in PARTS.items():
            left = args.seconds - (time.perf_counter() - began)
            if part in parts and left < 5:
                run.part = part
                run.wrong(f"left out: {args.seconds:.0f} s are over")
            elif part in parts:
                print(f"-- part {part}", flush=True)
                with run.guarded(part, min(seconds, left)):
                    work[part](run)
                write(run, args.out, about)
        from kernels_aot import table
        print("\n" + table([["part", "what", "time", "rate", "of floor", "goal"], *map(cells, run.rows)], markdown=True))
        print(f"\n{time.perf_counter() - began:.0f} s" + (f"; numbers in {args.out}" if args.out else "")
              + ("; these times mean nothing" if args.tiny else ""))
        print("failures: " + ("; ".join(run.failures) or "none"))
        return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
