"""A program in SGLang's language, run by whose frontend is asked: `python sglang_program.py ours|theirs URL` prints what came out, as JSON.

Theirs is a wheel without its dependencies: of the package only `lang` is loaded, which needs little."""

import importlib.util
import json
import sys
import types


def load(whose: str):
    """The language's module, and the class of a server's backend."""
    if whose == "ours":
        import nano_sgl.lang as sgl
        return sgl, sgl.RuntimeEndpoint, sgl
    package = types.ModuleType("sglang")
    package.__path__ = list(importlib.util.find_spec("sglang").submodule_search_locations)
    sys.modules["sglang"] = package
    from sglang.lang import api, choices
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
    return api, RuntimeEndpoint, choices


def main(whose: str, url: str) -> None:
    sgl, endpoint, methods = load(whose)

    @sgl.function
    def program(s, topic):
        s += "All about " + topic + ": "
        s += sgl.gen("first", max_tokens=8, stop=["zz", "qq"], temperature=0)
        s += " and " + sgl.gen("number", max_tokens=4, regex="[0-9]{3}", temperature=0) + ". "
        s += sgl.gen("sampled", max_tokens=5, n=1, temperature=0, frequency_penalty=0.1, presence_penalty=0.1, ignore_eos=True, min_tokens=5)
        forks = s.fork(3)
        forks += lambda i: f"Part {i}: " + sgl.gen("part", max_tokens=6, temperature=0, top_k=50, top_p=0.9, min_p=0.01)
        forks.join()
        s += " Which? " + sgl.select("mean", [" one", " two", " three and more"])
        s += sgl.select("greedy", [" left", " right"], choices_method=methods.greedy_token_selection)
        s += sgl.select("raised", ["up ", "down "], choices_method=methods.unconditional_likelihood_normalized)
        s += sgl.gen("scored", max_tokens=3, temperature=0, return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=True)
        s += sgl.gen_int("whole", max_tokens=4, temperature=0)
        with s.copy() as t:
            t += "!" + sgl.gen("aside", max_tokens=3, temperature=0)
        with s.user():
            s += "Said."
        s += sgl.assistant(sgl.gen("reply", max_tokens=8, temperature=0, json_schema='{"type": "boolean"}'))

    @sgl.function
    def question(s, number):
        s += "A beginning that is the same for all of a batch, and long enough to be worth a request of its own. Number " + number + " is "
        s += sgl.gen("word", max_tokens=4, temperature=0)
    backend = endpoint(url)
    sgl.set_default_backend(backend)
    state = program.run(topic="cats")
    state.sync()
    assert state.error() is None, state.error()
    meta = state.get_meta_info("scored")
    found = {name: state[name] for name in ("first", "number", "sampled", "part", "mean", "greedy", "raised", "scored", "whole", "aside", "reply")}
    found["logprobs"] = [[entry[1], round(entry[0], 2), entry[2]] for entry in meta["output_token_logprobs"]]
    found["batch"] = [s["word"] for s in question.run_batch([{"number": str(i)} for i in range(6)], num_threads=3)]
    streamed = program.run(topic="dogs", stream=True)
    found["streamed"] = "".join(streamed.text_iter("first"))
    streamed.sync()
    found["streams"] = streamed["first"] == found["streamed"]
    sgl.get_server_info(backend)
    sgl.flush_cache(backend)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
