"""Free text: anything, up to the first of some strings.

A model that thinks aloud, or explains what it does before it calls a tool, writes what it likes, until it writes a certain string; from there on
it is held to something. The string is found character by character, as Knuth, Morris, Pratt, Aho and Corasick do: a state is the longest ending of
the text so far that begins one of the strings. That is a finite automaton, and each of its states is a rule:

    strings "</a>"          states   0 ""        [^<] 0  |  "<" 1
                                     1 "<"       "/" 2   |  "<" 1  |  [^</] 0
                                     2 "</"      "a" 3   |  "<" 1  |  [^<a] 0
                                     3 "</a"     ">" (what follows)  |  "<" 1  |  [^<>] 0

Names. A *stop* is a string that ends free text, and what follows it is an expression; NEVER forbids the string. *Thinking* is free text whose
stop is the closing tag of a model's reasoning, and *rest* what comes behind that.

Invariants. Every text is read in one way: the automaton is deterministic, so the grammar's stack does not grow while it runs, and no text hides a
stop from it (in "<</a>" there is one). Of stops that end at the same place, each may be meant. A stop that has another one inside it, before its
end, could never be seen whole, so it is refused; two forbidden strings may do as they like.

Cost. As many rules as the stops have characters, MAX_STATES at most, each with as many alternatives as they have different ones. Where it stops:
the strings are characters of the text, whatever the tokens are. A special token is no text, and nothing here sees it.
Sources: Knuth, Morris and Pratt (1977); Aho and Corasick (1975).
"""

from __future__ import annotations

from collections.abc import Mapping

from .rules import ALL, EMPTY, NEVER, Expr, GrammarError, Ref, Rules, alt, cat, chars, complement, literal, repeat, show, tick, union

MAX_STATES = 1024   # of one free text: characters of all its stops
LEADING_BLANKS = " \t\r\n;"    # what may stand before a stop that counts only at the beginning
BEGINNING = "beginning"
MAX_BLANKS = 4      # between the closing tag of thinking and what follows
ANY = repeat(chars(ALL), 0, None)
State = str | tuple[str, str]                                  # what of a stop was read; of a leading one, (BEGINNING, what of it)
Moves = dict[State, dict[str, tuple[State, list[str]]]]        # state -> letter -> (state after it, the stops that are complete with it)


def until(stops: Mapping[str, Expr], ends: bool, name: str, rules: dict[str, Expr], leading: Mapping[str, Expr] | None = None) -> Expr:
    """Free text, the first of the stops, and what follows that. ends: without a stop the text may end anywhere. Its states become rules, whose names
    begin with `name`. leading: stops that count only at the beginning, behind LEADING_BLANKS. Raises GrammarError for a stop that could never be
    seen."""
    if not stops:
        return ANY if ends else NEVER
    check(stops)
    moves, numbers = automaton(stops)
    start: State = ""
    if leading:
        check_leading(leading, stops)
        start = (BEGINNING, "")
        moves |= beginnings(leading, moves)
        numbers |= {state: n for n, state in enumerate(moves)}
        stops = {**stops, **leading}
    for prefix, number in numbers.items():
        arcs: list[Expr] = [EMPTY] * ends
        into: dict[State, list[tuple[int, int]]] = {"": list(complement(union((ord(c), ord(c)) for c in moves[prefix])))}
        for letter, (state, found) in moves[prefix].items():
            if found:
                arcs.append(cat([literal(letter), alt(stops[stop] for stop in found)]))
            else:
                into.setdefault(state, []).append((ord(letter), ord(letter)))
        rules[f"{name}{number}"] = alt(arcs + [cat([chars(union(ranges)), Ref(f"{name}{numbers[state]}")]) for state, ranges in into.items()])
        tick()
    return Ref(f"{name}{numbers[start]}")


def automaton(stops: Mapping[str, Expr]) -> tuple[Moves, dict[State, int]]:
    """({state: {letter: (state after it, the stops that are complete with it)}}, the states' numbers). Other letters lead to state ""."""
    prefixes = {stop[:i] for stop in stops for i in range(len(stop))}
    numbers = {prefix: n for n, prefix in enumerate(sorted(prefixes, key=lambda text: (len(text), text)))}
    longer: dict[str, set[str]] = {}                # state -> the letters with which it becomes another, or a stop
    for text in {*prefixes, *stops} - {""}:
        longer.setdefault(text[:-1], set()).add(text[-1])
    moves: Moves = {}
    shorter = {"": ""}                              # state -> the longest of its own endings that is one, too
    for prefix in numbers:
        fall = moves[shorter[prefix]] if prefix else {}
        moves[prefix] = dict(fall)
        for letter in longer[prefix]:
            text, (state, found) = prefix + letter, fall.get(letter, ("", []))
            if text in numbers:
                shorter[text], state = state, text
            moves[prefix][letter] = state, found + [text] * (text in stops)
        tick()
    return moves, numbers


def beginnings(leading: Mapping[str, Expr], moves: Moves) -> Moves:
    """The states before free text has begun: a letter that goes on with no leading stop does what it does in free text. moves: those of free text."""
    found: Moves = {}
    for prefix in sorted({word[:i] for word in leading for i in range(len(word))}, key=len):
        state: State = ""                           # of free text, if no stop is meant
        for letter in prefix:
            state = moves[state].get(letter, ("", []))[0]
        arcs = dict(moves[state])
        if not prefix:
            arcs = {letter: ((BEGINNING, ""), []) for letter in LEADING_BLANKS} | arcs
        for text in {word[:len(prefix) + 1] for word in leading if word.startswith(prefix)}:
            arcs[text[-1]] = ("", [text]) if text in leading else ((BEGINNING, text), [])
        found[BEGINNING, prefix] = arcs
        tick()
    return found


def check_leading(leading: Mapping[str, Expr], stops: Mapping[str, Expr]) -> None:
    """Raises GrammarError for leading stops that are empty, too many, or hide others."""
    if "" in leading or sum(map(len, leading)) > MAX_STATES:
        raise GrammarError(f"free text begins with strings of 1 to {MAX_STATES} characters together", "free text")
    for word in leading:
        if inside := next((other for other in [*stops, *leading] if other != word and other in word or other in stops and other == word), None):
            raise GrammarError(f"{word!r} at the beginning could never be seen whole: {inside!r} is in it", "free text")


def check(stops: Mapping[str, Expr]) -> None:
    """Raises GrammarError for stops that are empty, too many, or hide others."""
    if "" in stops:
        raise GrammarError("free text up to an empty string would have no character", "free text")
    if sum(map(len, stops)) > MAX_STATES:
        raise GrammarError(f"free text looks for strings of more than {MAX_STATES} characters together", "free text")
    for stop, after in stops.items():
        if after != NEVER and (inside := next((other for other in stops if other in stop[:-1]), None)):
            raise GrammarError(f"{stop!r} could never be seen whole: {inside!r} is in it, and comes first", "free text")


def behind(tag: str, made: Rules) -> Rules:
    """Thinking, its closing tag, up to MAX_BLANKS blanks, and then one of the texts of other rules. Names with a colon are free: none of a user's has
    one."""
    rules = dict(made.rules)
    rules["thinking:root"] = cat([until({tag: EMPTY}, False, "thinking:", rules), Ref("thinking:rest")])
    rules["thinking:rest"] = cat([repeat(chars(union((ord(c), ord(c)) for c in " \t\r\n")), 0, MAX_BLANKS), Ref(made.start)])
    rules["thinking:closing"] = cat([literal(tag), Ref("thinking:rest")])
    return Rules(rules, "thinking:root", closing="thinking:closing", thinking="thinking:rest")


if __name__ == "__main__":
    for title, stops in (("up to </a>", {"</a>": EMPTY}), ("up to <a or <b, never <!", {"<a": literal("..."), "<b": EMPTY, "<!": NEVER})):
        states: dict[str, Expr] = {}
        print(f"{title}: {show(until(stops, False, '', states))}")
        for state, expr in states.items():
            print(f"    {state}  {show(expr)}")
    try:
        until({"<tool": EMPTY, "</tool": EMPTY, "<t": EMPTY}, True, "", {})
    except GrammarError as error:
        print(f"refused: {error}")
