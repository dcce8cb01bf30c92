"""Conversations of several turns. A turn's prompt is the conversation so far, so all of it but the new question is in the cache already.

    python examples/lang/multi_turn_chat.py [--url URL | --model demo]
"""

import common

import nano_sgl.lang as sgl

CHATS = [
    ["Name a fruit that is yellow.", "And one that is red?", "Which of the two grows on a tree?", "How would you eat it?"],
    ["I have a rainy afternoon. What could I do?", "I would rather stay inside.", "What do I need for that?", "How long will it take?"],
    ["What is a lighthouse for?", "Who worked in one?", "Why are there few of them left?", "Tell me how one looks."],
    ["How do I boil an egg?", "How long for a soft one?", "What do I eat with it?", "And to drink?"],
]


@sgl.function
def chat(s, questions):
    s += sgl.system("You are a friendly assistant who answers in one short sentence, whatever the question is.")
    for i, question in enumerate(questions):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer_{i}"))


def run(backend, chats=2, turns=3, tokens=32):
    batch = [{"questions": questions[:turns]} for questions in CHATS[:chats]]
    return chat.run_batch(batch, backend=backend, max_new_tokens=tokens, temperature=0)


def show(states):
    for state in states:
        for i, message in enumerate(state.messages()[1:]):
            print(f"{message['role']:>9}: {message['content']}")
            if message["role"] == "assistant":
                meta = state.get_meta_info(f"answer_{i // 2}")
                print(f"{'':11}[{meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens were there already]")
        print()


if __name__ == "__main__":
    common.main(__doc__, run, show)
