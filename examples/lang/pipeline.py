"""Retrieve, then read, as a pipeline of declared stages (in the manner of DSPy, Khattab et al. 2023): question -> query -> passages -> answer.

    python examples/lang/pipeline.py [--url URL | --model demo]

A stage is a signature (what goes in, what comes out), its instruction and its examples, and makes a prompt of them. All questions go through a stage
together, so what the stage says to each of them is prefilled once.
"""

import re

import common

import nano_sgl.lang as sgl

CORPUS = [
    "Peat is made of moss that has not rotted, because the water of a bog holds no air. A metre of it takes a thousand years.",
    "A bog is drained by ditches. Once it is dry, peat rots and gives off more carbon than all the forest that could grow there would take "
    "in.",
    "Cranberries grow in bogs. They are picked in autumn, from boats, after the fields have been put under water.",
    "The bell founder digs a pit before his furnace, and in it he builds a core of clay, over which the bell is shaped in wax.",
    "Bronze for bells is four parts of copper and one of tin. More tin gives a brighter sound and a bell that breaks.",
    "A kite flies because the wind that it turns down pushes it up. Its tail keeps it from spinning.",
    "Salt was carried on mules over the passes, forty days there and back; a bag of it was worth its weight in wool.",
    "The glass of old windows is uneven since it was blown and spun into a disc, not because it flows."]
QUESTIONS = ["How long does a metre of peat take?", "What is bronze for bells made of?", "When are cranberries picked?",
             "Why is the glass of old windows uneven?"]
QUERY = ("Write the two or three words to search for.", ["question"], "query",
         [("How many legs does a crab have?", "crab legs"), ("Why do cats land on their feet?", "cats land feet")])
ANSWER = ("Answer from the passages, in a few words.", ["passages", "question"], "answer",
          [("[1] Crabs have ten legs, of which two are claws.\n[2] A crab walks sideways.", "How many legs does a crab have?", "ten")])


def retrieve(query, k):
    """The k passages that have most of the query's words."""
    words = set(re.findall(r"\w{3,}", query.lower()))
    return sorted(CORPUS, key=lambda passage: -len(words & set(re.findall(r"\w{3,}", passage.lower()))))[:k]


@sgl.function
def stage(s, signature, inputs):
    instruction, names, output, examples = signature
    s += f"{instruction} The fields are {', '.join(names)} and {output}.\n\n"
    for *given, wanted in examples:
        s += "".join(f"{name}: {value}\n" for name, value in zip(names, given)) + f"{output}: {wanted}\n\n"
    for name, value in zip(names, inputs):
        s += name + ": " + value + "\n"
    s += output + ":" + sgl.gen("output", stop="\n")


def run(backend, questions=3, passages=2, tokens=24):
    asked = QUESTIONS[:questions]
    options = {"backend": backend, "max_new_tokens": tokens, "temperature": 0}
    queries = stage.run_batch([{"signature": QUERY, "inputs": [question]} for question in asked], **options)
    found = [retrieve(question + " " + state["output"], passages) for question, state in zip(asked, queries)]
    texts = ["\n".join(f"[{i}] {passage}" for i, passage in enumerate(each, 1)) for each in found]
    answers = stage.run_batch([{"signature": ANSWER, "inputs": [text, question]} for text, question in zip(texts, asked)], **options)
    for state, query, each in zip(answers, queries, found):
        state["query"], state["passages"] = query["output"], each
    return answers


def show(states):
    for question, state in zip(QUESTIONS, states):
        print(f"{question}\n  query:  {state['query'].strip()}\n  found:  {state['passages'][0][:60]}...\n  answer: {state['output'].strip()}\n")


if __name__ == "__main__":
    common.main(__doc__, run, show)
