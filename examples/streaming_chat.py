"""A conversation, word by word. Each turn sends all that was said before, and finds nearly all of it in the cache.

    python examples/streaming_chat.py
"""

from nano_sgl import LLM, SamplingParams

QUESTIONS = ["What is the capital of France?", "What is it known for?", "And which river runs through it?"]


def main() -> None:
    with LLM("demo", max_total_tokens=4096) as llm:
        messages = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            print(f"\n> {question}")
            answer = ""
            for piece in llm.stream(messages, SamplingParams(temperature=0, max_tokens=40)):
                print(piece.text, end="", flush=True)
                answer += piece.text
            print(f"\n  [{piece.cached_tokens} of {len(piece.prompt_ids)} prompt tokens were cached]")
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
