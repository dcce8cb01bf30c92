"""How often a greedy answer changes with what shares its batch or its cache: alone and cold, against in a batch of 8 with a shared prefix.

    python bench/batch_effects.py [--model demo] [--prompts 16] [--tokens 32] [--dtypes float32,bfloat16]

float32 promises that none changes. In bfloat16 the rounding of a matrix multiplication depends on its shape, so two tokens whose logits are
nearly equal may swap, and the texts part there; the last column is how many tokens pass on average before that happens.
"""

import argparse

from nano_sgl import LLM, SamplingParams

WORDS = "river stone music engine paper cloud market garden window teacher".split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    args = parser.parse_args()
    head = "The following are short notes about everyday things. "
    prompts = [f"{head}The {WORDS[i % 10]} and the {WORDS[(3 * i + 1) % 10]} number {i} are" for i in range(args.prompts)]
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    print(f"{'dtype':10}{'prompts':>9}{'tokens':>8}{'texts that change':>19}{'tokens before a change':>24}")
    for dtype in args.dtypes.split(","):
        with LLM(args.model, dtype=dtype, max_total_tokens=8192) as llm:
            alone = [llm.generate(p, params, cache_salt=str(i)).output_ids for i, p in enumerate(prompts)]
            batched = [o.output_ids for i in range(0, len(prompts), 8) for o in llm.generate(prompts[i:i + 8], params, progress=False)]
        same = [next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), len(a)) for a, b in zip(alone, batched)]
        changed = sum(a != b for a, b in zip(alone, batched))
        rate = f"{sum(same) / changed:.0f}" if changed else "-"
        print(f"{dtype:10}{len(prompts):9}{args.tokens:8}{changed:19}{rate:>24}", flush=True)


if __name__ == "__main__":
    main()
