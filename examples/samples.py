"""Several samples of one prompt. With a seed they are the same every time, whatever else the engine does at that moment.

    python examples/samples.py
"""

from nano_sgl import LLM, SamplingParams

PROMPT = "Once upon a time there was a fox who"


def main() -> None:
    params = SamplingParams(n=4, seed=7, temperature=0.9, top_p=0.95, max_tokens=16)
    with LLM("demo", dtype="float32", max_total_tokens=4096) as llm:
        first = llm.generate(PROMPT, params)
        for output in first:
            print(f"{output.index}: {PROMPT}{output.text!r}")
        llm.generate(PROMPT + " lived", SamplingParams(max_tokens=5))  # other work, and a cache that is no longer what it was
        again = llm.generate(PROMPT, params)
        print("the same again:", [o.text for o in first] == [o.text for o in again])
        print("four different:", len({o.text for o in first}) == 4)


if __name__ == "__main__":
    main()
