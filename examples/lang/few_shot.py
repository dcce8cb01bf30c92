"""Multiple choice after a few examples, as MMLU asks: the same long prefix for all questions, and the likeliest of four letters.

    python examples/lang/few_shot.py [--url URL | --model demo]

`run_batch` traces the program, finds that all its calls begin with the examples, and has them prefilled once.
"""

import common

import nano_sgl.lang as sgl

SHOTS = [("Which of these is a prime number?", ["21", "23", "25", "27"], "B"),
         ("Which gas do plants take in to make sugar?", ["carbon dioxide", "oxygen", "helium", "nitrogen"], "A"),
         ("Who works in a quarry?", ["a tailor", "a baker", "a pilot", "a stonemason"], "D"),
         ("Which word means the opposite of scarce?", ["rare", "narrow", "plentiful", "scared"], "C"),
         ("What does a barometer measure?", ["air pressure", "depth", "speed", "heat"], "A")]
QUESTIONS = [("What is seven times eight?", ["54", "63", "56", "48"], "C"),
             ("Which animal lays eggs?", ["a cow", "a hen", "a dog", "a horse"], "B"),
             ("Which planet is closest to the sun?", ["Mercury", "Mars", "Venus", "Neptune"], "A"),
             ("What is a group of lions called?", ["a flock", "a school", "a swarm", "a pride"], "D"),
             ("Which of these is a metal?", ["sulphur", "iron", "carbon", "neon"], "B"),
             ("How many sides has a hexagon?", ["five", "seven", "six", "eight"], "C"),
             ("Which organ pumps blood?", ["the heart", "the liver", "the lung", "the kidney"], "A"),
             ("In which season do leaves fall?", ["spring", "winter", "summer", "autumn"], "D")]
LETTERS = [" A", " B", " C", " D"]


def asked(question, options):
    return f"Question: {question}\n" + "".join(f"{letter.strip()}. {option}\n" for letter, option in zip(LETTERS, options)) + "Answer:"


@sgl.function
def few_shot(s, examples, question, options):
    s += "These are questions of which exactly one answer is right.\n\n" + examples
    s += asked(question, options) + sgl.select("answer", LETTERS)


def run(backend, shots=5, questions=8):
    examples = "".join(f"{asked(question, options)} {right}\n\n" for question, options, right in SHOTS[:shots])
    batch = [{"examples": examples, "question": question, "options": options} for question, options, _ in (QUESTIONS * questions)[:questions]]
    return few_shot.run_batch(batch, backend=backend)


def show(states):
    for (question, options, right), state in zip(QUESTIONS, states):
        answer = state["answer"]
        print(f"{question:44}{answer}. {options[LETTERS.index(answer)]:16}{'' if answer.strip() == right else f'(it is {right})'}")
    print(f"{sum(state['answer'].strip() == right for (*_, right), state in zip(QUESTIONS, states))} of {len(states)} are right")


if __name__ == "__main__":
    common.main(__doc__, run, show)
