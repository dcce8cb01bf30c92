"""Nine workloads for a server: what shares a prefix with what, and nothing else.

    python bench/workloads.py [--model demo] [--seed 1] [--scale 1.0]        prints the table of their shapes

    a  chats     48 chats of 4 turns under one system prompt         e  samples   12 prompts, 8 samples each at temperature 1
    b  few-shot  12 subjects, 24 questions under the same 5 examples f  control   100 prompts with nothing in common
    c  thoughts  3 trees, every thought continued in 5 ways          g  cards     8 articles, 12 JSON cards each, by a schema
    d  judges    20 articles judged in 5 ways, and a verdict         s  one stream that decodes      p  one stream that reads

A prompt may hold {{id}} for what the request of that name answered: it can be sent when that is known. The text is English out of the standard
library (pydoc_data.topics), drawn with a seed: another seed is the same shape and other words. `scale` multiplies how many groups there are (chats,
subjects, trees, ...), never how long they are. Prompts are plain text for /v1/completions; chats are written out as ChatML.
"""

import argparse
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

from tokenizers import Tokenizer

from nano_sgl import weights

PLACEHOLDER = re.compile(r"\{\{([\w.]+)\}\}")
ALONE = {"s", "p"}  # workloads whose requests are sent one after the other


@dataclass(frozen=True)
class Request:
    """What one request asks for."""
    id: str
    prompt: str
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    schema: dict | None = None

    @property
    def needs(self) -> list[str]:
        """Ids of the requests whose answers stand in the prompt."""
        return PLACEHOLDER.findall(self.prompt)

    def filled(self, answers: dict[str, str]) -> str:
        """The prompt with the answers in it, as they came."""
        return PLACEHOLDER.sub(lambda found: answers[found[1]], self.prompt)


class Text:
    """Seeded English. Passages have no sentence in common until all sentences have been used."""

    def __init__(self, seed: str):
        self.random = random.Random(seed)
        paragraphs = (" ".join(block.split()) for key in sorted(topics) for block in topics[key].split("\n\n"))
        found = (sentence for paragraph in paragraphs for sentence in re.split(r"(?<=\.) (?=[A-Z])", paragraph))
        self.sentences = list(dict.fromkeys(s for s in found if re.fullmatch(r"[A-Z][\w ,;:()'\"*.-]{30,}\.", s)))
        self.left: list[str] = []

    def __call__(self, words: int) -> str:
        """The next passage, of so many words."""
        passage: list[str] = []
        while len(passage) < words:
            self.left = self.left or self.random.sample(self.sentences, len(self.sentences))
            passage += self.left.pop().split()
        return " ".join(passage[:words])


def chatml(system: str, *turns: str) -> str:
    """A chat up to where the assistant answers; the user has the first turn and the last."""
    said = "".join(f"<|im_start|>{('user', 'assistant')[n % 2]}\n{turn}<|im_end|>\n" for n, turn in enumerate(turns))
    return f"<|im_start|>system\n{system}<|im_end|>\n{said}<|im_start|>assistant\n"


def chats(text: Text, groups: Callable[[int], int]) -> Iterator[Request]:
    """Turn after turn of all chats, so that each chat waits while the others go on."""
    system = "You are a patient tutor who answers in two short sentences. The rules of the house: " + text(300)
    turns: list[list[str]] = [[] for _ in range(groups(48))]
    for turn in range(4):
        for number, said in enumerate(turns):
            said += [f"{{{{chat{number}.{turn - 1}}}}}"] * (turn > 0) + ["What does this mean? " + text(30)]
            yield Request(f"chat{number}.{turn}", chatml(system, *said), 32)


def few_shot(text: Text, groups: Callable[[int], int]) -> Iterator[Request]:
    """Multiple choice: all is prefill."""
    def question() -> str:
        return f"Question: {text(22)}\n" + "".join(f"{letter}. {text(8)}\n" for letter in "ABCD") + "Answer:"

    for subject in range(groups(12)):
        examples = "".join(f"{question()} {text.random.choice('ABCD')}\n\n" for _ in range(5))
        head = f"These are questions with four choices about subject {subject}. {text(350)}\n\n{examples}"
        for number in range(24):
            yield Request(f"shot{subject}.{number}", head + question(), 2)


def thoughts(text: Text, groups: Callable[[int], int]) -> Iterator[Request]:
    """A tree of thoughts, level by level: a thought continues its parent's prompt and answer."""
    for tree in range(groups(3)):
        task = chatml("You solve problems step by step.", text(220) + " Propose one step at a time.")
        level = [(f"tree{tree}", task)]
        for depth in range(3):
            children = []
            for name, prompt in level:
                for way in range(5):
                    child = f"{name}.{way}"
                    asked = f"{prompt}Option {way + 1} at step {depth + 1}:"
                    yield Request(child, asked, 20)
                    children.append((child, f"{asked}{{{{{child}}}}}\n"))
            level = children


def judges(text: Text, groups: Callable[[int], int]) -> Iterator[Request]:
    """Five opinions fork from an article; the verdict joins their texts."""
    aspects = ["clarity", "accuracy", "structure", "tone", "completeness"]
    for number in range(groups(20)):
        system = "You grade articles. The article:\n" + text(700)
        for aspect in aspects:
            yield Request(f"judge{number}.{aspect}", chatml(system, f"Judge the {aspect} of the article."), 48)
        notes = "".join(f"{aspect}: {{{{judge{number}.{aspect}}}}}\n" for aspect in aspects)
        yield Request(f"judge{number}.verdict", chatml(system, f"Make one verdict of these notes.\n{notes}"), 64)


def samples(text: Text, groups: Callable[[int], int]) -> Iterator[Request]:
    """Equal prompts at the same time, drawn with seeds of their own."""
    for number in range(groups(12)):
        prompt = chatml("You reason step by step, then answer.", text(900) + " What follows from this?")
        for sample in range(8):
            yield Request(f"sample{number}.{sample}", prompt, 64, temperature=1.0, seed=1000 * number + sample)


def control(text: Text, groups: Callable[[int], int]) -> Iterator[Request]:
    """Nothing to share: what a cache costs."""
    for number in range(groups(100)):
        yield Request(f"alone{number}", text(360), 32)


def cards(text: Text, groups: Callable[[int], int]) -> Iterator[Request]:
    """Answers that a JSON schema prescribes, for the most part word by word."""
    fields = {"title": {"type": "string", "maxLength": 24},
              "kind_of_document": {"enum": ["statement", "expression", "type", "protocol", "other"]},
              "difficulty_for_beginners": {"enum": ["easy", "medium", "hard"]},
              "speaks_of_exceptions": {"type": "boolean"},
              "recommended_reader": {"enum": ["student", "programmer", "designer of languages"]},
              "confidence_in_percent": {"type": "integer", "minimum": 0, "maximum": 99}}
    schema = {"type": "object", "additionalProperties": False, "required": list(fields), "properties": fields}
    for number in range(groups(8)):
        system = "You fill in index cards as JSON. The article:\n" + text(650)
        for card in range(12):
            yield Request(f"card{number}.{card}", chatml(system, f"Give the card, as JSON, of this part: {text(10)}"), 128, schema=schema)


def one_decodes(text: Text, groups: Callable[[int], int]) -> Iterator[Request]:
    """Short prompts, long answers."""
    for number in range(groups(4)):
        yield Request(f"decode{number}", text(40), 128)


def one_reads(text: Text, groups: Callable[[int], int]) -> Iterator[Request]:
    """Long prompts, one token."""
    for number in range(groups(5)):
        yield Request(f"read{number}", text(1535), 1)


WORKLOADS = {"a": chats, "b": few_shot, "c": thoughts, "d": judges, "e": samples, "f": control, "g": cards, "s": one_decodes, "p": one_reads}


def build(name: str, seed: int, scale: float = 1.0) -> list[Request]:
    """The requests of a workload, in the order in which they should be sent."""
    return list(WORKLOADS[name](Text(f"{name}/{seed}"), lambda count: max(1, round(count * scale))))


def ideal_work(sequences: Iterable[tuple[list[int], list[int]]]) -> tuple[int, int]:
    """(tokens, attended pairs) that are left to compute of prompts for a cache that keeps every token, and forgets none.

    sequences: (ids of a prompt, ids of its answer) in the order of the requests. A token is known where an earlier prompt or answer began with all
    that stands up to it. The last token of a prompt is always computed, for its logits; the last token of an answer never is.
    A pair is a computed token and a token that it attends to, itself among them.
    """
    tree: dict[tuple[int, int], int] = {}  # (node, token) -> child
    tokens = pairs = 0
    for prompt, answer in sequences:
        node = 0
        for at, token in enumerate(prompt + answer[:-1], 1):
            new = (node, token) not in tree
            node = tree.setdefault((node, token), len(tree) + 1)
            if at == len(prompt) or (new and at < len(prompt)):
                tokens, pairs = tokens + 1, pairs + at
    return tokens, pairs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args(argv)
    tokenizer = Tokenizer.from_file(str(weights.resolve(args.model) / "tokenizer.json"))
    print("Answers that stand in prompts are not counted.\n"
          f"{'':15}{'requests':>9}{'that wait':>10}{'prompt tokens':>14}{'min/median/max':>16}{'max. out':>10}{'shareable':>10}")
    for name, made_by in WORKLOADS.items():
        requests = build(name, args.seed, args.scale)
        prompts = [tokenizer.encode(PLACEHOLDER.sub("", r.prompt)).ids for r in requests]
        lengths = sorted(map(len, prompts))
        computed, _ = ideal_work((prompt, []) for prompt in prompts)
        print(f"{name}  {made_by.__name__:12}{len(requests):9}{sum(bool(r.needs) for r in requests):10}{sum(lengths):14}"
              f"{f'{lengths[0]}/{lengths[len(lengths) // 2]}/{lengths[-1]}':>16}{sum(r.max_tokens for r in requests):10}"
              f"{1 - computed / sum(lengths):10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
