"""A model as a judge, by branch, solve, merge (Saha et al. 2023): each side of a text is judged by itself, then all of them together.

    python examples/lang/llm_judge.py [--url URL | --model demo]

The text is long and the judgements are short: it is prefilled once for all of its judges.
"""

import common

import nano_sgl.lang as sgl

ESSAYS = [
    "Our street has forty houses and one oak. The council wants to fell it, since its roots lift the pavement, and a pavement that is not "
    "even is a danger for those who walk badly. I do not doubt that. But the oak gives shade to the bus stop, and in last year's heat it was "
    "five degrees cooler there than at the next one. A pavement can be led around a tree for the price of felling it. What took a hundred and "
    "twenty years to grow should not go in an afternoon because that is the first thing that came to mind.",
    "Everybody should cook. It is cheap and it is good. My uncle cooks and he is happy. There are many dishes, for example soup. When you "
    "cook you learn things, like how hot a pan is. Some people say that they have no time, but they watch films. A film is two hours. In two "
    "hours one can make a lot of soup. So everybody should cook, because it is good.",
    "Night trains came back because short flights became hard to defend, yet they lose money on most lines. The reason is simple: a bed is "
    "sold once a night, a seat in a day train four times. Whoever wants night trains has to say who pays for the other three. I propose that "
    "the airports do, out of the fee for each take-off below a thousand kilometres. Then the price says what the distance should."]
SIDES = {"clarity": "Is it easy to follow?", "argument": "Do its reasons support what it claims?", "style": "Are its sentences well made?",
         "evidence": "Does it name facts that could be checked?"}
GRADES = [" poor", " fair", " good", " excellent"]


@sgl.function
def judge(s, essay, sides):
    s += sgl.system("You are the judge of an essay contest. You are fair and brief, and you never judge more than you are asked to.")
    s += sgl.user("The essay:\n" + essay)
    forks = s.fork(len(sides))
    for side, f in zip(sides, forks):
        f += sgl.user(f"Judge its {side} only. {SIDES[side]}")
        f += sgl.assistant(sgl.gen("judgement") + f"\nIts {side} is" + sgl.select("grade", GRADES))
    forks.join()
    report = "".join(f"\n{side} is{grade}: {judgement}" for side, grade, judgement in zip(sides, s["grade"], s["judgement"]))
    s += sgl.user("The judgements:" + report + "\nNow judge all of it in one sentence.")
    s += sgl.assistant(sgl.gen("summary") + "\nThe essay is" + sgl.select("verdict", GRADES))


def run(backend, essays=2, sides=3, tokens=32):
    batch = [{"essay": essay, "sides": list(SIDES)[:sides]} for essay in ESSAYS[:essays]]
    return judge.run_batch(batch, backend=backend, max_new_tokens=tokens, temperature=0)


def show(states):
    for state, essay in zip(states, ESSAYS):
        print(f"{essay[:60]}...\n  grades:{','.join(state['grade'])}; altogether{state['verdict']}\n  {state['summary']}\n")


if __name__ == "__main__":
    common.main(__doc__, run, show)
