"""Normal form: rules become nodes that say what they match without detours, on which the automaton rests.

    rules          A ::= A x | B b          B ::= "" | c          C ::= "(" C ")" | A
    normal form    A ::= (b | c b) x*                             C ::= "(" C ")" | (b | c b) x*          A and B are put where they are used

No rule and no repeated item matches the empty text: what is optional says so with an explicit empty alternative, so loops of nothing are gone. No
rule begins with itself, directly or through others: rules that do are a left-linear system,

    A1 = A2 x | b1       whose solution is A_i = OR_j b_j path(j, i): begin with some b, then a sequence
    A2 = A1 y | b2       of x, y ... that leads from j to i. No path begins with one of the A.

Every rule matches something: what never ends is left out. Rules without references are put where they are used; those that come back to themselves
only at their end are loops.

The order does most of it. Rules are taken after those that they refer to, the last first: whether these match the empty text, or anything, is known
then, and one walk over the expression is all; a walk that meets a rule which is not known yet is broken off, and begins again behind it. Only rules
that lead to each other, a *cycle*, are solved together. What an expression became is remembered by identity: characters and formats, which front ends
make once, cost a look-up, and so does a whole cycle, such as the rules of any JSON, whose rules keep their numbers.

Cost: a microsecond a part, a look-up for bytes. Where it stops: left recursion through n rules makes up to n^2 new ones, at most MAX_PATHS. Source:
left recursion after Rosenkrantz (1967); Tarjan (1972).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

from .nodes import CHUNK, EMPTY, NEVER, Nodes
from .rules import BYTES, MAX_COUNT, But, Byte, Cat, Expr, GrammarError, Or, Ref, Repeat, Rules, tick

MAX_DEPTH = 220                 # nesting of an expression: three times that of rules.py, and some
MAX_INLINE = 60                 # nesting of a rule that is put where it is used
MAX_PARTS = 400_000             # of a grammar
MAX_PATHS = 5000                # rules that left recursion may turn into
MAX_KNOWN = 4000                # expressions that are remembered
MAX_CYCLES = 16
SINGLE = frozenset(map(id, BYTES))
RUN = 8                         # equal parts in a row from which they become a repeat


class _Waits(Exception):
    """A rule refers to one that is not known yet."""


class _Normalizer:
    """Rules -> nodes by rule number, in normal form (above). Rules come after those that they refer to: what these are is known then, and only rules
    that come back to themselves are looked at together."""

    def __init__(self, nodes: Nodes, rules: Rules):
        self.nodes, self.count, self.met = nodes, len(rules.rules), 0     # of parts; of references
        self.ids = {name: nodes.new_rule() for name in rules.rules}
        self.put: dict[str, int] = {}               # what is put where a rule is used: it itself, if it has no references, or a Ref
        self.rules: dict[int, int] = {}
        self._made = dict(nodes.single)             # by identity: expressions whose references, if any, are to rules that are known
        self._refer: set[int] = set()               # by identity: those with references
        self._solving = False                       # rules that lead to each other: what they refer to is not known yet
        self._refs: dict[int, frozenset[int]] = {}
        self._normal: dict[int, int] = {}
        for name in reversed(rules.rules):          # whoever writes rules begins with what is on top
            if name not in self.put:
                self._visit(name, rules.rules)

    def begin(self, name: str) -> int:
        """The node of a rule at which a grammar begins. Raises GrammarError."""
        if name not in self.ids:
            raise GrammarError(f"rule {name} is not defined", name, name)
        rule, node = self.ids[name], self.put[name]
        if rule not in self.rules:                  # it has no references, and was put where it is used
            self.rules[rule] = self.nodes.positive(node)
        elif self.nodes.stacked[node]:
            return node
        return self._used(rule, self.nodes.nullable[node])

    def _used(self, rule: int, optional: bool) -> int:
        """What stands for a rule where it is used, if it is not put there itself."""
        found = NEVER if self.rules[rule] == NEVER else self.nodes.ref(rule)
        return self.nodes.alt([EMPTY, found]) if optional else found

    def _settle(self, name: str, positive: int, node: int, optional: bool) -> None:
        """A rule is known: without the empty text, with it, and whether it has it."""
        if not self.nodes.stacked[node] and self.nodes.depth[node] < MAX_INLINE:        # whoever walks it recurses
            self.put[name] = node
        else:
            self.rules[self.ids[name]] = positive
            self.put[name] = self._used(self.ids[name], optional)

    def _visit(self, name: str, exprs: dict[str, Expr]) -> None:
        """Makes a rule known, and before it those that it refers to: most are already, so it is tried first, and only where it has to wait it is
        asked for all of them."""
        path, uses, asked = [name], {}, set()
        while path:
            tick()
            name = path[-1]
            if name not in self.put:
                try:
                    self._alone(name, exprs[name])
                except _Waits:
                    left = self._again(name, exprs)
                    if left is None or left and name in asked:
                        uses[name] = self._names(exprs[name])
                        left = [one for one in uses[name] if one not in self.put]
                        if not uses.keys().isdisjoint(left):    # one of them waits for this one
                            left = self._solve(name, exprs, uses)
                    asked.add(name)
                    path += left
                    continue
            path.pop()

    def _again(self, name: str, exprs: dict[str, Expr]) -> list[str] | None:
        """Takes a cycle that came before, as that of any JSON, if the rule belongs to one: what must be known for that; None: it does not."""
        for key, found in self.nodes._cycles.items():
            before = found[0]
            if before.get(name) is exprs[name] and all(exprs.get(one) is expr for one, expr in before.items()):
                uses = key[len(before):]
                left = [one for one, _ in uses if one not in self.put]
                if left or any(self.put[one] != node for one, node in uses):
                    return left if left and exprs.keys() >= set(left) else None
                self._cycle(before, {one for one, _ in uses})
                return []
        return None

    def _solve(self, name: str, exprs: dict[str, Expr], uses: dict[str, set[str]]) -> list[str]:
        """Makes a rule known that leads to itself, and all that it refers to. uses: what rules refer to, as far as that is known."""
        graph, todo = {}, [name]
        while todo:
            name = todo.pop()
            if name not in graph:
                uses[name] = uses.get(name) or self._names(exprs[name])
                graph[name] = {one for one in uses[name] if one not in self.put}
                todo += graph[name]
        for component in components(graph):
            name = component[0]
            if len(component) > 1 or name in graph[name]:
                self._cycle({name: exprs[name] for name in sorted(component)}, set().union(*map(uses.get, component)))
            else:
                self._alone(name, exprs[name])
        return []

    def _alone(self, name: str, expr: Expr) -> None:
        """Makes a rule known that does not lead to itself."""
        node = self._convert(expr, name, 0)
        self._settle(name, self.nodes.positive(node), node, self.nodes.nullable[node])

    def _cycle(self, exprs: dict[str, Expr], uses: set[str]) -> None:
        """Rules that lead to each other, and whatever they use. The same ones keep their numbers, so all grammars have the same nodes of them."""
        key = *((name, id(expr)) for name, expr in exprs.items()), *((name, self.put[name]) for name in sorted(uses - exprs.keys()))
        cycles = self.nodes._cycles
        found = cycles.pop(key, None)
        if found is None:
            self._solving = True
            made = self._made_of(exprs)
            self._solving = False
            found = exprs, {name: self.ids[name] for name in exprs}, made, {name: self.put[name] for name in exprs}
            if len(cycles) >= MAX_CYCLES:
                del cycles[next(iter(cycles))]      # the one that was not used for longest
        cycles[key] = found                         # holding the expressions keeps their ids from being used again
        for into, more in zip((self.ids, self.rules, self.put), found[1:]):
            into |= more

    def _made_of(self, exprs: dict[str, Expr]) -> dict[int, int]:
        """What becomes of rules that lead to each other."""
        rules = {}
        for name, expr in exprs.items():
            node, rule = self._convert(expr, name, 0), self.ids[name]
            rules[rule] = self._loop(rule, node) if rule in self.refs(node) else node
        optional = self._least(rules, lambda node, found: self._matches(node, found, empty=True))
        rules = {rule: self.nodes.positive(self._normalize(node, optional)) for rule, node in rules.items()}
        self._remove_left_recursion(rules)
        rules = self._prune(rules)
        self.rules |= rules
        for name in exprs:
            rule, is_optional = self.ids[name], self.ids[name] in optional
            node = rules.get(rule, NEVER)
            self._settle(name, node, self.nodes.alt([EMPTY, node]) if is_optional else node, is_optional)
        return {rule: self.rules[rule] for rule in rules}

    def _names(self, expr: Expr) -> set[str]:
        """The rules that an expression refers to."""
        seen, found, todo = set(), set(), [expr]
        while todo:
            one = todo.pop()
            kind = type(one)
            if kind is Ref:
                found.add(one.name)
            elif kind is not Byte and kind is not But and id(one) not in seen and not self._is_plain(one):
                seen.add(id(one))
                todo += (one.item,) if kind is Repeat else [part for part in one.parts if type(part) is not Byte]
        tick()
        return found & self.ids.keys()

    def _is_plain(self, expr: Expr) -> bool:
        """Whether it is known, and has no references."""
        return id(expr) in self.nodes._known or id(expr) in self._made and id(expr) not in self._refer

    def _convert(self, expr: Expr, rule: str, depth: int) -> int:
        """The node of an expression. rule: where it stands, for the user."""
        kind = type(expr)
        if kind is Ref:
            return self._reference(expr.name, rule)
        found = self._made.get(id(expr))
        if found is None:
            return self._byte(expr) if kind is Byte else self._compound(expr, rule, depth)
        self.met += id(expr) in self._refer
        return found

    def _byte(self, expr: Byte) -> int:
        node = self._made[id(expr)] = self.nodes.byte(expr.mask)
        if id(expr) in SINGLE:
            self.nodes.single[id(expr)] = node
        return node

    def _compound(self, expr: Cat | Or | Repeat | But, rule: str, depth: int) -> int:
        """The node of an expression that was not made yet."""
        nodes, made, kind, key = self.nodes, self._made, type(expr), id(expr)
        known = nodes._known.get(key)
        if known is not None and known[0] is expr:
            made[key] = known[1]
            return known[1]
        if depth > MAX_DEPTH:
            raise self._too_large(f"nested deeper than {MAX_DEPTH}", rule)
        count, met = self.count, self.met
        if kind is Repeat:
            if expr.low < 0 or (expr.high is not None and expr.high < expr.low):
                raise GrammarError(f"a repeat of {expr.low} to {expr.high} times, in rule {rule}", "repeat", rule)
            node = nodes.rep(self._convert(expr.item, rule, depth + 1), expr.low, expr.high)
            self.count += 1
        elif kind is But:
            node = nodes.but(self._convert(expr.item, rule, depth + 1), expr.words)
            self.count += len(expr.words)
        else:
            exprs, at = expr.parts, 0
            ids = list(map(id, exprs))
            parts = list(map(made.get, ids))
            for _ in range(parts.count(None)):
                at = parts.index(None, at)
                part, of = exprs[at], type(exprs[at])
                parts[at] = (self._reference(part.name, rule) if of is Ref else self._byte(part) if of is Byte else
                             self._compound(part, rule, depth + 1) if ids[at] not in made else made[ids[at]])   # it may come twice
            if self.met == met and not self._refer.isdisjoint(ids):
                self.met += 1
            node = nodes.alt(parts) if kind is Or else self._joined(parts)
            self.count += len(parts)
        if not self.count & 7:                      # whoever makes nodes pauses, but these may all be there
            tick()
        if self.count > MAX_PARTS:
            raise self._too_large(f"more than {MAX_PARTS} parts", rule)
        if self.met == met:
            made[key] = node
            if self.count - count > 16:
                if len(nodes._known) >= MAX_KNOWN:
                    nodes._known.clear()
                nodes._known[key] = expr, node      # holding `expr` keeps its id from being used again
        elif not (self._solving and nodes.stacked[node]):
            made[key] = node
            self._refer.add(key)
        return node

    def _joined(self, parts: list[int]) -> int:
        """The cat of parts, with runs as repeats."""
        nodes = self.nodes
        if 1 < len(parts) <= CHUNK and nodes.special.isdisjoint(parts):
            items = list(map(nodes.items.__getitem__, parts))
            if True not in map(operator.eq, items, items[1:]):          # as most are: there is nothing to put together
                return nodes._cat(parts)
        return nodes.cat(self._runs(parts))

    def _reference(self, name: str, rule: str) -> int:
        """What stands for a rule in another."""
        self.met += 1
        found = self.put.get(name)
        if found is None:
            if name not in self.ids:
                raise GrammarError(f"rule {name} is not defined", name, rule)
            if not self._solving:
                raise _Waits
            found = self.nodes.ref(self.ids[name])
        return found

    def _too_large(self, what: str, rule: str) -> GrammarError:
        return GrammarError(f"the grammar is too large: {what}, in rule {rule}", "grammar", rule)

    def _runs(self, parts: list[int]) -> list[int]:
        """Parts of a Cat, many equal ones as a repeat: x{a,b} x{c,d} is x{a+c,b+d}."""
        items = list(map(self.nodes.items.__getitem__, parts))
        twice = list(itertools.compress(zip(parts, parts[1:]), map(operator.eq, items, items[1:])))
        if not twice or len(twice) < RUN - 1 and self.nodes.letters.issuperset(itertools.chain(*twice)):
            return parts                            # as words with double letters
        found: list[int] = []
        for item, run in itertools.groupby(map(self.nodes.bounds, parts), key=lambda bounds: bounds[0]):
            _, lows, highs = zip(*run)
            low, high = sum(lows), None if None in highs else sum(highs)
            many = len(lows) >= RUN or len(lows) > 1 and (high is None or self.nodes.nullable[item] or not low)
            if many and max(low, high or 0) <= MAX_COUNT:
                found.append(self.nodes.rep(item, low, high))
            else:
                found += [self.nodes.rep(item, low, high) for low, high in zip(lows, highs)]
        return found

    def _inline(self, rules: dict[int, int]) -> None:
        """Rules without references are put where they are used: pieces can then be longer than a rule."""
        known: dict[int, int] = {}
        for component in components({rule: self.refs(node) & rules.keys() for rule, node in rules.items()}):
            for rule in component:
                node = self._replace(rules[rule], known)
                rules[rule] = node = self._loop(rule, node) if rule in self.refs(node) else node
                if not self.nodes.stacked[node] and self.nodes.depth[node] < MAX_INLINE:
                    known[self.nodes.ref(rule)] = node

    def _loop(self, rule: int, node: int) -> int:
        """A rule that comes back to itself at its ends alone, X = x X | b, as the loop x* b."""
        nodes, parts = self.nodes, self._tail(node, rule)
        if parts is None:
            return node
        ends, turns = (nodes.alt(part) for part in parts)
        return nodes.rep(turns, 1, None) if ends == turns else nodes.cat([nodes.rep(turns, 0, None), ends])

    def _tail(self, node: int, rule: int) -> tuple[list[int], list[int]] | None:
        """(what does not end in the rule, what precedes it in what does); None if it is anywhere else."""
        kind, *parts = self.nodes.keys[node]
        if rule not in self.refs(node):
            return [node], []
        if kind == "ref":
            return [], [EMPTY]
        if kind == "rep" or kind == "cat" and any(rule in self.refs(part) for part in parts[:-1]):
            return None
        ends, turns = [], []
        before = parts[:-1] if kind == "cat" else []
        for part in parts[len(before):]:
            found = self._tail(part, rule)
            if found is None:
                return None
            ends += [self.nodes.cat([*before, x]) for x in found[0]]
            turns += [self.nodes.cat([*before, x]) for x in found[1]]
        return ends, turns

    def _replace(self, node: int, known: dict[int, int]) -> int:
        """The node with some of its references replaced; `known` begins with these, and remembers what was done."""
        if not self.nodes.stacked[node] or node in known:
            return known.get(node, node)
        kind, *parts = self.nodes.keys[node]
        if kind == "ref":
            return node
        if kind == "rep":
            known[node] = self.nodes.rep(self._replace(parts[0], known), *parts[1:])
        else:
            parts = [self._replace(part, known) for part in parts]
            known[node] = self.nodes.cat(self._runs(parts)) if kind == "cat" else self.nodes.alt(parts)
        return known[node]

    def _matches(self, node: int, found: set[int], empty: bool) -> bool:
        """Whether the node matches anything (`empty`: the empty text), if the rules in `found` do, and those that are known."""
        kind, *parts = self.nodes.keys[node]
        if not self.nodes.stacked[node]:
            return self.nodes.nullable[node] if empty else node != NEVER
        if kind == "ref":
            return parts[0] in found or not empty and parts[0] in self.rules
        if kind == "rep":
            return parts[1] == 0 or self._matches(parts[0], found, empty)
        return (all if kind == "cat" else any)(self._matches(part, found, empty) for part in parts)

    def _least(self, rules: dict[int, int], holds: Callable[[int, set[int]], bool]) -> set[int]:
        """The least set of rules that holds."""
        users: dict[int, list[int]] = {}
        for rule, node in rules.items():
            for ref in self.refs(node):
                users.setdefault(ref, []).append(rule)
        found: set[int] = set()
        todo = list(rules)
        while todo:
            rule = todo.pop()
            tick()
            if rule not in found and holds(rules[rule], found):
                found.add(rule)
                todo += users.get(rule, ())
        return found

    def refs(self, node: int) -> frozenset[int]:
        """The rules in a node."""
        if not self.nodes.stacked[node]:
            return frozenset()
        found = self._refs.get(node)
        if found is None:
            kind, *parts = self.nodes.keys[node]
            parts = parts[:1] if kind == "rep" else parts
            found = self._refs[node] = frozenset(parts) if kind == "ref" else frozenset().union(*map(self.refs, parts))
        return found

    def _normalize(self, node: int, optional: set[int]) -> int:
        """The node, with a choice of the empty text at rules that match it."""
        nodes = self.nodes
        if not nodes.stacked[node]:
            return node
        found = self._normal.get(node)
        if found is None:
            kind, *parts = nodes.keys[node]
            if kind == "ref":
                found = nodes.alt([EMPTY, node]) if parts[0] in optional else node
            elif kind == "rep":
                found = nodes.rep(self._normalize(parts[0], optional), *parts[1:])
            else:
                found = (nodes.cat if kind == "cat" else nodes.alt)([self._normalize(part, optional) for part in parts])
            self._normal[node] = found
        return found

    # ---- left recursion

    def leading(self, node: int) -> set[int]:
        """The rules that the node may begin with."""
        kind, *parts = self.nodes.keys[node]
        if kind == "ref":
            return set(parts)
        found: set[int] = set()
        if self.nodes.stacked[node]:
            for part in parts[:1] if kind == "rep" else parts:
                found |= self.leading(part)
                if kind == "cat" and not self.nodes.nullable[part]:
                    break
        return found

    def _remove_left_recursion(self, rules: dict[int, int]) -> None:
        graph = {rule: self.leading(node) & rules.keys() for rule, node in rules.items()}
        for component in components(graph):
            if len(component) > 1 or component[0] in graph[component[0]]:
                self._unroll(component, rules)
        self._inline(rules)

    def _unroll(self, component: list[int], rules: dict[int, int]) -> None:
        """A_m = A_j x | ... | b_m: every A_i becomes OR_j b_j path(j, i)."""
        nodes, members = self.nodes, set(component)
        begins, steps, units = {}, {j: {} for j in component}, {j: {j} for j in component}
        for m in component:
            begins[m], heads = self._split(rules[m], members)
            for j, rests in heads.items():
                steps[j][m] = nodes.alt(nodes.positive(rest) for rest in rests)
                if any(nodes.nullable[rest] for rest in rests):
                    units[j].add(m)
        if len(component) == 1:
            rules[m] = nodes.cat([begins[m], nodes.rep(steps[m].get(m, NEVER), 0, None)])
            return
        reach = {j: _reach(units, j) for j in component}
        names: dict[tuple[int, int], int] = {}
        todo: list[tuple[int, int]] = []

        def after(j: int, i: int) -> int:           # what may follow A_j, to make it an A_i
            if (j, i) not in names:
                names[j, i] = nodes.new_rule()
                todo.append((j, i))
            return nodes.alt([EMPTY, nodes.ref(names[j, i])] if i in reach[j] else [nodes.ref(names[j, i])])

        for i in component:
            rules[i] = nodes.alt(nodes.cat([begins[j], after(j, i)]) for j in component if begins[j] != NEVER)
            while todo:
                j, to = todo.pop()
                rules[names[j, to]] = nodes.alt(
                    nodes.cat([step, after(m, to)]) for k in reach[j] for m, step in steps[k].items() if step != NEVER)
                if len(names) > MAX_PATHS:
                    raise GrammarError(f"left recursion through {len(component)} rules is too much", "left recursion")

    def _split(self, node: int, members: set[int]) -> tuple[int, dict[int, list[int]]]:
        """Without the empty text: what does not begin with one of the rules, and what follows the rule in what does."""
        nodes = self.nodes
        if not self.leading(node) & members:
            return nodes.positive(node), {}
        kind, *parts = nodes.keys[node]
        if kind == "ref":
            return NEVER, {parts[0]: [EMPTY]}
        if kind == "rep":
            item, low, high = parts
            parts = [item, nodes.rep(item, max(low - 1, 0), None if high is None else high - 1)]
        begins, heads = [], {}
        for i, part in enumerate(parts):
            begin, below = self._split(part, members)
            rest = EMPTY if kind == "or" else nodes.cat(parts[i + 1 :])
            begins.append(nodes.cat([begin, rest]))
            for rule, rests in below.items():
                heads.setdefault(rule, []).extend(nodes.cat([x, rest]) for x in rests)
            if kind != "or" and not nodes.nullable[part]:
                break
        return nodes.alt(begins), heads

    def _prune(self, rules: dict[int, int]) -> dict[int, int]:
        """The rules without what never ends."""
        useful = self._least(rules, lambda node, found: self._matches(node, found, empty=False))
        if len(useful) == len(rules):
            return rules
        known = {self.nodes.ref(rule): NEVER for rule in rules if rule not in useful}
        return {rule: self._replace(rules[rule], known) for rule in useful}


def normalize(nodes: Nodes, rules: Rules) -> tuple:
    """Rule number -> node in normal form, and the node of the start; behind it that of `closing`, if the rules have one. Raises GrammarError."""
    normal = _Normalizer(nodes, rules)
    return normal.rules, *(normal.begin(name) for name in (rules.start, rules.closing) if name is not None)


def _reach(graph: dict[int, set[int]], start: int) -> set[int]:
    seen, todo = {start}, [start]
    while todo:
        for to in graph[todo.pop()] - seen:
            seen.add(to)
            todo.append(to)
    return seen


def components(graph: dict[int, set[int]]) -> list[list[int]]:
    """Strongly connected components (Tarjan 1972), without recursion; those that others lead to come first."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    place: dict[int, int] = {}
    stack, found = [], []
    for root in graph:
        work = [] if root in index else [(root, iter(graph[root]))]
        while work:
            node, edges = work[-1]
            if node not in index:
                index[node] = low[node] = len(index)
                place[node] = len(stack)
                stack.append(node)
            for to in edges:
                if to not in index:
                    work.append((to, iter(graph[to])))
                    break
                low[node] = min(low[node], low[to])     # a finished component has low = infinity
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = place[node]
                    found.append(stack[at:])
                    for member in stack[at:]:
                        low[member] = len(graph) + 1
                    del stack[at:]
    return found


def _demo() -> None:
    """The essay's rules, and what becomes of them."""
    one = lambda text: Byte(1 << ord(text))  # noqa: E731
    rules = Rules({"A": Or((Cat((Ref("A"), one("x"))), Cat((Ref("B"), one("b"))))), "B": Or((Cat(()), Cat((Ref("B"), one("c")))))}, "A")
    nodes = Nodes()
    normal, start = normalize(nodes, rules)

    def show(node: int) -> str:
        kind, *parts = nodes.keys[node]
        if kind == "byte":
            return "".join(chr(b) for b in range(128) if parts[0] >> b & 1)
        if kind in ("ref", "text", "counted"):
            return f"<{parts[0]}>" if kind == "ref" else f"«{show(parts[0])}»" + (f"{{{parts[1]},{parts[2]}}}" if kind == "counted" else "")
        if kind == "rep":
            return f"({show(parts[0])}){{{parts[1]},{'' if parts[2] is None else parts[2]}}}"
        return "(" + (" " if kind == "cat" else " | ").join(map(show, parts)) + ")" if parts else '""'

    print('A ::= A x | B b      B ::= "" | B c')
    print("start:", show(start))
    for rule, node in normal.items():
        print(f"<{rule}> ::= {show(node):40s} cut: {show(nodes.cut(node))}")


if __name__ == "__main__":
    _demo()
