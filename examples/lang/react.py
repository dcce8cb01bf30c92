"""An agent that thinks, acts and reads what came of it (ReAct, Yao et al. 2022), with a reference work as its tool.

    python examples/lang/react.py [--url URL | --model demo]

It is a replay: the thoughts are the model's, and so is the way in which it looks things up, but what it looks up is written down here, so that every
run has the same length. While an agent waits for its tool, others run; its text is still in the cache when it comes back.
"""

import common

import nano_sgl.lang as sgl

EXAMPLE = """You answer a question by turns of Thought, Action and Observation. Actions are Open [page], Search [word] and Finish [answer].

Question: Is the river of Lyon longer than that of Turin?
Thought 1: I have to know the rivers first.
Action 1: Search [Lyon]
Observation 1: Lyon lies where the Saone flows into the Rhone.
Thought 2: The Rhone is the larger one. Now Turin.
Action 2: Open [Turin]
Observation 2: Turin lies on the Po, which is 652 km long.
Thought 3: The Rhone is about 813 km long, so it is longer.
Action 3: Finish [yes]

"""
PAGES = {"Heron": "The heron is a bird that fishes in shallow water. It nests high in trees.",
         "Otter": "The otter lives by rivers and sleeps in a hole in the bank.",
         "Copper": "Copper melts at 1085 degrees and is red.", "Tin": "Tin melts at 232 degrees and is white.",
         "Bern": "Bern is the seat of Switzerland's government. It lies on the Aare.", "Aare": "The Aare flows into the Rhine after 288 km.",
         "Cello": "The cello has four strings, tuned in fifths.", "Lute": "A lute of the Renaissance has six courses of strings."}
AGENTS = [("Which of the two sleeps higher up, a heron or an otter?", ["Heron", "Otter"]), ("Which melts first, copper or tin?", ["Copper", "Tin"]),
          ("Into which river does the water of Bern flow?", ["Bern", "Aare"]), ("Which has more strings, a cello or a lute?", ["Cello", "Lute"])]


@sgl.function
def react(s, question, script):
    s += EXAMPLE + "Question: " + question + "\n"
    for i, word in enumerate(script, 1):
        s += f"Thought {i}:" + sgl.gen(f"thought_{i}", stop="\n")
        s += f"\nAction {i}:" + sgl.select(f"action_{i}", [" Open", " Search"])
        s += f" [{word}]\nObservation {i}: {PAGES[word]}\n"
    s += f"Thought {len(script) + 1}:" + sgl.gen("conclusion", stop="\n")
    s += f"\nAction {len(script) + 1}: Finish [" + sgl.gen("answer", max_tokens=12, stop=["]", "\n"]) + "]\n"


def run(backend, agents=3, steps=2, tokens=32):
    batch = [{"question": question, "script": script[:steps]} for question, script in AGENTS[:agents]]
    return react.run_batch(batch, backend=backend, max_new_tokens=tokens, temperature=0)


def show(states):
    for state in states:
        print(state.text().removeprefix(EXAMPLE))


if __name__ == "__main__":
    common.main(__doc__, run, show)
