"""Answers that a program can read: facts as a regex, a choice, an EBNF, and JSON. What the grammar does not allow is never sampled.

    python examples/structured.py
"""

import json

from nano_sgl import LLM, SamplingParams

ASKED = {
    "The year in which the Berlin Wall fell:": dict(regex=r"(1[0-9]|20)\d\d"),
    "Is the Moon larger than the Earth? Answer:": dict(choice=["yes", "no"]),
    "A moment of the day, such as 09:45:": dict(regex=r"([01]\d|2[0-3]):[0-5]\d"),
    "Four primes in a list:": dict(ebnf='root ::= "[" number (", " number){3} "]"\nnumber ::= [1-9] [0-9]?'),
    "A person as a JSON object with name and age:": dict(json_object=True),
}


def main() -> None:
    with LLM("demo", max_total_tokens=4096) as llm:
        params = [SamplingParams(temperature=0, max_tokens=48, **grammar) for grammar in ASKED.values()]
        for (question, grammar), output in zip(ASKED.items(), llm.generate(list(ASKED), params)):
            kind = next(iter(grammar))
            value = json.loads(output.text) if kind == "json_object" and output.finish_reason == "stop" else output.text
            print(f"{question} {value!r}  ({kind}, {output.finish_reason})")


if __name__ == "__main__":
    main()
