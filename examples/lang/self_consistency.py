"""Self-consistency (Wang et al. 2022): think several times, and believe the answer that comes most often.

    python examples/lang/self_consistency.py [--url URL | --model demo]

Thoughts are sampled. A run's seed gives each of them noise of its own, the same every time. `fork` declares how many will come: the
prompt is prefilled once.
"""

import collections

import common

import nano_sgl.lang as sgl

PROBLEMS = ["A baker has 12 eggs and uses 3 for each cake. How many cakes can he bake?",
            "A book has 60 pages. Mia reads 15 a day. How many days does she need?",
            "There are 5 boxes with 4 pens each. 2 pens are lost. How many are left?"]


@sgl.function
def self_consistency(s, problem, samples):
    s += sgl.system("You solve small problems. You think in one sentence, and then you say the number.")
    s += sgl.user(problem)
    forks = s.fork(samples)
    forks += sgl.assistant("Let me think." + sgl.gen("thought", stop="\n") + "\nThe answer is " + sgl.gen("answer", max_tokens=4, regex="[0-9]{1,3}"))
    forks.join()
    (s["voted"], s["votes"]), = collections.Counter(s["answer"]).most_common(1)


def run(backend, problems=2, samples=5, tokens=32, warmth=0.8, seed=1):
    batch = [{"problem": problem, "samples": samples} for problem in PROBLEMS[:problems]]
    return self_consistency.run_batch(batch, backend=backend, max_new_tokens=tokens, temperature=warmth, seed=seed)


def show(states):
    for problem, state in zip(PROBLEMS, states):
        print(f"{problem}\n  {', '.join(state['answer'])}: {state['votes']} of {len(state['answer'])} say {state['voted']}\n")


if __name__ == "__main__":
    common.main(__doc__, run, show)
