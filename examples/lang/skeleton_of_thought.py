"""Skeleton of thought (Ning et al. 2023): first the points of an answer, then all of them written out at the same time.

    python examples/lang/skeleton_of_thought.py [--url URL | --model demo]
"""

import common

import nano_sgl.lang as sgl

QUESTIONS = ["How do I learn to swim as an adult?", "How does a small town keep its bookshop?", "How should a beginner look after tomatoes?"]


@sgl.function
def skeleton_of_thought(s, question, points):
    s += sgl.system("You answer questions with a list of points. A point is three to six words; it is written out when the user asks for that.")
    s += sgl.user(question)
    with s.assistant():
        for i in range(points):
            s += f"{i + 1}." + sgl.gen(f"point_{i}", max_tokens=10, stop="\n") + "\n"
    forks = s.fork(points)
    for i, f in enumerate(forks):
        f += sgl.user(f"Write point {i + 1} out, in one or two sentences.")
        f += sgl.assistant(sgl.gen("details"))
    forks.join()
    s["answer"] = "\n".join(f"{i + 1}. {details}" for i, details in enumerate(s["details"]))


def run(backend, questions=1, points=4, tokens=40):
    batch = [{"question": question, "points": points} for question in QUESTIONS[:questions]]
    return skeleton_of_thought.run_batch(batch, backend=backend, max_new_tokens=tokens, temperature=0)


def show(states):
    for state in states:
        print(state.messages()[1]["content"], state.messages()[2]["content"], state["answer"], sep="\n\n", end="\n\n")


if __name__ == "__main__":
    common.main(__doc__, run, show)
