"""What the programs of this folder share: flags that say where to run, and a last line that says what it cost.

    --model demo        the engine in this process
    --url URL           a running nano_sgl server
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator

import nano_sgl
import nano_sgl.lang as sgl


@contextlib.contextmanager
def backend_of(args: argparse.Namespace) -> Iterator[sgl.Backend]:
    """The server at --url, or --model in this process, while a `with` lasts."""
    if args.url:
        endpoint = sgl.RuntimeEndpoint(args.url)
        try:
            yield endpoint
        finally:
            endpoint.close()
        return
    with nano_sgl.LLM(args.model, max_total_tokens=16384) as llm:
        yield llm


def cost(backend: sgl.Backend) -> str:
    """How many prompt tokens there were, and how many of them did not have to be computed."""
    if isinstance(backend, sgl.RuntimeEndpoint):
        prompt, cached, written = (backend.usage[name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens"))
    else:
        counters = backend.engine.scheduler.counters
        prompt, cached, written = counters.prompt_tokens, counters.cached_tokens, counters.output_tokens
    return f"[{prompt:,} prompt tokens, of which {cached:,} were there already; {written:,} tokens written]"


def main(doc: str, run: Callable, show: Callable) -> None:
    """Run a program as its flags say; `show` prints the states that `run` returns."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, a directory, a hub id, a GGUF file (demo)")
    parser.add_argument("--url", help="of a nano_sgl server, http://127.0.0.1:30000; then --model is the server's")
    with backend_of(parser.parse_args()) as backend:
        show(run(backend))
        print(cost(backend))
