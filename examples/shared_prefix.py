"""Many prompts that begin alike: the common beginning is computed once, whoever asks first.

    python examples/shared_prefix.py
"""

from nano_sgl import LLM, SamplingParams

GUIDE = ("You sort letters to the editor of a small newspaper. Answer with one word: sports, weather, politics or food.\n"
         "Letter: The final was a scandal, and the referee should be ashamed.\nTopic: sports\n"
         "Letter: It has not rained for five weeks now.\nTopic: weather\n"
         "Letter: The council has again decided nothing.\nTopic: politics\n")
LETTERS = ["The new bakery at the station sells the best rolls in town.", "Why was the match not shown on television?",
           "The mayor promised a bridge eight years ago.", "Such a storm in May, I cannot remember one."]


def main() -> None:
    with LLM("demo", max_total_tokens=4096) as llm:
        prompts = [f"{GUIDE}Letter: {letter}\nTopic:" for letter in LETTERS]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, stop="\n"))
        for letter, output in zip(LETTERS, outputs):
            print(f"{output.text.strip():10} {letter}   ({output.cached_tokens} of {len(output.prompt_ids)} prompt tokens were cached)")


if __name__ == "__main__":
    main()
