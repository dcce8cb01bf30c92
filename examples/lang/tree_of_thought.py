"""Tree of thought (Yao et al. 2023): several next steps are thought of, each is judged, and the best are gone on from.

    python examples/lang/tree_of_thought.py [--url URL | --model demo]

Every state forks `width` ways; a level's forks run at the same time, and share the way to them. What judges is a `select`: how likely the model finds
that a step is right orders the states, and the first `beam` of them go on.
"""

import common

import nano_sgl.lang as sgl

PROBLEMS = ["A farmer has 17 sheep. All but 9 run away, and then he buys 6 more. How many sheep does he have?",
            "A train leaves at 14:40 and takes 95 minutes. A second one leaves 20 minutes later and takes 70 minutes. Which arrives first?",
            "Three friends share 48 nuts. Ana takes half, Ben takes a third of the rest. How many are left for Cleo?"]
MANNERS = ["Say what is known.", "Work backwards from what is asked.", "Write an equation.", "Try it with small numbers.", "Draw it in words."]
VERDICTS = [" right", " unclear", " wrong"]


@sgl.function
def tree_of_thought(s, problem, width, depth, beam):
    s += sgl.system("You solve problems step by step. Every step is one short sentence, and it only says what follows from the steps before.")
    s += sgl.user("The problem: " + problem)
    states = [s]
    for level in range(depth):
        children = []
        for state in states:
            forks = state.fork(width)
            for i, f in enumerate(forks):
                f += sgl.user(f"Step {level + 1}. {MANNERS[(i + level) % len(MANNERS)]}")
                f += sgl.assistant(sgl.gen(f"step_{level}"))
                f += sgl.user("Is this step right, unclear or wrong?")
                f += sgl.assistant("The step is" + sgl.select(f"verdict_{level}", VERDICTS))
            children += forks
        likely = {child: child.get_meta_info(f"verdict_{level}")["normalized_prompt_logprobs"][0] for child in children}     # waits for all
        states = sorted(children, key=likely.get, reverse=True)[:beam]
    best = states[0]
    best += sgl.user("So what is the answer?") + sgl.assistant("The answer is" + sgl.gen("answer", stop="."))
    s["steps"], s["answer"], s["leaves"] = [best[f"step_{level}"] for level in range(depth)], best["answer"], len(children)
    return best


def run(backend, problems=1, width=3, depth=2, beam=2, tokens=32):
    batch = [{"problem": problem, "width": width, "depth": depth, "beam": beam} for problem in PROBLEMS[:problems]]
    return tree_of_thought.run_batch(batch, backend=backend, max_new_tokens=tokens, temperature=0)


def show(states):
    for state, problem in zip(states, PROBLEMS):
        print(problem)
        for level, step in enumerate(state["steps"]):
            print(f"  {level + 1}. {step}")
        print(f"  The answer is{state['answer']}    (branch {state.ret_value.branch} of the tree)")


if __name__ == "__main__":
    common.main(__doc__, run, show)
