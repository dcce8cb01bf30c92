"""Answers that a program can read: a regex, a choice, an EBNF, JSON, and a pydantic model. What the grammar does not allow is never sampled.

    python examples/structured.py
"""

import pydantic

from nano_sgl import LLM, SamplingParams


class City(pydantic.BaseModel):
    """Comes with FastAPI; a JSON schema as a dict does as well."""
    name: str = pydantic.Field(max_length=20)
    country: str = pydantic.Field(max_length=20)
    has_a_river: bool


ASKED = {
    "The year in which the Berlin Wall fell:": dict(regex=r"(1[0-9]|20)\d\d"),
    "Is the Moon larger than the Earth? Answer:": dict(choice=["yes", "no"]),
    "A moment of the day, such as 09:45:": dict(regex=r"([01]\d|2[0-3]):[0-5]\d"),
    "Four primes in a list:": dict(ebnf='root ::= "[" number (", " number){3} "]"\nnumber ::= [1-9] [0-9]?'),
    "A person as a JSON object with name and age:": dict(json_object=True),
    "The capital of France as JSON:": dict(json_schema=City),
}


def main() -> None:
    with LLM("demo", max_total_tokens=4096) as llm:
        params = [SamplingParams(temperature=0, max_tokens=48, **grammar) for grammar in ASKED.values()]
        for (question, grammar), output in zip(ASKED.items(), llm.generate(list(ASKED), params)):
            [kind] = grammar
            value = City.model_validate_json(output.text) if kind == "json_schema" and output.finish_reason == "stop" else output.text
            print(f"{question} {value!r}  ({kind}, {output.finish_reason})")


if __name__ == "__main__":
    main()
