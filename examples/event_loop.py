"""The engine in a program that has an event loop: tasks share its batches, and a task that is cancelled frees what it held.

    python examples/event_loop.py
"""

import asyncio

from nano_sgl import LLM, SamplingParams

CITIES = ["Rome", "Cairo", "Lima"]


async def describe(llm: LLM, city: str) -> str:
    output = await llm.agenerate(f"The city of {city} is known for", SamplingParams(temperature=0, max_tokens=12))
    return f"{city}: {output.text.strip()}"


async def first_words(llm: LLM) -> str:
    text = ""
    async for piece in llm.astream([{"role": "user", "content": "Tell me a long story."}], SamplingParams(temperature=0, max_tokens=500)):
        text += piece.text
        if len(text) > 30:
            break  # nobody listens any more: the engine stops too
    return text


async def main() -> None:
    with LLM("demo", max_total_tokens=4096) as llm:
        print(*await asyncio.gather(*(describe(llm, city) for city in CITIES), first_words(llm)), sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
