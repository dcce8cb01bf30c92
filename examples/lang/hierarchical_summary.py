"""A long text summed up in levels: each part by itself, all at the same time; then the summaries, two by two, until one is left.

    python examples/lang/hierarchical_summary.py [--url URL | --model demo]

The parts are different prompts. What they share is the instruction, and the levels depend on each other.
"""

import common

import nano_sgl.lang as sgl

STORY = [
    "Mara kept the ferry, as her mother had. It was a raft on a chain, with a bell on either bank, and whoever rang was fetched. There were "
    "days on which nobody rang.",
    "In the dry year the river fell until the raft lay on stones. People walked across and did not ring, and Mara sat in her hut and mended "
    "the chain, link by link, though it was whole.",
    "A man came and said that a bridge was to be built. He had drawings. He wanted to know where the river was narrow, and Mara showed him "
    "the place, because she was asked.",
    "When the rain came the scaffold went, and two of the workmen with it. Mara found one of them at night, by the bell, which he had held on "
    "to. She fetched him with the raft and did not ask for the fare.",
    "The bridge was finished after three years. On the first day the whole village went over it and back. The man with the drawings stayed on "
    "Mara's side, and rang the bell.",
    "She fetched him. Half way across he asked how deep it was there, and she said that she had never had to know."]


@sgl.function
def sum_up(s, text):
    s += sgl.system("You sum up parts of stories. A summary is one sentence; it names who does what, and nothing that is not in the text.")
    s += sgl.user("The text: " + text)
    s += sgl.assistant(sgl.gen("summary"))


def run(backend, parts=4, tokens=40):
    texts, states = STORY[:parts], []
    while texts:
        level = sum_up.run_batch([{"text": text} for text in texts], backend=backend, max_new_tokens=tokens, temperature=0)
        summaries = [state["summary"].strip() for state in level]
        texts = [" ".join(summaries[i:i + 2]) for i in range(0, len(summaries), 2)] if len(level) > 1 else []
        states += level
    return states


def show(states):
    for state in states:
        print(f"{state.messages()[1]['content'][10:70]}...\n  -> {state['summary']}\n")


if __name__ == "__main__":
    common.main(__doc__, run, show)
