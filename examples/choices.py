"""Which of a few answers does the model find likeliest? Each is scored as it stands, by the log-probabilities of its own tokens.

    python examples/choices.py
"""

from nano_sgl import LLM, SamplingParams

QUESTIONS = {"The capital of France is": ["Paris", "London", "a cheese"],
             "Water freezes at a temperature of 0 degrees": ["Celsius", "Kelvin", "Paris"],
             "A triangle has": ["three sides", "four sides", "no sides"]}


def main() -> None:
    with LLM("demo", max_total_tokens=4096) as llm:
        for question, choices in QUESTIONS.items():
            start = len(llm.tokenizer.encode(question))
            params = SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_start_len=start)  # no output: the prompt is all there is to score
            outputs = llm.generate([f"{question} {choice}" for choice in choices], params)
            # The mean, not the sum: a long answer is not less likely for being long.
            scores = [sum(t.logprob for t in o.prompt_logprobs) / len(o.prompt_logprobs) for o in outputs]
            best = choices[scores.index(max(scores))]
            print(f"{question} ... {best}    ({', '.join(f'{c} {s:.2f}' for c, s in zip(choices, scores))})")


if __name__ == "__main__":
    main()
